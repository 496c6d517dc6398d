"""Example programs; start with `python -m popdist.examples.digits`."""
