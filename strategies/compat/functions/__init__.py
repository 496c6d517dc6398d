"""Pipelines of functions, as the original declares them: what they are made of, learn from and feed out."""
