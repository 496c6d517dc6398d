"""Keeping the installed jaxlib from wrong sums: its flag before JAX starts, a refusal where that is too late."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path

import jax
import jaxlib.version

from popdist.xla import FUSIONS, adds_up_wrongly, complain_of_sums, is_measured, is_overruled, right_sums_setting
from strategies.errors import DeviceError

logger = logging.getLogger(__name__)

_LIBRARY = "libjax_common.so"


def use_right_sums(environ: MutableMapping[str, str]) -> None:
    """Set what makes sums on CPUs right; it takes effect where JAX has not started.

    Args:
        environ: `os.environ`, from which XLA reads its flags when JAX starts; what is set stays there for child
            processes.
    """
    if not jax_has_started() and _can_be_wrong():
        environ.update(right_sums_setting(jaxlib.version.__version__, environ))


def insist_on_right_sums(environ: Mapping[str, str]) -> None:
    """Refuse to compute on CPUs with sums that may be wrong; call it once JAX has started.

    Args:
        environ: with XLA's flags, and the variable that overrules this.

    Raises:
        DeviceError: JAX has started without what `use_right_sums` sets, or the user has asked XLA for what is wrong.
    """
    complaint = complain_of_sums(jaxlib.version.__version__, environ) if _can_be_wrong() else None
    if complaint is None:
        return
    if not is_overruled(environ):
        raise DeviceError(complaint)
    _warn(complaint)


def jax_has_started() -> bool:
    """Whether JAX has made its devices: then, and only then, it refuses another number of them."""
    number: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # JAX adds its options later
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


@cache
def _can_be_wrong() -> bool:
    """Whether the installed jaxlib adds up wrongly; a newer one than was looked at: as long as it knows the flag.

    XLA ends the process at a flag that it does not know.
    """
    version = jaxlib.version.__version__
    return adds_up_wrongly(version) and (is_measured(version) or _is_in_library(FUSIONS.lstrip("-")))


def _is_in_library(word: str) -> bool:
    """Whether jaxlib's library has a word in it: 15 ms where it does."""
    library = Path(jaxlib.__file__).with_name(_LIBRARY)
    if not library.is_file():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(word.encode()) >= 0


@cache
def _warn(complaint: str) -> None:
    """Once in a process."""
    logger.warning("%s", complaint)
