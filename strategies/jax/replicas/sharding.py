"""The sharding of values over replicas, and the values of the journal that JAX and pytrees know.

A batch of a distributed data set consists of ordinary arrays, which programs may take apart and put into other trees.
So each array of a batch is remembered as such for as long as it lives.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar, final

import numpy as np
from typing_extensions import override

import strategies.trees as trees
from strategies.core.journal import Nodes
from strategies.data.layout import Replication
from strategies.jax.replicas.devices import ReplicaDevices
from strategies.late_jax import is_jax_array, jnp
from strategies.typing import Batch, Leaf, Tree
from strategies.values import PerReplica, Shared, as_per_replica, is_trained

Fact = TypeVar("Fact")


class _ArrayFacts(Generic[Fact]):
    """A fact about arrays, without references that keep the arrays alive."""

    def __init__(self) -> None:
        self._of_identity: dict[int, tuple[weakref.ref[Any], Fact]] = {}

    def note(self, tree: Tree, fact: Fact) -> None:
        """Note the fact about all arrays of a tree."""
        for array in trees.leaves(tree):
            # Called before the array is freed, so before another one can have its id.
            forget = functools.partial(lambda identity, _: self._of_identity.pop(identity, None), id(array))
            self._of_identity[id(array)] = weakref.ref(array, forget), fact

    def of(self, leaf: Leaf) -> Fact | None:
        """Return the fact about a leaf of a tree, or None."""
        found = self._of_identity.get(id(leaf))
        return found[1] if found is not None and found[0]() is leaf else None


_replications = _ArrayFacts[Replication]()
_mirrored = _ArrayFacts[bool]()


def replication_of(leaf: Leaf) -> Replication | None:
    """Return the replicas among which an array of a batch is split; None for any other array."""
    return _replications.of(leaf)


def unchanging(batch: Tree) -> Tree:
    """Return the batch, with copies of the arrays that the program may change before the step has read them.

    Arrays of JAX and of data sets do not change, see `DataSource`.
    """
    return trees.map(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) and replication_of(leaf) is None else leaf, batch
    )


def mirrored(tree: Tree) -> Tree:
    """Return the tree, and note that all replicas share its arrays."""
    _mirrored.note(tree, True)
    return tree


class BatchSharding:
    """The sharding of values over the local replicas.

    Args:
        local: Local replicas.
        total_replicas: Number of replicas of all instances.
        batch_sizes: Rows of a replica in a step, for each data set that was distributed to these replicas; it may grow.
        find_devices: Function that returns the devices of the local replicas, and starts JAX.
    """

    def __init__(
        self,
        local: range,
        total_replicas: int,
        batch_sizes: Collection[int],
        find_devices: Callable[[], ReplicaDevices],
    ) -> None:
        self._replication = Replication(local, total_replicas)
        self._batch_sizes = batch_sizes
        self._devices = find_devices

    def batch(self, tree: Tree) -> Tree:
        """Return a host tree, with all local replicas along the first axis of its leaves, as a batch on the devices."""
        return self.noted(self._devices().place(tree))

    def noted(self, batch: Tree) -> Tree:
        """Return the batch, and note the replicas among which it is split."""
        _replications.note(batch, self._replication)
        return batch

    def split(self, tree: Tree) -> PerReplica:
        """Split a tree along the first axis of its leaves into one tree for each local replica.

        Raises:
            ValueError: The tree cannot be split evenly, or is a batch for other replicas.
        """
        self.check_batch(tree)
        trees.map(self._devices().replica_shape, tree)
        return PerReplica(tuple(self._devices().parts(tree)), self._replication.local)

    def shard(self, value: Tree) -> Tree:
        """Return the value; if a part of it differs between replicas, as one `PerReplica` of whole trees.

        Args:
            value: Pytree whose leaves may be `PerReplica`, arrays of a batch, and `Shared`.

        Raises:
            ValueError: A `PerReplica` or a batch is for other replicas.
        """
        return as_per_replica(trees.map(self._of_replicas, value), self._replication.local)

    def shard_argument(self, value: Tree) -> Tree:
        """Distribute a value as `shard` does, and refuse arrays that may have been computed from a batch.

        Raises:
            ValueError: As in `shard`; or it is unclear whether an array is to be split.
        """
        for leaf in trees.leaves(value):
            self._check_is_no_batch(leaf)
        return self.shard(value)

    def check_batch(self, batch: Batch) -> None:
        """Raise if a batch is split among other replicas than these.

        Raises:
            ValueError: An array of the batch is for other replicas.
        """
        own = self._replication
        for leaf in trees.leaves(batch):
            replication = _replications.of(leaf)
            if replication is not own and replication is not None and replication != own:
                raise ValueError(
                    f"the batch is dealt out among {replication}, but is used on {self._replication}; use batches of "
                    "the strategy that runs the program, and none from before an instance was lost"
                )

    def _of_replicas(self, leaf: Leaf) -> Tree:
        if isinstance(leaf, Shared):
            return leaf.value
        return leaf if replication_of(leaf) is None else self.split(leaf)

    def _check_is_no_batch(self, leaf: Leaf) -> None:
        rows, local = next(iter(getattr(leaf, "shape", ())), 0), len(self._replication.local)
        if local == 1 or not rows or rows not in [local * size for size in self._batch_sizes]:
            return
        if replication_of(leaf) is None and not _mirrored.of(leaf) and not is_trained(leaf):
            raise ValueError(
                f"an array of shape {list(leaf.shape)} is as long as a batch for the {local} replicas of this "
                "instance, but no data set gave it; write strategy.dealt(array) to give each replica its rows, or "
                "strategy.shared(array) to give all of it to every replica"
            )


# ---- values of the journal

_ARRAY = "jax:Array"


@final
class TreeNodes(Nodes):
    """Nodes of pytrees whose classes have names in modules, arrays of JAX, and `ShapeOfArray`."""

    @override
    def to_parts(self, value: Tree) -> tuple[str, Sequence[Tree]] | None:
        if is_jax_array(value):
            if value.weak_type:
                raise TypeError("a weakly typed array of JAX cannot be sent; give it a dtype")
            return _ARRAY, [np.asarray(value)]
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if kind is trees.ShapeOfArray:
            return name, [np.array(value.shape, np.int64), np.empty(0, value.dtype)]
        node = trees.node_of(value)
        if node is None or _class_of(name) is not kind:
            return None
        meta, children = node
        return name, [meta, *children]

    @override
    def from_parts(self, name: str, parts: Sequence[Tree]) -> Tree:
        kind = None if name == _ARRAY else _class_of(name)
        if name == _ARRAY or kind is trees.ShapeOfArray:
            return _of_arrays(name, parts)
        if kind is None:
            raise ValueError(f"this program has no class {name}")
        meta, *children = parts
        return trees.node_from(kind, meta, children)


def _of_arrays(name: str, parts: Sequence[Tree]) -> Tree:
    """Return an array of JAX or the shape of an array; its parts are arrays of NumPy."""
    match parts:
        case [np.ndarray() as array] if name == _ARRAY:
            return jnp.asarray(array)
        case [np.ndarray() as lengths, np.ndarray() as empty] if name != _ARRAY and lengths.dtype == np.int64:
            return trees.ShapeOfArray(tuple(lengths.tolist()), empty.dtype)
    raise ValueError(f"no {name} can be made from these {len(parts)} parts")


def _class_of(name: str) -> type | None:
    """Return the class of a name such as `strategies.jax.evaluation.mean:Mean`; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # attributes of lazy modules would import others
    return found if isinstance(found, type) else None
