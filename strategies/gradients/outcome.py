"""What a loss function returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
from jax.typing import ArrayLike

from strategies.roles import Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "metrics", "model_state", "outputs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Outcome:
    """What a loss function may return instead of the loss, or of the loss and metrics.

    Attributes:
        loss: a floating-point scalar, the mean over the rows of the batch.
        metrics: scalars by their names; training averages them over all replicas.
        model_state: what changes with every batch and is not trained, such as moving means; None where there is none.
        outputs: what the model says of each row: arrays whose first axis is the rows of the batch; None where nobody
            asks for it. Training does not compute it.
    """

    loss: jax.Array
    metrics: Mapping[str, ArrayLike] = field(default_factory=dict)
    model_state: Tree = None
    outputs: Tree = None

    @classmethod
    def of(cls, returned: Tree) -> Outcome:
        """Of what a loss function has returned: an `Outcome`, the loss and its metrics, or the loss."""
        if isinstance(returned, cls):
            return returned
        return cls(*returned) if isinstance(returned, tuple) and len(returned) == 2 else cls(returned)
