"""Warnings in programs about libraries that do not know the other instances."""
