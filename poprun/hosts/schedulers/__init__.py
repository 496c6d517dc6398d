"""The schedulers that give poprun its hosts when nobody names them: one file for each kind."""
