"""Values of programs: of single replicas, of loss functions, and of the whole training."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import strategies.trees as trees
from strategies.loss_scaling import LossScale
from strategies.typing import Leaf, Number, OptimizerState, Tree, Variables

if TYPE_CHECKING:
    from strategies.stored_shards import StoredShards


@dataclass(frozen=True)
class PerReplica:
    """One value per local replica.

    Example::

        offsets = strategy.per_replica(lambda r: float(r))  # on an instance with replicas 4 to 7:
        list(offsets)                                       # [4.0, 5.0, 6.0, 7.0]

    Attributes:
        values: Pytrees of the local replicas, in replica order.
        replicas: Global indices of these replicas if a strategy made the object; None for the local replicas of the
            instance that uses it.
    """

    values: Sequence[Tree]
    replicas: range | None = field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, position: int) -> Tree:
        return self.values[position]


@dataclass(frozen=True)
class Shared:
    """A pytree that every replica gets as a whole."""

    value: Tree


def as_per_replica(value: Tree, replicas: range) -> Tree:
    """Turn a tree with `PerReplica` leaves into one `PerReplica` of trees; return any other tree unchanged.

    Args:
        value: Pytree whose leaves may be `PerReplica`.
        replicas: Global indices of the local replicas.

    Raises:
        ValueError: If a `PerReplica` does not have one value per local replica, or belongs to other replicas.
    """
    parts = [leaf for leaf in trees.leaves(value) if isinstance(leaf, PerReplica)]
    for part in parts:
        _check(part, replicas)
    if isinstance(value, PerReplica) or not parts:
        return value
    return PerReplica(
        tuple(
            trees.map(lambda leaf, i=position: leaf[i] if isinstance(leaf, PerReplica) else leaf, value)
            for position in range(len(replicas))
        ),
        replicas,
    )


def _check(part: PerReplica, replicas: range) -> None:
    if len(part) != len(replicas):
        raise ValueError(
            f"a PerReplica has {len(part)} values, but this instance has {len(replicas)} replicas; "
            "make it with strategy.per_replica"
        )
    if part.replicas not in (None, replicas):
        raise ValueError(
            f"a PerReplica belongs to the replicas {list(part.replicas)}, but this instance has {list(replicas)}; make "
            "it with the strategy that uses it, and make it again after an instance was lost"
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


@dataclass(frozen=True)
class TrainState:
    """Everything that training changes.

    Attributes:
        variables: Pytree of arrays with the same bits on every instance.
        optimizer_state: State of the optimizer; if it is sharded, this instance's part.
        step: Number of steps so far.
        loss_scale: Scale of the next loss; None without loss scaling.
        model_state: Pytree of arrays that every batch changes without gradients, or None. It has the same bits on every
            instance. A leaf that each replica has of its own has the local replicas along its first axis instead.
        held: Copies of another instance's parts, and the replicas for which parts are cut; None if no part would be
            lost with an instance, or the job does not go on after a loss.
    """

    variables: Variables
    optimizer_state: OptimizerState
    step: int
    loss_scale: LossScale | None = None
    model_state: Tree = None
    held: StoredShards | None = None

    def __post_init__(self) -> None:
        _alive[id(self)] = self


trees.register_dataclass(Outcome, ["loss", "metrics", "model_state", "outputs", "weight"], meta_fields=[])
trees.register_dataclass(LossScale, ["scale", "good_steps", "skipped"], meta_fields=[])
trees.register_dataclass(TrainState, ["variables", "optimizer_state", "loss_scale", "model_state"], ["step", "held"])

_alive: weakref.WeakValueDictionary[int, TrainState] = weakref.WeakValueDictionary()


def is_trained(leaf: Leaf) -> bool:
    """Return whether an array is part of a state that the program still holds, such as a variable or a moving mean."""
    alive = [(state.variables, state.optimizer_state, state.model_state) for state in list(_alive.values())]
    return any(leaf is other for other in trees.leaves(alive))


def check_state(state: object) -> None:
    """Check the state that is given to a step.

    Raises:
        TypeError: It is not a `TrainState`.
        ValueError: A step has used it up.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the state is of type {type(state).__name__}; give the result of trainer.init, and later the result of "
            "the previous step: state, metrics = trainer.step(state, batch)"
        )
    if are_used_up(state.variables):
        raise ValueError(
            f"this state was used up by step {state.step}; rebind it: state, metrics = trainer.step(state, batch)"
        )


def are_used_up(variables: Variables) -> bool:
    """Return whether a step has reused the memory of these variables for new ones."""
    return any([leaf.is_deleted() for leaf in trees.leaves(variables) if hasattr(leaf, "is_deleted")])  # in every step
