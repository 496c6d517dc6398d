"""Interfaces of the original, as thin translations to those of this package."""
