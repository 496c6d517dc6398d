"""The process above each instance, on its host."""
