"""The tasks of evaluations and predictions on JAX, and a mean that is merged exactly."""
