"""Preparation of JAX, whose devices and order of sums are fixed when it starts."""

import strategies

strategies.IPUStrategy(8)
