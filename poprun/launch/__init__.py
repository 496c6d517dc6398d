"""The plan of a launch: placement, environment variables, and the mpirun command."""
