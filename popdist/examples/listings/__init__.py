"""Programs of the original documentation in the form that runs here."""
