"""Comparisons, to the last bit, of instances, programs and ways to compute the same."""
