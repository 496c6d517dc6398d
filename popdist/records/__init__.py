"""An instance's records for its supervisor and tools, and their requests to the instance.

This package does not import NumPy, MPI or JAX.
"""
