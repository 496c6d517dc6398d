"""What becomes of a job: events and times come in, actions go out, and no clock runs here."""
