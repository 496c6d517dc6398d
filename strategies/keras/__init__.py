"""Models of Keras on the replicas of a strategy; loaded when a scope is entered and Keras is there."""
