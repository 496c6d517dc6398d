"""The report on a timeline: findings about delays, as numbers, sentences and pictures."""
