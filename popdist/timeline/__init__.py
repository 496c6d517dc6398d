"""Records what an instance does, event by event, into a file of its own.

`poprun timeline` puts the files of all instances together. Nothing here is loaded unless a job asks for it.
"""
