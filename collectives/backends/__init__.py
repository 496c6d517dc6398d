"""The backends, one file each; a backend's name is the name of its file."""
