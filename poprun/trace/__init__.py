"""Puts what instances have recorded together: one trace, and a report that says what held a job up."""
