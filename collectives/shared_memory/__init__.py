"""Collectives through shared memory: each rank of a host reduces one slice."""
