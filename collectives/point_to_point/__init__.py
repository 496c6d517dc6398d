"""Ranks that are connected by a link: what is added up goes around in a ring."""
