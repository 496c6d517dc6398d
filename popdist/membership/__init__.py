"""The members of a job: how its processes connect, who is active or a spare, and how some leave, join and follow."""
