"""What runs when in a pipeline, one file for each schedule; all are found by the names of their files."""
