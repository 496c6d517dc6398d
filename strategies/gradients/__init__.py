"""What a replica computes in a step, its gradients and model state, and how these leave it."""
