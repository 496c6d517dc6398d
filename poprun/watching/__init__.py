"""A running job: what happens to it is told to the machine, and what that says is done."""
