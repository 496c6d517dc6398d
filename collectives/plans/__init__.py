"""Reduction plans: the messages and additions of a reduction, decided as data before anything moves."""
