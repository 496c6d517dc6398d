"""Loads JAX and optax, most of what this package needs, without looking for garbage meanwhile.

A hundred thousand objects come that all stay. Python's collector looks through them 300 times and finds nothing: a
fifth of the processor time of `import strategies`.
"""

import gc

was_enabled = gc.isenabled()
gc.disable()
try:
    import jax  # noqa: F401
    import optax  # noqa: F401
finally:
    if was_enabled:
        gc.enable()
