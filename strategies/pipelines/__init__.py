"""Pipelines: a replica spans several devices, and each device runs some of its stages."""
