"""What the instances print: tagged, kept in files, and shown."""
