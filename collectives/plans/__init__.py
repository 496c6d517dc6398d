"""Reduction plans: which messages flow and what is added where, decided as data before anything moves."""
