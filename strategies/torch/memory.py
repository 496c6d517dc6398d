"""The memory of a PyTorch training: a plan of the memory it needs, and glibc's settings for it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import strategies.trees as trees
from strategies.exchange.means import Bucket
from strategies.jax.memory.plan import DEVICE, HOST, Held, MemoryPlan, held_by_data, held_by_means
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.exchange.plan import TorchGradientPlan
from strategies.torch.tensors import tensors_of
from strategies.torch.training import TorchTraining
from strategies.typing import Batch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
_NEVER = -1
_LARGE_BYTES = 1 << 30
"""Blocks of at least this size, as data sets have, are returned to the kernel when they are freed."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def plan_memory(
    replicas: Replicas,
    training: TorchTraining,
    plan: TorchGradientPlan,
    buckets: Sequence[Bucket],
    batch: Batch,
    stays: bool = False,
) -> MemoryPlan:
    """Return the memory that this instance needs.

    Args:
        replicas: The replicas of all instances.
        training: The module, its optimizer, and their state.
        plan: The plan of the gradients.
        buckets: The buckets, with memory for their means on the host.
        batch: The batch of this instance.
        stays: Whether gradients stay on the device.
    """
    local, state = len(replicas.local_replicas), training.state()
    gradients = sum(each.size * each.dtype.itemsize for layout in plan.layouts for each in layout.buffers)
    quantised = 0 if plan.quantised is None else plan.quantised.new_result().nbytes
    is_on_host = training.memory_of_replicas.is_on_host
    where = HOST if is_on_host else DEVICE
    held = [
        Held("variables", _nbytes(state.variables), where, "once for all local replicas"),
        Held("optimizer state", _nbytes(state.optimizer_state["state"]), where, "after the first step"),
        Held("model state", _nbytes(state.model_state), where),
        Held("buffers at the beginning", _nbytes(state.model_state), where, "put back before each replica"),
        Held("residuals", _nbytes(training.residuals), HOST, "of int8 gradients"),
        Held("gradients", local.bit_length() * gradients, where, f"sums of {local} replicas")
        if stays
        else Held("gradients", local * gradients, HOST, f"of {local} replicas, as they travel"),
        *held_by_means(replicas, buckets, quantised, is_private=is_on_host),
        *held_by_data(replicas, batch, _nbytes(tensors_of(batch)), HOST),
    ]
    return MemoryPlan(replicas.instance.index, local, [each for each in held if each.nbytes])


def _nbytes(tree: object) -> int:
    return sum(int(leaf.nbytes) for leaf in trees.leaves(tree) if hasattr(leaf, "nbytes"))


def keep_freed_memory() -> bool:
    """Make glibc keep the memory that PyTorch frees, in the whole process, unless the environment sets this.

    By default glibc returns free memory at the end of its heap to the kernel, and large blocks at once. A training step
    frees its activations and gradients, and the next step needs as much again. The kernel then clears and maps each
    page anew, which took up to a third of a step of a small convolutional network. With this setting a process keeps
    the memory that its largest step needed.

    Returns:
        Whether glibc keeps memory now; False if the environment decides, or the C library is another one.
    """
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGE_BYTES))
