"""Collectives by messages: reduction plans, executed over a link."""
