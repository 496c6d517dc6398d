"""The tasks of evaluations and predictions on JAX, and the metric that is merged exactly."""
