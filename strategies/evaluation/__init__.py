"""Evaluating and predicting, where nothing is trained."""
