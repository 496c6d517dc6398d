"""Interfaces of the original, as thin translations to the interfaces of this package."""
