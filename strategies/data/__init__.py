"""Data sets that are split among replicas in the same way on any number of instances."""
