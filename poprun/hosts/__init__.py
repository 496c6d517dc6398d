"""The hosts of a job: their sources, their facts, and the ways to reach them."""
