"""Deterministic operations on GPUs: the same program gives the same bits in each run and in each process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache

from popdist.xla import DETERMINISTIC, FLAGS_VARIABLE, deterministic_setting, names_deterministic
from strategies.jax.programs.xla_pitfalls import jax_has_started
from strategies.late_jax import jax

logger = logging.getLogger(__name__)

WAY_OUT = "Defaults(deterministic=False) allows operations whose bits differ from run to run (docs: gpus)"
_COMPLAINT = "determinis"


def use_deterministic_operations(environ: MutableMapping[str, str]) -> None:
    """Make XLA compile deterministic operations on GPUs; warn once if JAX has started already without them.

    XLA then takes the first kernel that works and times none, except for kernels in a cache of timings
    (xla/backends/autotuner/autotuner.cc). JAX keeps such a cache beside its executables. Other programs may have filled
    it, so it is turned off.

    Args:
        environ: `os.environ`, from which XLA reads its flags when JAX starts.
    """
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")
    if not jax_has_started():
        environ.update(deterministic_setting(environ))
    elif not names_deterministic(environ):
        _warn_of_start()


@contextmanager
def way_out_of_refusals() -> Iterator[None]:
    """Add a note with the way out to XLA's error about an operation that has no deterministic form."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _COMPLAINT in str(error):
            error.add_note(WAY_OUT)
        raise


@cache
def _warn_of_start() -> None:
    logger.warning(
        "JAX has started without %s=true, so programs on GPUs may give other bits in each run; make the strategy "
        "before you use JAX, put the flag into %s, or choose that with Defaults(deterministic=False)",
        DETERMINISTIC,
        FLAGS_VARIABLE,
    )
