"""Gradients as flat arrays, as they travel between instances."""
