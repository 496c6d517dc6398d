"""Infeeds and outfeeds of loops that run on the devices."""
