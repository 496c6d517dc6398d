"""Curves as pictures, without any library for it."""
