"""One file per backend; the name of a backend is the name of its file."""
