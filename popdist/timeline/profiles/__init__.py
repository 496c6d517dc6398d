"""What the profiler of JAX or PyTorch sees of some steps of an instance, to be drawn into the timeline of the job."""
