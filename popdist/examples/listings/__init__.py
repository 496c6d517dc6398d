"""Programs of the original documentation, as they run here."""
