"""Whether instances, programs and ways to compute the same agree, to the last bit."""
