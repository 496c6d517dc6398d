"""The computation of a replica's gradients and model state in a step, and their way out of its programs."""
