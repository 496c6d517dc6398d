"""The engine on JAX: gradients, updates, devices of replicas, and feeds."""
