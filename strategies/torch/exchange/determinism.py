"""Deterministic operations of PyTorch on GPUs: the same program has the same bits in each run and in each process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache

import torch

from strategies.jax.programs.determinism import WAY_OUT

logger = logging.getLogger(__name__)

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: one of the two settings with which cuBLAS gives the same bits in each run."""
_DETERMINISTIC_WORKSPACES = (WORKSPACE, ":16:8")
_COMPLAINT = "deterministic"


def use_deterministic_operations(environ: MutableMapping[str, str]) -> None:
    """Make PyTorch use deterministic operations in this process. Call this before CUDA starts.

    An earlier choice of the user (`torch.use_deterministic_algorithms`, also with `warn_only`) is kept. cuDNN's
    benchmark of algorithms is turned off. PyTorch's filling of new memory is turned off, too, because it costs time and
    changes no result.

    Args:
        environ: `os.environ`, from which cuBLAS reads its workspace when CUDA starts.
    """
    if environ.get(WORKSPACE_VARIABLE) not in _DETERMINISTIC_WORKSPACES:
        _set_workspace(environ)
    torch.backends.cudnn.benchmark = False
    if not torch.are_deterministic_algorithms_enabled():
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined, unused-ignore]
        torch.use_deterministic_algorithms(True)


@contextmanager
def way_out_of_refusals() -> Iterator[None]:
    """Add a way out to PyTorch's error about an operation that has no deterministic form."""
    try:
        yield
    except RuntimeError as error:
        if _COMPLAINT in str(error) and WAY_OUT not in getattr(error, "__notes__", ()):
            error.add_note(WAY_OUT)
        raise


def _set_workspace(environ: MutableMapping[str, str]) -> None:
    if WORKSPACE_VARIABLE in environ or torch.cuda.is_initialized():
        _warn_of_workspace(environ.get(WORKSPACE_VARIABLE, ""))
    if WORKSPACE_VARIABLE not in environ:
        environ[WORKSPACE_VARIABLE] = WORKSPACE


@cache
def _warn_of_workspace(value: str) -> None:
    said = f"is {value!r}" if value else "was not set when CUDA started"
    logger.warning(
        "%s %s, so products on GPUs may have other bits in each run; set it to %s before the program starts, or "
        "accept other bits with Defaults(deterministic=False)",
        WORKSPACE_VARIABLE,
        said,
        WORKSPACE,
    )
