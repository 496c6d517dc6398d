"""The program that is being traced, as feeds and loops know it."""

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
"""The token behind a feed that has failed. Nothing is fed or fetched any more, and loops end."""

CHUNK = 8
"""At most so many elements come in one call into Python, which copies them once more, or leave in one."""

_COLLECTED_BYTES = PIECE_BYTES // CHUNK
_TOKENS = 2**30

Put = Callable[[int, list[np.ndarray]], None]


@dataclass(frozen=True)
class Enqueued:
    """The values that the body of a loop enqueues in each iteration, and that the loop hands over later.

    Attributes:
        put: gives the queue one value of a replica; called at run time, with arrays that it may keep.
        arrays: of a value, while the body is traced.
    """

    put: Put
    arrays: Sequence[jax.Array]


@dataclass
class FeedProgram:
    """A program while it is traced.

    Its calls into Python are put in order by a token, which each of them takes and gives, and which loops carry: JAX
    drops or hoists calls on which nothing depends when it differentiates a loop, and what JAX itself orders fails for
    ever after one failure.

    Attributes:
        replica: the global index of the replica that runs it, an int32 scalar.
        replication: all replicas that run it.
        report: called at run time with the error of a feed. It notes the error, for whoever runs the program to raise
            when the program has ended: a replica that stopped by itself would keep others waiting. Or it raises.
        token: int32 scalar; not negative while nothing has failed.
        is_ordered: whether JAX has to order the calls too, because tokens do not connect all of the program.
        infeeds: identities of the infeeds that it dequeues, and at how many places.
        outfeeds: identities of the outfeeds that it enqueues.
        collected: what the body of a loop has enqueued so far, while one is traced that collects it.
        loops: the numbers of the iterations of the loops that are being traced, from the outermost one.
        meets: called at run time with an outfeed that the program enqueues, in which replicas meet.
        constants: of each value from outside that it has, and that may change, whether it is still the same.
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
        """Have the running program call a feed, behind its last one.

        Args:
            function: gets the replica's global index and NumPy arrays, which it may keep only as copies; returns NumPy
                arrays. What it raises is reported. It is not called any more when a feed has failed.
            results: the shapes and dtypes that it returns.
            arguments: arrays of any size.

        Returns:
            What the function has returned; zeros if it was not called, or has failed.
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
        if self.is_ordered and not is_traced(given):  # nothing runs that could call it, and it raises what it raises
            return list(map(jnp.array, call(*map(np.asarray, given))[1:]))
        shapes = [jax.ShapeDtypeStruct((), np.int32), *results]
        token, *found = call_host(call, shapes, given, is_ordered=self.is_ordered)
        self.advance(token)
        return found

    def advance(self, token: jax.Array) -> None:
        """Take over the token that a call gave, unless it is unknown here."""
        if self.is_here(token):
            self.token = token

    def put(self, put: Put, arrays: Sequence[jax.Array]) -> None:
        """Have the running program enqueue a value: at once, or with others where a loop collects them.

        A loop does not collect large values, nor those of a branch, to which it may not come.
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
        """Have the running program enqueue a value at once."""

        def receive(replica: int, *values: np.ndarray) -> Sequence[Leaf]:
            put(replica, [np.array(value) for value in values])
            return ()

        self.call(receive, [], arrays)

    def is_here(self, array: Leaf) -> bool:
        """Return whether an array belongs to what is traced, and not to a branch or a loop of JAX's own in it.

        Outside of there it is unknown.
        """
        return getattr(array, "_trace", None) is getattr(self.token, "_trace", None)

    @property
    def collected_arrays(self) -> list[jax.Array]:
        """All arrays that the body of the loop has enqueued so far, and the loop hands over."""
        return [array for enqueued in self.collected or () for array in enqueued.arrays]

    @contextmanager
    def collecting(self, collects: bool = True) -> Iterator[list[Enqueued]]:
        """While the body of a loop is traced that collects what it enqueues; or does not, nor do loops around it."""
        outside = self.collected
        collected: list[Enqueued] = []
        self.collected = collected if collects else None
        try:
            yield collected
        finally:
            self.collected = outside

    @contextmanager
    def inside(self, token: jax.Array, *number: Any) -> Iterator[None]:
        """While the body of a loop is traced, in which `token` is the first one, in the iteration of that number."""
        outside = self.token, self.loops
        self.token, self.loops = token, (*self.loops, *number)
        try:
            yield
        finally:
            self.token, self.loops = outside

    @property
    def iteration(self) -> jax.Array:
        """The numbers of the iterations of the loops around the place that is being traced, int32 [loops]."""
        return jnp.stack(self.loops) if self.loops else jnp.zeros(0, jnp.int32)


def next_token(token: Leaf) -> np.int32:
    """Return the token that a call gives."""
    return np.int32(FAILED if token < 0 else (int(token) + 1) % _TOKENS)


def current_program() -> FeedProgram:
    """Return the program that is being traced; one of a single replica where there is none of ours."""
    return TRACED.get() or FeedProgram(
        replica=np.int32(0),
        replication=Replication(range(1), 1),
        report=_raise,
        token=jnp.int32(0),
        is_ordered=True,
    )


def is_traced(values: Sequence[Leaf]) -> bool:
    """Return whether JAX is tracing a function, be it none of ours, or one of the values belongs to one."""
    return any(isinstance(value, jax.core.Tracer) for value in (*values, jnp.zeros(())))


def note_constant(is_same: Callable[[], bool]) -> None:
    """Note that the program that is being traced, if there is one, has a value from outside that may change.

    Args:
        is_same: whether it is still the same; asked before the program runs again.
    """
    program: FeedProgram | None = TRACED.get()
    if program is not None:
        program.constants.append(is_same)


@contextmanager
def tracing(program: FeedProgram) -> Iterator[FeedProgram]:
    """Make `program` the one that is being traced."""
    reset = TRACED.set(program)
    try:
        yield program
    finally:
        TRACED.reset(reset)


def _raise(error: BaseException) -> None:
    raise error
