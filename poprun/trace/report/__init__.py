"""The report of a timeline, which says what held a job up: numbers, sentences and pictures."""
