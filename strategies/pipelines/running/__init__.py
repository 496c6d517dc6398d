"""The execution of a pipeline: the programs of its stages, and a thread for each device of each replica."""
