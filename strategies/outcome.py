"""The complete result of a loss function, of JAX or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import strategies.trees as trees
from strategies.typing import Number, Tree


@partial(
    trees.register_dataclass,
    data_fields=["loss", "metrics", "model_state", "outputs", "weight"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Outcome:
    """The complete result of a loss function. A loss function may also return the loss alone, or the loss and metrics.

    Attributes:
        loss: Floating-point scalar, the mean over the rows of the batch.
        metrics: Scalars by their names; training averages them over all replicas.
        model_state: Values that change with every batch and are not trained, such as moving means; None without any.
            With PyTorch always None: the buffers of the module are its model state.
        outputs: Outputs of the model for each row: arrays whose first axis is the rows of the batch; or None. With JAX,
            training does not compute them.
        weight: Finite scalar of at least 0 that the loss and metrics count with, such as the number of tokens of the
            batch; float32, so counts up to 2**24 are exact. Gradients, loss and metrics are then weighted means over
            all replicas and micro-batches: `sum(weight * value) / sum(weight)`. A weight of 0 leaves the values out,
            even if they are NaN; in a pipeline of JAX, or with collectives of replicas, the loss must be finite then.
            None: all count the same.
    """

    loss: Number
    metrics: Mapping[str, Number] = field(default_factory=dict)
    model_state: Tree = None
    outputs: Tree = None
    weight: Number | None = None

    @classmethod
    def of(cls, returned: Tree) -> Outcome:
        """Return an `Outcome` of a loss function's result: an `Outcome`, the loss and its metrics, or the loss."""
        if isinstance(returned, cls):
            return returned
        return cls(*returned) if isinstance(returned, tuple) and len(returned) == 2 else cls(returned)
