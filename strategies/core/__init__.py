"""The order of a training step, written once for all engines."""
