"""Ranks that share memory: each adds up a part of what lies there."""
