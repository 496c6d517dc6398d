"""The schedulers from which poprun gets its hosts if the user names none: one file for each kind."""
