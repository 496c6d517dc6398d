"""Pipelines of functions, as the original declares them: their stages, optimizer functions and outfeeds."""
