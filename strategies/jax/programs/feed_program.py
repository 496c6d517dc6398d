"""The program that is being traced, as feeds and loops see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.data.replication import TRACED, Replication
from strategies.jax.programs.host_calls import PIECE_BYTES, call_host
from strategies.typing import Leaf

FAILED = -1
"""The token after a feed has failed. The program feeds and fetches nothing more, and its loops end."""

CHUNK = 8
"""The most elements that arrive, or leave, in one call into Python; the call copies them once more."""

_COLLECTED_BYTES = PIECE_BYTES // CHUNK
_TOKENS = 2**30

Put = Callable[[int, list[np.ndarray]], None]


@dataclass(frozen=True)
class Enqueued:
    """A value enqueued by the body of a loop in each iteration, and handed over later by the loop.

    Attributes:
        put: Function that gives the queue one value of a replica, at run time, with arrays that the queue may keep.
        arrays: Arrays of the value while the body is traced.
    """

    put: Put
    arrays: Sequence[jax.Array]


@dataclass
class FeedProgram:
    """A program while it is traced.

    A token puts its calls into Python in order: each call takes and returns it, and loops carry it. JAX alone does not
    keep the order. If it differentiates a loop, it drops or hoists calls on which nothing depends. And after a failure
    of one ordered call, it fails all later ones.

    Attributes:
        replica: Global index of the replica that runs it, an int32 scalar.
        replication: All replicas that run it.
        report: Callback for the error of a feed, at run time. It raises the error, or notes it until the program has
            ended, because a replica that stopped by itself would keep others waiting.
        token: int32 scalar, negative after a failure.
        is_ordered: Whether JAX has to order the calls too, because tokens do not connect all of the program.
        infeeds: Identities of the infeeds that it dequeues, with the number of places.
        outfeeds: Identities of the outfeeds that it enqueues.
        collected: Values that the body of a collecting loop has enqueued so far; None outside of one.
        loops: Numbers of the iterations of the loops that are being traced, outermost first.
        meets: Callback, at run time, with each outfeed that the program enqueues: the values of all local replicas meet
            there.
        constants: Function for each outside value in the program that may change: whether it is still the same.
    """

    replica: Any
    replication: Replication
    report: Callable[[BaseException], None]
    token: Leaf
    is_ordered: bool = False
    infeeds: Counter[int] = field(default_factory=Counter)
    outfeeds: set[int] = field(default_factory=set)
    collected: list[Enqueued] | None = None
    loops: tuple[Any, ...] = ()
    meets: Callable[[Any], None] = lambda queue: None
    constants: list[Callable[[], bool]] = field(default_factory=list)

    def call(
        self,
        function: Callable[..., Sequence[Leaf]],
        results: Sequence[jax.ShapeDtypeStruct],
        arguments: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Add a call of a feed to the running program, behind its last one.

        Args:
            function: Function of the replica's global index and NumPy arrays, which it may keep only as copies; it
                returns NumPy arrays. Its errors are reported. After a feed has failed, it is not called any more.
            results: Shapes and dtypes of its results.
            arguments: Arrays of any size.

        Returns:
            The results of the function; zeros if it was not called, or has failed.
        """
        report = self.report
        nothing = [np.zeros(shape.shape, shape.dtype) for shape in results]

        def call(replica: np.ndarray, token: np.ndarray, *values: np.ndarray) -> list[Leaf]:
            if token < 0:
                return [np.int32(FAILED), *nothing]
            try:
                return [next_token(token), *function(int(replica), *values)]
            except Exception as error:
                report(error)
                return [np.int32(FAILED), *nothing]

        found: list[jax.Array]
        given = (self.replica, self.token, *arguments)
        if self.is_ordered and not is_traced(given):  # no program runs, so the function is called here, and may raise
            return list(map(jnp.array, call(*map(np.asarray, given))[1:]))
        shapes = [jax.ShapeDtypeStruct((), np.int32), *results]
        token, *found = call_host(call, shapes, given, is_ordered=self.is_ordered)
        self.advance(token)
        return found

    def advance(self, token: jax.Array) -> None:
        """Take over the token that a call returned, unless the token belongs to another trace."""
        if self.is_here(token):
            self.token = token

    def put(self, put: Put, arrays: Sequence[jax.Array]) -> None:
        """Enqueue a value in the running program: at once, or later with others if a loop collects them.

        A loop does not collect large values, nor values of a branch, which may not be taken.
        """
        if self.collected is None or not self._can_collect(arrays):
            self.put_now(put, arrays)
        else:
            self.collected.append(Enqueued(put, arrays))

    def _can_collect(self, arrays: Sequence[jax.Array]) -> bool:
        if sum(array.nbytes for array in arrays) > _COLLECTED_BYTES:
            return False
        made_here = (jnp.zeros(()), *(array for array in arrays if isinstance(array, jax.core.Tracer)))
        return all(map(self.is_here, made_here))

    def put_now(self, put: Put, arrays: Sequence[jax.Array]) -> None:
        """Enqueue a value in the running program at once."""

        def receive(replica: int, *values: np.ndarray) -> Sequence[Leaf]:
            put(replica, [np.array(value) for value in values])
            return ()

        self.call(receive, [], arrays)

    def is_here(self, array: Leaf) -> bool:
        """Return whether an array belongs to the current trace, and not to a branch or loop of JAX inside of it.

        Outside of that branch or loop the array is not defined.
        """
        return getattr(array, "_trace", None) is getattr(self.token, "_trace", None)

    @property
    def collected_arrays(self) -> list[jax.Array]:
        """All arrays that the body of the loop has enqueued so far, for the loop to hand over."""
        return [array for enqueued in self.collected or () for array in enqueued.arrays]

    @contextmanager
    def collecting(self, collects: bool = True) -> Iterator[list[Enqueued]]:
        """Collect the values that the traced body of a loop enqueues.

        If `collects` is False, neither this loop nor the loops around it collect values.
        """
        outside = self.collected
        collected: list[Enqueued] = []
        self.collected = collected if collects else None
        try:
            yield collected
        finally:
            self.collected = outside

    @contextmanager
    def inside(self, token: jax.Array, *number: Any) -> Iterator[None]:
        """Use `token` as the first token of the traced body of a loop, in the iteration `number`."""
        outside = self.token, self.loops
        self.token, self.loops = token, (*self.loops, *number)
        try:
            yield
        finally:
            self.token, self.loops = outside

    @property
    def iteration(self) -> jax.Array:
        """The numbers of the iterations of the loops around the traced place, int32 [loops]."""
        return jnp.stack(self.loops) if self.loops else jnp.zeros(0, jnp.int32)


