"""The memory of a training on PyTorch, as far as it is known before anything runs: all but what autograd keeps."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from strategies.exchange.means import Bucket
from strategies.memory.plan import DEVICE, HOST, SHARED, Held, MemoryPlan
from strategies.replicas.replicas import Replicas
from strategies.roles import Batch
from strategies.torch.gradient_plan import GradientPlan
from strategies.torch.tensors import tensors_of
from strategies.torch.training import Training


def plan_memory(
    replicas: Replicas,
    training: Training,
    plan: GradientPlan,
    buckets: Sequence[Bucket],
    is_private: bool,
    batch: Batch,
) -> MemoryPlan:
    """What this instance needs.

    Args:
        replicas: where the replicas are.
        training: what is changed.
        plan: how gradients travel.
        buckets: of it, with memory for the means or none.
        is_private: whether instances of a host have the means for themselves.
        batch: of this instance.
    """
    communicator, local = replicas.communicator, len(replicas.local_replicas)
    state = training.state()
    gradients = sum(each.size * each.dtype.itemsize for layout in plan.layouts for each in layout.buffers)
    shared = sum(
        array.nbytes
        for bucket in buckets
        for number, array in enumerate(bucket.results)
        if not is_private and number not in bucket.scattered and communicator.is_shared(array.nbytes)
    )
    means = sum(array.nbytes for bucket in buckets for array in bucket.results) - shared
    quantised = 0 if plan.quantised is None else plan.quantised.new_result().nbytes
    dataset = replicas.dataset_of(batch)
    ahead, rows = (0 if dataset is None else dataset.num_read_ahead), _nbytes(tensors_of(batch))
    held = [
        Held("variables", _nbytes(state.variables), HOST, "once for all local replicas"),
        Held("optimizer state", _nbytes(state.optimizer_state["state"]), HOST, "after the first step"),
        Held("model state", _nbytes(state.model_state), HOST),
        Held("buffers of replicas", local * _nbytes(state.model_state), HOST, f"of {local} replicas"),
        Held("variables of replicas", _nbytes(training.memory_of_replicas.copies), DEVICE, "on `replica_device`"),
        Held("residuals", _nbytes(training.residuals), HOST, "of int8 gradients"),
        Held("gradients", local * gradients, HOST, f"of {local} replicas, as they travel"),
        Held("mean gradients", means + quantised, HOST),
        Held("mean gradients in the window", shared, SHARED, "once for the instances of a host"),
        Held("window", communicator.window_bytes, SHARED, "through which they exchange"),
        Held("batch", rows, HOST),
        Held("batches read ahead", ahead * rows, HOST, f"{ahead} of them"),
    ]
    return MemoryPlan(replicas.instance.index, local, [each for each in held if each.nbytes])


def _nbytes(tree: object) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes"))
