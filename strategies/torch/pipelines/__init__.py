"""Pipelines of PyTorch modules: their stages, and a timetable that micro-batches follow on threads."""
