"""A data set that is dealt out to replicas, whose batches are tensors."""

from __future__ import annotations

from typing import Any

import jax
import torch

from strategies.data.datasets import DistributedDataset
from strategies.data.layout import Remainder
from strategies.roles import Data
from strategies.strategy import Strategy
from strategies.torch.tensors import as_array, tensors_of


def distribute_dataset(
    strategy: Strategy,
    source: Data,
    batch_size: int,
    seed: int = 0,
    *,
    shuffle: bool = True,
    remainder: Remainder = "drop",
    gradient_accumulation_count: int = 1,
    prefetch: int = 2,
) -> DistributedDataset:
    """`strategy.distribute_dataset` whose batches are tensors, with the dtypes that the source has.

    Args:
        strategy: whose replicas get their parts.
        source: a pytree of tensors or arrays, a `torch.utils.data.Dataset` with a length, or what `DistributedDataset`
            takes.
        batch_size: elements per replica and micro-batch.
        seed: of the shuffle, the same on all instances.
        shuffle: whether arrays and random access are shuffled.
        remainder: "drop" or "pad" what does not fill the last global batch.
        gradient_accumulation_count: micro-batches that each replica takes in one step, one after another.
        prefetch: how many batches are prepared ahead.
    """
    dataset = DistributedDataset(
        _of_arrays(source),
        batch_size=batch_size,
        total_replicas=strategy.replicas.num_replicas_in_sync,
        local_replicas=strategy.replicas.local_replicas,
        seed=seed,
        shuffle=shuffle,
        remainder=remainder,
        gradient_accumulation_count=gradient_accumulation_count,
        prefetch=prefetch,
        place=tensors_of,
        communicator=strategy.communicator,
        instruments=strategy.instruments,
    )
    strategy.replicas.adopt(dataset, gradient_accumulation_count * batch_size)
    return dataset


def _of_arrays(source: Any) -> Any:
    """The source with arrays for tensors."""
    if isinstance(source, torch.utils.data.TensorDataset):
        source = source.tensors
    return jax.tree.map(lambda leaf: as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf, source)
