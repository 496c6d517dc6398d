"""Pipelines: a replica spans several devices, each with some of its stages."""
