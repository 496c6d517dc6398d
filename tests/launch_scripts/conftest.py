"""JAX's devices and how it adds are fixed when it starts."""

import strategies

strategies.IPUStrategy(8)
