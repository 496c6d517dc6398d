"""What is said about a job when it is over: a few lines, or a file."""
