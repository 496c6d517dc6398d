"""Measurements of the speed of data sets and infeeds."""
