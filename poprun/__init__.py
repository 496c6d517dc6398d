"""The launcher: starts a program as several instances with Open MPI, watches them, and reports failures."""
