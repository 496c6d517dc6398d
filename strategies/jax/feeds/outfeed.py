"""The outfeed: values that leave a compiled program while it runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np

from strategies.data.replication import Replication, is_in_program
from strategies.errors import FeedError
from strategies.jax.feeds.outfeed_rounds import AllRounds, Iteration, LastRound
from strategies.jax.programs.feed_program import Put, current_program
from strategies.jax.programs.xla_pitfalls import refuse_float64
from strategies.jax.replicas.devices import is_key
from strategies.jax.replicas.variables import MirroredVariable
from strategies.typing import Tree


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
        values = [jax.lax.stop_gradient(jnp.asarray(leaf)) for leaf in refuse_float64(leaves, "outfeed")]
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
        program.put(self._receiver(layout, program.meets), [program.iteration, *values])

    def _receiver(self, layout: _Layout, meets: Callable[[object], None]) -> Put:
        # A program may outlive the queue, and must not keep values that cannot be dequeued.
        queue = weakref.ref(self)

        def receive(replica: int, arrays: list[np.ndarray]) -> None:
            receiver = queue()
            if receiver is not None:
                meets(receiver)
                iteration, *values = arrays
                receiver._put(layout, replica, tuple(iteration.tolist()), values)

        return receive

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
                return self._nothing() if self._layout is None else _taken(self._layout, rounds)
            if self._layout is None or rounds.whole is None:
                raise FeedError("Trying to get the last value from an outfeed queue before anything was enqueued")
            return _joined(self._layout, rounds.whole)

    def _nothing(self) -> list[Tree]:
        if threading.get_ident() != self._owner:
            return []
        raise ValueError(
            "an outfeed is dequeued, but no program enqueues it; call enqueue in a program, and run that first"
        )

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
