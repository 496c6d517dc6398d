"""What held a job up, as numbers, sentences and pictures."""
