"""The command `poprun verify`, which proves that a program's bits do not depend on the spread of its replicas."""
