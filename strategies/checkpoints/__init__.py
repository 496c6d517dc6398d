"""Checkpoints: what is saved, how, and how it comes back."""
