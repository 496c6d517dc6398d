"""What carries a pipeline out: the programs of its stages, and a thread for each device of each replica."""
