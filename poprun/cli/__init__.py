"""What the user wants: options, configuration files, settings."""
