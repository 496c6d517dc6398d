"""`poprun top`: what a running job does, seen from another terminal or another host."""
