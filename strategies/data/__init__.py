"""Data sets, dealt out to replicas the same way on any number of instances."""
