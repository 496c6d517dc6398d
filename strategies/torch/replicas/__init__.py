"""The local replicas of an instance, which take turns with one PyTorch module."""
