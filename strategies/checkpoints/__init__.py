"""Checkpoints of a training: contents, files, saving and loading."""
