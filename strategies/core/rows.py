"""The interface between an evaluation or prediction and the framework that computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from strategies.typing import Number, Tree


class EvaluationTask(ABC):
    """The work on every batch of an evaluation or prediction. An engine prepares equal tasks once.

    An engine runs the task for each replica and batch (JAX compiles it), and calls `told` with the result on the host.
    An error of either ends the pass; the state is unchanged.

    Attributes:
        title: The name of the work, for messages.
        is_exact: Whether the task gets only real rows, without padding; these come first in a batch.
    """

    title: ClassVar[str]
    is_exact: ClassVar[bool] = False

    @property
    def code(self) -> Callable[..., Tree]:
        """The function whose code decides the results: the user's, in a field `function`, or the task itself."""
        function: Callable[..., Tree] = getattr(self, "function", self)
        return function

    @abstractmethod
    def __call__(self, *arguments: Tree, **named: Tree) -> Tree:
        """Compute the results of a replica for its rows.

        Args:
            arguments: With JAX, traced: `variables, batch, mask, key`, and the model state if there is one. With
                PyTorch: `module, batch`.
            named: Not used.
        """

    @abstractmethod
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """Return this replica's results for the other instances, as a pytree of host arrays.

        The arrays have the same structure, shapes and dtypes on all replicas.

        Args:
            computed: The result of `__call__`, on the host.
            mask: Bool `[rows]`, False for padding.
        """

    def sums_of_weights(self, merged: Mapping[str, Tree]) -> Sequence[Number]:
        """Return sums of the weights of all rows, NaN if one is bad; empty if the task knows no weights.

        Args:
            merged: Metrics by name, merged over all rows.
        """
        return ()


@dataclass(frozen=True)
class ToldRows:
    """The results of one replica for its rows of a batch.

    Attributes:
        leaves: The arrays of the results, on the host.
        build: Function that makes the tree of the results from its leaves.
        mask: Bool `[rows]`, False for padding.
    """

    leaves: Sequence[np.ndarray]
    build: Callable[[Sequence[np.ndarray]], Tree]
    mask: np.ndarray

    @property
    def tree(self) -> Tree:
        """The results, as `EvaluationTask.told` returned them."""
        return self.build(self.leaves)


Told: TypeAlias = Sequence[ToldRows]
"""The results of several replicas for a batch, in the order of the replicas."""


@dataclass(frozen=True)
class Begun:
    """A batch that is being computed.

    Attributes:
        wait: Returns the results of the local replicas, or raises the error of one, after all replicas have stopped.
        ahead: Number of further batches that may begin before `wait` of this batch is called.
    """

    wait: Callable[[], Told]
    ahead: int = 0


def padded(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the real rows, which come first, followed by zeros for padding.

    Args:
        rows: Array `[at least the number of real rows, ...]`.
        mask: Bool, False for padding.
    """
    whole, count = np.zeros((len(mask), *rows.shape[1:]), rows.dtype), int(mask.sum())
    whole[:count] = rows[:count]
    return whole


def in_order(told: Told, is_interleaved: bool) -> Tree:
    """Return the results of all replicas for real rows, in the order of the data set.

    Args:
        told: The results for a batch, one for each row.
        is_interleaved: Whether rows come in rounds of one row per replica; see `EveryRow`.
    """

    def ordered(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.stack(arrays, axis=1 if is_interleaved else 0)
        return whole.reshape(-1, *arrays[0].shape[1:])

    counts = ordered([one.mask for one in told])
    of_leaves = zip(*(one.leaves for one in told), strict=True)
    return told[0].build([ordered(arrays)[counts] for arrays in of_leaves])
