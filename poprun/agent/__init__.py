"""The agent: the process above each instance, on the instance's host."""
