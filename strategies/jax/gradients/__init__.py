"""The computation of a replica's gradients and model state in a step, and their transfer out of it."""
