"""The metrics of steps, and the files and services that receive them.

This package imports NumPy and no framework. If an array has `is_ready`, a device may still be computing it, so it is
read later.
"""
