"""Metrics on their way out: what is said of steps, and the files and services that it goes to.

Knows NumPy, and no framework: an array that is still being computed is one that can be waited for.
"""
