"""Evaluation of the instances' recordings: one trace of the job, and a report on its delays."""
