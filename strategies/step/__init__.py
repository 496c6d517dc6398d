"""The training step: gradients, their means, updates, and the Trainer around them."""
