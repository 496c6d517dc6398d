"""A running job: what becomes of its instances, what is said of that, and when it ends."""
