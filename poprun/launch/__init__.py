"""What is to be started where: placement, and the command for it."""
