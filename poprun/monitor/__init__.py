"""The view of a running job in `poprun top`, from another terminal or another host, and the summary of a job."""
