"""The arguments of a loss function in a pipeline, and the context of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from strategies.data.layout import is_in_program
from strategies.jax.gradients.model_state import control_words
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.programs.compilation import shapes_of
from strategies.jax.programs.jaxpr import Graph
from strategies.pipelines.running.stage_programs import StageArray, Staged, StepArguments
from strategies.pipelines.timetable import Places
from strategies.typing import Tree


@dataclass
class MicroBatch:
    """The micro-batch that is being traced.

    Attributes:
        number: The number of the micro-batch, an int32 scalar, from 0 in each update.
        key: A random key; None without training.
        model_state: The model state, as the stages traced so far have left it.
    """

    number: jax.Array
    key: jax.Array | None = None
    model_state: Tree = None


_current: ContextVar[MicroBatch | None] = ContextVar("micro_batch", default=None)


def get_current_iteration_counter() -> jax.Array:
    """Return the number of the micro-batch that a stage works on, from 0 in each update; an int32 scalar.

    Semantics: the original's operation of that name. Without a pipeline, as in evaluation, it is 0.

    Raises:
        RuntimeError: Outside of programs of replicas.
    """
    current = _current.get()
    if current is not None:
        return current.number
    if is_in_program():
        zero: jax.Array = jnp.int32(0)
        return zero
    raise RuntimeError(
        "get_current_iteration_counter counts the micro-batches of a pipeline, but no program of replicas is being "
        "traced here; call it in a stage"
    )


def get_random_key() -> jax.Array:
    """Return the random key of the micro-batch that a stage of a pipeline of functions works on, for dropout.

    The key differs for each replica, update and micro-batch, but not for stages. If several stages use it, each should
    fold in a number of its own:

        key = jax.random.fold_in(get_random_key(), 1)

    Raises:
        RuntimeError: Outside of stages of a pipeline of functions that trains.
    """
    key = None if (current := _current.get()) is None else current.key
    if key is None:
        raise RuntimeError(
            "get_random_key is for the stages of a pipeline of functions that trains, but there is none here; call it "
            "in a stage, and without training pass keys in through the infeed"
        )
    return key


def get_model_state() -> Tree:
    """Return the model state (moving means, counters) of a pipeline of functions, in a stage; see `Pipeline.init`.

    Only the stage that updates a leaf may use it: another stage would have to wait for it.

    Raises:
        RuntimeError: If there is no model state.
    """
    return _with_model_state("get_model_state").model_state


def update_model_state(**changes: Tree) -> None:
    """Set entries of the model state, a dictionary, in a stage of a pipeline of functions.

    Without training this does nothing: the given state stays.

        update_model_state(mean=0.9 * get_model_state()["mean"] + 0.1 * batch_mean)

    Args:
        changes: The new values, by name.

    Raises:
        RuntimeError: If there is no model state.
        ValueError: If a name is not in the model state.
    """
    current = _with_model_state("update_model_state")
    if unknown := changes.keys() - current.model_state.keys():
        known = ", ".join(map(repr, current.model_state))
        raise ValueError(
            f"{min(unknown)!r} is not in the model state, which has {known}; give init a first value of it"
        )
    current.model_state = {**current.model_state, **changes}


def _with_model_state(name: str) -> MicroBatch:
    current = _current.get()
    if current is None or current.model_state is None:
        raise RuntimeError(
            f"{name} is for stages of a pipeline of functions with a model state, but there is none here; give one: "
            "net.init(variables, model_state)"
        )
    return current


@contextmanager
def tracing(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Let stages that are traced in the block use this micro-batch, and leave their model state in it."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)


# ---- arguments

LOSS, TOTAL = range(2)
"""The first results of a micro-batch, before the leaves of the model state: the loss, and the sum of values so far."""


@dataclass(frozen=True)
class Arguments:
    """The flat arguments of a replica's computation for one micro-batch, and the computation.

    Attributes:
        program: The program of the replica.
        like: The arguments as pytrees of shapes: variables, micro-batch, its number, index of the replica, control
            words, model state, sum of the values so far.
        has_outputs: Whether outputs are computed.
    """

    program: ReplicaProgram
    like: tuple[Tree, ...]
    has_outputs: bool

    @classmethod
    def of(cls, program: ReplicaProgram, shapes: ReplicaShapes, has_outputs: bool) -> Arguments:
        """Return the arguments of a program, for values of these shapes."""
        return cls(
            program,
            (
                shapes.variables,
                program.micro_batch_of(shapes.batch),
                jax.ShapeDtypeStruct((), np.int32),
                jax.ShapeDtypeStruct((), np.int32),
                jax.ShapeDtypeStruct(control_words(0, False, 1.0).shape, np.int32),
                shapes.model_state,
                jax.ShapeDtypeStruct((program.places.num_values,), np.float32),
            ),
            has_outputs,
        )

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of all arguments, flat."""
        found: list[jax.ShapeDtypeStruct] = jax.tree.leaves(shapes_of(self.like))
        return found

    @property
    def places(self) -> tuple[range, ...]:
        """The numbers of each pytree's leaves."""
        counts = [len(jax.tree.leaves(tree)) for tree in self.like]
        ends = np.cumsum(counts).tolist()
        return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))

    @property
    def weights(self) -> tuple[int, ...]:
        """The numbers of the trained arguments."""
        numbers = jax.tree.unflatten(jax.tree.structure(self.like[0]), list(self.places[0]))
        return tuple(jax.tree.leaves(self.program.trainable.pick(numbers)))

    @property
    def varying(self) -> frozenset[int]:
        """The numbers of the arguments that differ between micro-batches."""
        _, batch, number, _, _, model_state, total = self.places
        return frozenset([*batch, *number, *model_state, *total])

    def loss(self, *leaves: jax.Array) -> tuple[jax.Array, jax.Array, list[jax.Array], Tree]:
        """Return the loss, the new sum of the values, the leaves of the new model state, and the outputs; traceable."""
        structure = jax.tree.structure(self.like)
        variables, part, number, index, control, model_state, total = jax.tree.unflatten(structure, leaves)
        own = (variables, part, number, index, control, model_state)
        with tracing(MicroBatch(number)):
            loss, values, outcome = self.program.loss_of_micro_batch(*own)
        after = [jnp.asarray(leaf) for leaf in jax.tree.leaves(outcome.model_state)]
        return loss, total + values, after, jax.tree.map(jnp.asarray, outcome.outputs) if self.has_outputs else None

    def carried(self, graph: Graph) -> tuple[dict[int, int], frozenset[int]]:
        """Return the carried arguments, each with its result; and the results that only repeat an argument."""
        *_, state, (total,) = self.places
        pairs = {number: TOTAL + 1 + place for place, number in enumerate(state)} | {total: TOTAL}
        same = {number for number, result in pairs.items() if graph.results[result] is graph.arguments[number]}
        changed = {number: result for number, result in pairs.items() if number not in same}
        return changed, frozenset(pairs[number] for number in same)

    def check_values_not_shared(self, staged: Staged, mapping: Places) -> None:
        """Raise if stages on different devices, or in different micro-batches, would share a value.

        Raises:
            ValueError: If stages on several devices read a variable; or if a stage reads a leaf of the model state that
                another stage makes.
        """
        for place, (path, _) in zip(self.places[0], jax.tree_util.tree_leaves_with_path(self.like[0]), strict=True):
            homes = [staged.homes[number] for number in staged.readers(place)]
            devices = {mapping[stage][own] for stage, own in homes if len(staged.stages[stage]) == len(mapping[stage])}
            if len(devices) > 1:
                raise ValueError(
                    f"stages {sorted({stage for stage, _ in homes})} use variable {jax.tree_util.keystr(path)}, but "
                    f"are on devices {sorted(devices)}; stages that share a variable must be on one device: map them "
                    "to the same one"
                )
        for place, name in zip(self.places[5], self.program.rule.names, strict=True):
            if place not in staged.carried:
                continue
            makers = staged.makers(staged.carried[place])
            if others := set(staged.readers(place)) - set(makers):
                raise ValueError(
                    f"leaf {name} of the model state is used by stage {staged.homes[min(others)][0]}, but updated by "
                    f"stage {staged.homes[makers[0]][0]}, after the other stage has begun the next micro-batch; use "
                    "the leaf only in the stage that updates it"
                )

    def given(
        self,
        variables: Sequence[StageArray],
        rows: Sequence[jax.Array | np.ndarray],
        index: StageArray,
        control: StageArray,
        model_state: Tree,
    ) -> StepArguments:
        """Return the arguments of a step of a replica."""
        of_variables, batch, (number,), (own,), (words,), state, (total,) = self.places
        count = self.program.num_micro_batches
        each: dict[int, Sequence[StageArray]] = {number: [np.int32(n) for n in range(count)]}
        for place, leaf in zip(batch, rows, strict=True):
            size = leaf.shape[0] // count
            each[place] = [leaf[n * size : (n + 1) * size] for n in range(count)]
        first = dict(zip(state, jax.tree.leaves(model_state), strict=True))
        first[total] = np.zeros(self.program.places.num_values, np.float32)
        lasting = {**dict(zip(of_variables, variables, strict=True)), own: index, words: control}
        return StepArguments(lasting, each, first)
