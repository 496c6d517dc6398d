"""The outfeed: values that leave a compiled program while it runs, combined iteration by iteration."""

from __future__ import annotations

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from strategies.data.layout import Replication, is_in_program
from strategies.errors import FeedError
from strategies.jax.programs.feed_program import current_program
from strategies.jax.programs.xla_pitfalls import check_no_float64
from strategies.jax.replicas.devices import is_key
from strategies.jax.replicas.variables import MirroredVariable
from strategies.typing import Tree

Iteration = tuple[int, ...]
"""The numbers of the iterations of the loops around an `enqueue`, outermost first; empty outside of loops."""

Value = list[np.ndarray]

KEPT = 8
"""The number of values kept for a replica that is ahead of others, if only the last round is kept."""


class Rounds(ABC):
    """The values that replicas have enqueued; a round is one value of each replica, all from one iteration.

    The queue calls `put` under its lock, in any order of replicas, and `end` after each program. A `put` that raises
    drops its value; complete rounds stay.

    Args:
        replicas: Global indices of the local replicas.
    """

    def __init__(self, replicas: range) -> None:
        self._replicas = replicas

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether values wait to be taken."""

    @abstractmethod
    def put(self, place: int, iteration: Iteration, value: Value) -> None:
        """Add a value of the local replica number `place`.

        Raises:
            FeedError: Another replica has enqueued its value in another iteration.
        """

    @abstractmethod
    def end(self) -> None:
        """Drop the values that only some replicas have enqueued. Called when all have finished their program.

        Raises:
            FeedError: There were such values.
        """

    def _difference(self, place: int, has: str, other: int, others: str) -> FeedError:
        return FeedError(
            f"replica {self._replicas[place]} has enqueued {has}, but replica {self._replicas[other]} {others}, so "
            "their unmatched values are dropped; have all replicas enqueue an outfeed in the same iterations, and mark "
            "the values that do not count"
        )


class AllRounds(Rounds):
    """All rounds until they are taken."""

    def __init__(self, replicas: range) -> None:
        super().__init__(replicas)
        self._waiting: list[deque[tuple[Iteration, Value]]] = [deque() for _ in replicas]
        self._agreed: float = math.inf  # number of rounds before replicas differ

    @property
    @override
    def is_waiting(self) -> bool:
        return any(self._waiting)

    def __len__(self) -> int:
        """Return the number of complete rounds."""
        return min(map(len, self._waiting))

    def take(self) -> list[Value]:
        """Return, and remove, the first round."""
        self._agreed -= 1
        return [values.popleft()[1] for values in self._waiting]

    @override
    def put(self, place: int, iteration: Iteration, value: Value) -> None:
        number = len(self._waiting[place])
        if number >= self._agreed:
            return
        for other, values in enumerate(self._waiting):
            if len(values) > number and values[number][0] != iteration:
                theirs = values[number][0]
                self._agreed = number
                self._keep(number)
                raise self._difference(place, f"in {_named(iteration)}", other, f"in {_named(theirs)}")
        self._waiting[place].append((iteration, value))

    @override
    def end(self) -> None:
        counts = [len(values) for values in self._waiting]
        most, least = counts.index(max(counts)), counts.index(min(counts))
        rest = list(self._waiting[most])[min(counts) :]
        self._keep(min(counts))
        self._agreed = math.inf
        if rest:
            raise self._difference(most, f"in {_named(rest[0][0])}", least, "has not")

    def _keep(self, count: int) -> None:
        for values in self._waiting:
            while len(values) > count:
                values.pop()


class LastRound(Rounds):
    """The last round alone.

    Attributes:
        whole: Last complete round, or None.
    """

    def __init__(self, replicas: range) -> None:
        super().__init__(replicas)
        self.whole: list[Value] | None = None
        self._newest = [deque([_NONE], KEPT) for _ in replicas]

    @property
    @override
    def is_waiting(self) -> bool:
        return False

    @override
    def put(self, place: int, iteration: Iteration, value: Value) -> None:
        newest = _Newest(self._newest[place][-1].count + 1, iteration, value)
        self._newest[place].append(newest)
        found = [one for values in self._newest for one in values if one.moment == newest.moment]
        if len(found) == len(self._newest):
            self.whole = [one.value for one in found]
            for values in self._newest:
                while values[0].moment != newest.moment:
                    values.popleft()

    @override
    def end(self) -> None:
        newest = [values[-1] for values in self._newest]
        self._newest = [deque([_NONE], KEPT) for _ in self._replicas]
        moments = [one.moment for one in newest]
        most, least = moments.index(max(moments)), moments.index(min(moments))
        if most != least:
            raise self._difference(most, str(newest[most]), least, str(newest[least]))


@dataclass(frozen=True)
class _Newest:
    """The latest value of a replica, and the number of values that it has enqueued since its program began."""

    count: int
    iteration: Iteration
    value: Value

    @property
    def moment(self) -> tuple[int, Iteration]:
        """The number of the value and its iteration, which are equal on all replicas for one round."""
        return self.count, self.iteration

    def __str__(self) -> str:
        last = f", the last one in {_named(self.iteration)}" if self.count else ""
        return f"{self.count} values{last}"


_NONE = _Newest(0, (), [])


def _named(iteration: Iteration) -> str:
    if not iteration:
        return "its program"
    return f"iteration {iteration[0] if len(iteration) == 1 else iteration}"


class OutfeedMode(Enum):
    """The values that an outfeed keeps.

    Semantics: the original's `IPUOutfeedMode`.
    """

    ALL = "all"
    LAST = "get_last"


@dataclass(frozen=True)
class _Layout:
    """The form of the values that one program enqueues, and the replicas of the program."""

    replication: Replication
    structure: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


class OutfeedQueue:
    """A queue that takes values out of a compiled program while it runs.

    Call `enqueue` at one place of a function that `strategy.run`, a loss function or a loop of `strategies.loops`
    compiles. `dequeue` and iteration return the values enqueued so far, also in another thread while the program runs.
    No value is lost, and the program never waits: values that are not dequeued stay in host memory.

    An instance's queue holds the values of its own replicas; with several replicas, values have an axis of replicas. A
    value is complete when all local replicas have enqueued it, in the same iteration of the program. If some replicas
    have not enqueued a value when the program ends, it is dropped, and `strategy.run` or the training step raises an
    error. All values that wait in the queue must come from the same program.

    Semantics: the original's `IPUOutfeedQueue`; a `with` statement acts like its `ScopedIPUOutfeedQueue`.

    Example:
        >>> import numpy as np
        >>> from strategies import LocalStrategy, OutfeedQueue, loops
        >>> outfeed = OutfeedQueue()
        >>> def body(number):
        ...     outfeed.enqueue(number * number)
        ...     return number + 1
        >>> _ = LocalStrategy(1).run(lambda: loops.repeat(3, body, np.int32(0)))
        >>> outfeed.dequeue()
        array([0, 1, 4], dtype=int32)

    Args:
        mode: Whether `dequeue` returns all values since its last call, or only the last value.
        buffer_depth: Accepted because the original has it; here only memory limits the queue.

    Raises:
        ValueError: `mode` is not an `OutfeedMode`, or `buffer_depth` is not a positive integer.
    """

    def __init__(self, mode: OutfeedMode | None = None, buffer_depth: int = 3) -> None:
        mode = OutfeedMode.ALL if mode is None else mode
        if not isinstance(mode, OutfeedMode):
            raise ValueError(f"mode is {mode!r}; use OutfeedMode.ALL or OutfeedMode.LAST")
        if isinstance(buffer_depth, bool) or not isinstance(buffer_depth, int) or buffer_depth <= 0:
            raise ValueError(f"buffer_depth is {buffer_depth!r}; it must be an integer greater than zero")
        self.mode: OutfeedMode = mode
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._layout: _Layout | None = None
        self._rounds = self._new_rounds(range(1))

    def _new_rounds(self, replicas: range) -> AllRounds | LastRound:
        return AllRounds(replicas) if self.mode is OutfeedMode.ALL else LastRound(replicas)

    # ---- in compiled programs

    @property
    def enqueued(self) -> bool:
        """Whether the program being traced has enqueued a value; outside of programs, whether any program has."""
        if is_in_program():
            return id(self) in current_program().outfeeds
        return self._layout is not None

    def enqueue(self, tensors: Tree) -> None:
        """Enqueue one value per replica each time the program reaches this call.

        Gradients do not flow through it.

        Args:
            tensors: Array, or a tuple, list, dictionary or other pytree of arrays; `dequeue` keeps the structure.

        Raises:
            TypeError: "Unsupported data type" for float64, and for random keys.
            ValueError: The program has enqueued this queue before, there is no array, or an array has a dimension of
                size 0.
        """
        program = current_program()
        if id(self) in program.outfeeds:
            raise ValueError("An outfeed can only be enqueued once in a program; enqueue a tuple or a dictionary")
        program.outfeeds.add(id(self))
        with_values = jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, MirroredVariable) else leaf, tensors)
        leaves, structure = jax.tree.flatten(with_values)
        values = [jax.lax.stop_gradient(jnp.asarray(leaf)) for leaf in check_no_float64(leaves, "outfeed")]
        if not values:
            raise ValueError("an outfeed got no array to enqueue; give it an array, or a pytree of arrays")
        for value in values:
            if is_key(value):
                raise TypeError("Unsupported data type for outfeed: a random key; enqueue jax.random.key_data of it")
            if 0 in value.shape:
                raise ValueError(
                    f"an outfeed got an array of shape {list(value.shape)}, with a dimension of size 0; leave it out"
                )
        shapes = tuple((value.shape, np.dtype(value.dtype)) for value in values)
        layout = _Layout(program.replication, structure, shapes)
        with self._lock:
            self._expect(layout)
        # A program may outlive the queue, and must not keep values that cannot be dequeued.
        queue, meets = weakref.ref(self), program.meets

        def receive(replica: int, arrays: list[np.ndarray]) -> None:
            receiver = queue()
            if receiver is not None:
                meets(receiver)
                iteration, *received = arrays
                receiver._put(layout, replica, tuple(iteration.tolist()), received)

        program.put(receive, [program.iteration, *values])

    def _put(self, layout: _Layout, replica: int, iteration: Iteration, values: list[np.ndarray]) -> None:
        with self._lock:
            self._expect(layout)
            self._rounds.put(layout.replication.local.index(replica), iteration, values)

    def end_program(self) -> None:
        """Drop the values that only some replicas of the ended program have enqueued.

        Raises:
            FeedError: There are such values; the message names replicas and iteration.
        """
        with self._lock:
            self._rounds.end()

    def put(self, replication: Replication, number: int, values: Sequence[Tree]) -> None:
        """Enqueue the results of a program.

        Args:
            replication: Replicas that ran the program.
            number: Number of the value; each number may be used once.
            values: Pytrees of arrays, one for each local replica.

        Raises:
            FeedError: Values of other shapes still wait in the queue.
        """
        for replica, value in zip(replication.local, values, strict=True):
            leaves, structure = jax.tree.flatten(value)
            arrays = [np.asarray(leaf) for leaf in leaves]
            layout = _Layout(replication, structure, tuple((array.shape, array.dtype) for array in arrays))
            self._put(layout, replica, (number,), arrays)

    def _expect(self, layout: _Layout) -> None:
        if layout == self._layout:
            return
        if self._rounds.is_waiting:
            raise FeedError(
                "the outfeed still holds values that another program enqueued with different shapes or on different "
                "replicas; dequeue them first, or give each program its own outfeed"
            )
        self._layout = layout
        self._rounds = self._new_rounds(layout.replication.local)

    # ---- on the host

    def dequeue(self, wait_for_completion: bool = False) -> Tree:
        """Return the enqueued values.

        Args:
            wait_for_completion: Accepted because the original has it; programs have ended when `run` or a loop returns.

        Returns:
            A pytree of NumPy arrays with the structure of the enqueued values. In mode ALL all values since the last
            call, `[values, (local replicas, if there are several), *shape]`; `values` may be 0. In mode LAST the last
            value, `[(local replicas), *shape]`, and the same one again until there is another. Before any program that
            enqueues was compiled, a thread that did not make the queue gets `[]`.

        Raises:
            ValueError: No program that enqueues was compiled.
            FeedError: In mode LAST, nothing was enqueued.
        """
        with self._lock:
            rounds = self._rounds
            if isinstance(rounds, AllRounds):
                if self._layout is not None:
                    return _taken(self._layout, rounds)
                if threading.get_ident() != self._owner:
                    return []
                raise ValueError(
                    "an outfeed is dequeued, but no program enqueues it; call enqueue in a program, and run that first"
                )
            if self._layout is None or rounds.whole is None:
                raise FeedError("Trying to get the last value from an outfeed queue before anything was enqueued")
            return _joined(self._layout, rounds.whole)

    def __iter__(self) -> Iterator[Tree]:
        """Yield the enqueued values one by one, until none is left; a later iteration continues with later values.

        Raises:
            FeedError: The mode is LAST.
        """
        if self.mode is OutfeedMode.LAST:
            raise FeedError("an outfeed in mode LAST cannot be iterated; call dequeue, or use OutfeedMode.ALL")
        return _Values(self)

    def _next(self) -> Tree:
        with self._lock:
            if self._layout is None or not isinstance(self._rounds, AllRounds) or not len(self._rounds):
                raise StopIteration
            return _joined(self._layout, self._rounds.take())

    # ---- life

    def delete(self) -> None:
        """Drop the values that were not dequeued."""
        with self._lock:
            self._forget()

    def __enter__(self) -> OutfeedQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.delete()


class _Values:
    """An iterator over an outfeed; it can be continued after `StopIteration`."""

    def __init__(self, queue: OutfeedQueue) -> None:
        self._queue = queue

    def __iter__(self) -> _Values:
        return self

    def __next__(self) -> Tree:
        return self._queue._next()


def _leaves(values: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Return one value of each replica, leaf by leaf, with an axis of replicas if there are several."""
    if len(values) == 1:
        return values[0]
    return [np.stack(leaves) for leaves in zip(*values, strict=True)]


def _taken(layout: _Layout, rounds: AllRounds) -> Tree:
    """Take all complete rounds, stacked along a new first axis."""
    count, local = len(rounds), len(layout.replication.local)
    results = [
        np.empty((count, local, *shape) if local > 1 else (count, *shape), dtype) for shape, dtype in layout.leaves
    ]
    for number in range(count):
        for result, leaf in zip(results, _leaves(rounds.take()), strict=True):
            result[number] = leaf
    return jax.tree.unflatten(layout.structure, results)


def _joined(layout: _Layout, values: list[list[np.ndarray]]) -> Tree:
    leaves = [leaf[()] for leaf in _leaves(values)]  # scalars instead of arrays without dimensions
    return jax.tree.unflatten(layout.structure, leaves)
