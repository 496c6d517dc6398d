"""Detection of the instance that this process is: one file per launcher, which `detection` tries in order.

This package does not import NumPy, MPI or JAX.
"""
