"""Preparation of JAX, whose devices and order of sums are fixed when it starts."""

import strategies

strategies.LocalStrategy(8)
