"""The metrics of steps, and the files and services that receive them.

This package imports NumPy and no framework. An array that a device still computes has `is_ready`, and is read later.
"""
