"""A module in the program's own training loop: its averaged gradients, and the turns of its replicas."""
