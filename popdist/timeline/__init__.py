"""The timeline of an instance: its events, recorded in a file of its own.

`poprun timeline` merges the files of all instances. This package is loaded only if the job is recorded.
"""
