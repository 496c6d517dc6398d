"""The output of the instances: tagged, kept in files, and shown."""
