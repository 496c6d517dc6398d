"""The engine of JAX: gradients, updates, devices of replicas, and feeds."""
