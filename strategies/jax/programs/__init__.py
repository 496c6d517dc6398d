"""Programs of JAX: how they are cut, compiled, and call the host."""
