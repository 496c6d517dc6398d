"""poprun's command line: options, configuration files, settings, help and log."""
