"""Collectives by messages: reduction plans, carried out over a link."""