def next_token(token: Leaf) -> np.int32:
    """Return the token after a call."""
    return np.int32(FAILED if token < 0 else (int(token) + 1) % _TOKENS)


def current_program() -> FeedProgram:
    """Return the program that is being traced; outside of our programs, a program of a single replica."""
    return TRACED.get() or FeedProgram(
        replica=np.int32(0),
        replication=Replication(range(1), 1),
        report=_raise,
        token=jnp.int32(0),
        is_ordered=True,
    )


def is_traced(values: Sequence[Leaf]) -> bool:
    """Return whether JAX is tracing any function, or one of the values belongs to a trace."""
    return any(isinstance(value, jax.core.Tracer) for value in (*values, jnp.zeros(())))


def note_constant(is_same: Callable[[], bool]) -> None:
    """Note an outside value in the program being traced, if any: its changes make the program outdated.

    Args:
        is_same: Function that says whether the value is still the same; called before the program runs again.
    """
    program: FeedProgram | None = TRACED.get()
    if program is not None:
        program.constants.append(is_same)


@contextmanager
def tracing(program: FeedProgram) -> Iterator[FeedProgram]:
    """Make `program` the program that is being traced."""
    reset = TRACED.set(program)
    try:
        yield program
    finally:
        TRACED.reset(reset)


def _raise(error: BaseException) -> None:
    raise error
