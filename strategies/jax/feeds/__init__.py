"""Infeeds and outfeeds of the loops that run on the devices."""
