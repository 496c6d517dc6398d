"""The iterations of a loop on the devices: they get elements, and hand over the values that they enqueue."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.programs.feed_program import CHUNK, Enqueued, FeedProgram
from strategies.typing import Number, Tree

HOLD_S = 0.05
"""About the longest time, in seconds, that an enqueued value waits to leave together with others."""

Values = Sequence[jax.Array]
Shapes = Sequence[jax.ShapeDtypeStruct]
Condition = Callable[..., jax.Array]
GoesOn = Callable[[jax.Array, Values], jax.Array]
_Array = TypeVar("_Array", jax.Array, np.ndarray)


@dataclass(frozen=True)
class Iteration:
    """The traced body of a loop.

    Attributes:
        body: `(token, number, *element, *leaves) -> (token, *collected, *leaves)`; without an infeed the element is
            empty.
        program: Program of the loop.
        queue: Infeed; a weak reference, because compiled loops live longer.
        collected: Values that the body enqueues and the loop hands over, as shapes. Empty if the body makes other calls
            into Python, because values would then leave in another order than those calls.
        reads_ahead: Whether elements may come before their iteration: the body does not dequeue the infeed itself.
        is_numbered: Whether the body uses the number of the iteration.
    """

    body: jax.extend.core.ClosedJaxpr
    program: FeedProgram
    queue: weakref.ref[InfeedQueue] | None
    collected: Sequence[Enqueued]
    reads_ahead: bool
    is_numbered: bool

    @classmethod
    def of(
        cls, flat_body: Callable[..., Values], program: FeedProgram, infeed: InfeedQueue | None, leaves: Values
    ) -> Iteration:
        """Trace a body; trace it again if the values that it enqueues cannot be collected."""
        element: Shapes = ()
        if infeed is not None:
            infeed.register(program)
            element = infeed.spec.leaves
        enqueued_before, dequeued_before = set(program.outfeeds), program.infeeds[id(infeed)]
        for collects in (True, False):
            with program.collecting(collects) as found:
                fresh = functools.partial(flat_body)  # a new object, because JAX caches traces by function
                body = jax.make_jaxpr(fresh)(program.token, jnp.int32(0), *element, *leaves)
            if not found or not body.effects:  # of calls into Python, by `call_host` or by JAX's own functions
                break
            program.outfeeds = set(enqueued_before)
        collected = [Enqueued(one.put, [jax.typeof(array) for array in one.arrays]) for one in found]
        reads_ahead = program.infeeds[id(infeed)] == dequeued_before
        is_numbered = program.outfeeds != enqueued_before
        return cls(body, program, None if infeed is None else weakref.ref(infeed), collected, reads_ahead, is_numbered)

    @property
    def infeed(self) -> InfeedQueue | None:
        """The source of the elements, during tracing."""
        return None if self.queue is None else self.queue()

    def once(self, constants: Values, token: jax.Array, number: jax.Array, leaves: Values) -> Values:
        """Run one iteration with one call into Python per feed; return the token and the loop variables."""
        element: Values = ()
        with self.program.inside(token):
            if self.infeed is not None:
                _, chunk = self.infeed.dequeue_some(1, np.int32(1))
                element = [array[0] for array in chunk]
            token = self.program.token
        token, collected, leaves = self._evaluate(constants, token, number, element, leaves)
        with self.program.inside(token):
            for put, arrays in _divided(self.collected, collected):
                self.program.put_now(put, arrays)
            return [self.program.token, *leaves]

    def run(
        self, condition: Condition | None, constants: Values, token: jax.Array, leaves: Values, count: Number
    ) -> Values:
        """Iterate until the condition is false, the count is reached, or a feed has failed."""

        def goes_on(number: jax.Array, leaves: Values) -> jax.Array:
            answer: jax.Array = jnp.bool_(True) if count is None else number < count
            return answer if condition is None else answer & condition(*leaves)

        if self.collected or (condition is None and self.infeed is not None and self.reads_ahead):
            left = None if condition is not None else lambda number: count - number
            return self._run_in_chunks(goes_on, constants, token, leaves, left)

        def iterate(
            carry: tuple[jax.Array, jax.Array, list[jax.Array]],
        ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
            number, token, leaves = carry
            token, *leaves = self.once(constants, token, number, leaves)
            return number + 1, token, leaves

        _, token, leaves = jax.lax.while_loop(
            lambda carry: (carry[1] >= 0) & goes_on(carry[0], carry[2]), iterate, (jnp.int32(0), token, list(leaves))
        )
        return [token, *leaves]

    def _run_in_chunks(
        self,
        goes_on: GoesOn,
        constants: Values,
        token: jax.Array,
        leaves: Values,
        left: Callable[[jax.Array], jax.Array] | None,
    ) -> Values:
        """Iterate with one call into Python for several iterations, because a call costs more than its data.

        Whether another iteration follows is computed once per iteration: replicas may wait for each other there.

        Args:
            goes_on: Function of `(number, leaves)` that says whether another iteration follows.
            constants: Constants of the body.
            token: Token of the last feed.
            leaves: Loop variables.
            left: Function that returns the number of iterations left; None if the number is not known.
        """
        most = CHUNK
        if self.infeed is not None:
            most = 1 if left is None else min(self.infeed.prefetch_depth, CHUNK)
        pace = _Pace(most)

        def chunk(start: _Carry) -> _Carry:
            wanted = jnp.where(start.goes, most if left is None else left(start.number), 0)
            ready, token, elements = self._exchanged(start, wanted, most, pace)

            def iterate(state: _Carry) -> _Carry:
                place = state.number - start.number
                element = [jax.lax.dynamic_index_in_dim(array, place, keepdims=False) for array in elements]
                token, collected, leaves = self._evaluate(constants, state.token, state.number, element, state.leaves)
                buffers = [
                    jax.lax.dynamic_update_index_in_dim(buffer, array, place, 0)
                    for buffer, array in zip(state.buffers, collected, strict=True)
                ]
                number = state.number + 1
                return _Carry(number, goes_on(number, leaves), token, leaves, state.held, buffers)

            end = jax.lax.while_loop(
                lambda state: (state.number < start.number + ready) & state.goes & (state.token >= 0),
                iterate,
                start._replace(token=token),
            )
            return end._replace(held=end.number - start.number) if end.buffers else end

        first = jnp.int32(0)
        buffers = [jnp.zeros((most, *shape.shape), shape.dtype) for one in self.collected for shape in one.arrays]
        end = jax.lax.while_loop(
            lambda state: (state.token >= 0) & (state.goes | (state.held > 0)),
            chunk,
            _Carry(first, goes_on(first, leaves), token, list(leaves), jnp.int32(0), buffers),
        )
        return [end.token, *end.leaves]

    def _exchanged(
        self, start: _Carry, wanted: jax.Array, most: int, pace: _Pace
    ) -> tuple[jax.Array, jax.Array, Values]:
        """Add the call into Python between iterations to the program that is traced.

        Values leave first, because elements may have to be awaited.

        Args:
            start: State between the iterations, with the values enqueued since the last call.
            wanted: Least number of iterations that the program will still make, an int32 scalar.
            most: Largest number of iterations until the next call.
            pace: Number of iterations that each replica may run before it hands over values.

        Returns:
            The number of iterations until the next call, the token, and the elements for these iterations,
            `[most, *shape]`.
        """
        program, infeed, collected = self.program, self.infeed, self.collected

        def call() -> tuple[jax.Array, jax.Array, Values]:
            with program.inside(start.token):
                if infeed is not None and not collected:
                    ready, elements = infeed.dequeue_some(most, wanted)
                    return ready, program.token, elements
                take = None if infeed is None else infeed.taker(program, most)
                shapes = [jax.ShapeDtypeStruct((), np.int32)] if infeed is None else infeed.shapes(most)

                def exchange(replica: int, left: np.ndarray, done: np.ndarray, *values: np.ndarray) -> list[ArrayLike]:
                    allowed = pace.after(replica, int(done))
                    for place in range(int(done)):
                        for put, arrays in _divided(collected, values):
                            put(replica, [np.array(array[place]) for array in arrays])
                    count = min(int(left), allowed)
                    taken: list[ArrayLike] = [np.int32(count)] if take is None else take(replica, count)
                    pace.begin(replica)
                    return taken

                ready, *elements = program.call(exchange, shapes, [wanted, start.held, *start.buffers])
                return ready, program.token, elements

        if infeed is not None:
            return call()
        # Without an infeed no call is needed before the first iteration.
        ready, behind = jax.lax.cond(start.held > 0, lambda: call()[:2], lambda: (jnp.int32(1), start.token))
        return ready, behind, []

    def _evaluate(
        self, constants: Values, token: jax.Array, number: jax.Array, element: Values, leaves: Values
    ) -> tuple[jax.Array, Values, list[jax.Array]]:
        """Return the token, the collected values, and the next loop variables."""
        token, *results = jax.core.eval_jaxpr(self.body.jaxpr, constants, token, number, *element, *leaves)
        count = len(results) - len(leaves)
        return token, results[:count], results[count:]


class _Carry(NamedTuple):
    """The values carried by a loop that makes one call into Python for several iterations.

    Attributes:
        number: Number of the next iteration, an int32 scalar.
        goes: Whether there is a next iteration, a boolean scalar.
        token: Token of the last feed.
        leaves: Loop variables.
        held: Number of iterations since the last call, an int32 scalar; 0 if nothing is collected.
        buffers: Values enqueued in these iterations, `[most, *shape]`.
    """

    number: jax.Array
    goes: jax.Array
    token: jax.Array
    leaves: list[jax.Array]
    held: jax.Array
    buffers: list[jax.Array]


def differentiable(iteration: Iteration, count: int) -> Callable[..., Values]:
    """Return a loop that ends early if a feed fails, and has gradients.

    It is differentiated as a scan, which has a backward pass but cannot end early.
    """

    @jax.custom_jvp
    def repeated(constants: Values, token: jax.Array, leaves: Values) -> Values:
        return iteration.run(None, constants, token, leaves, count)

    def scanned(constants: Values, token: jax.Array, leaves: Values) -> Values:
        def iterate(carry: list[jax.Array], number: jax.Array | None) -> tuple[list[jax.Array], None]:
            token, *leaves = carry
            return list(iteration.once(constants, token, jnp.int32(0) if number is None else number, leaves)), None

        numbers = jnp.arange(count, dtype=jnp.int32) if iteration.is_numbered else None
        return jax.lax.scan(iterate, [token, *leaves], numbers, length=count)[0]

    @repeated.defjvp
    def differentiated(primals: Tree, tangents: Tree) -> Tree:
        return jax.jvp(scanned, primals, tangents)

    return repeated


class _Pace:
    """The number of iterations that a replica may run before it hands over enqueued values."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed: dict[int, int] = {}
        self._began: dict[int, float] = {}

    def begin(self, replica: int) -> None:
        self._began[replica] = time.perf_counter()

    def after(self, replica: int, count: int) -> int:
        """Return the number of iterations that may follow `count` finished ones; for 0, the last number again."""
        if count and replica in self._began:
            each_s = (time.perf_counter() - self._began[replica]) / count
            self._allowed[replica] = max(1, min(self._most, 2 * count, int(HOLD_S / each_s)))
        return self._allowed.get(replica, 1)


def _divided(enqueued: Sequence[Enqueued], arrays: Sequence[_Array]) -> list[tuple[Callable[..., None], list[_Array]]]:
    """Return the functions to call, each with its arrays."""
    rest = iter(arrays)
    return [(one.put, list(itertools.islice(rest, len(one.arrays)))) for one in enqueued]
