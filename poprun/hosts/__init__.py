"""The hosts of a job: where they come from, what they are like, how they are reached."""
