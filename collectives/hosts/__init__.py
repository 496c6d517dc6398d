"""Ranks on several hosts: those of one host give each other messages through shared memory, others over a network."""
