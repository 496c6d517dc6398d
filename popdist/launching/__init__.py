"""The launch of a function from a notebook or a script: its way to the instances, and the way back of results."""
