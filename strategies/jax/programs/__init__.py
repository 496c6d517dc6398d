"""The programs of JAX: how they are cut and compiled, and how they call the host."""
