"""The launcher: starts one program as several instances with Open MPI, watches them, and says who failed."""
