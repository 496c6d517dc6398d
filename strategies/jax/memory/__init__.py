"""The memory that a training takes, planned before anything runs."""
