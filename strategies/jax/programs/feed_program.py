"""The program that is being traced, as feeds and loops see it, and its calls into Python."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir

from strategies.data.layout import TRACED, Replication
from strategies.typing import Function, Leaf, Tree

CALL = "host_call"
"""The name of the primitive of `call_host`."""

_call = jax.extend.core.Primitive(CALL)
_call.multiple_results = True


def call_host(function: Function, results: Tree, arguments: Sequence[jax.Array], *, is_ordered: bool = False) -> Tree:
    """Add a call of `function` to the program that is being traced.

    Args:
        function: Function of NumPy arrays, which it may keep only as copies; it returns NumPy arrays.
        results: Pytree of the shapes and dtypes of its results.
        arguments: Arrays of any size. Differentiation refuses them, unless they went through `jax.lax.stop_gradient`.
        is_ordered: Whether JAX keeps all such calls of the thread in order. After an error in one of them, JAX fails
            all later programs of the thread that have ordered calls.
    """
    shapes, structure = jax.tree.flatten(results)

    def call(*values: Leaf) -> tuple[Leaf, ...]:
        return tuple(jax.tree.leaves(function(*map(np.asarray, values))))

    arrays = [jnp.asarray(argument) for argument in arguments]
    if is_ordered:
        return jax.tree.unflatten(structure, io_callback(call, tuple(shapes), *arrays, ordered=True))
    avals = tuple(jax.core.ShapedArray(shape.shape, shape.dtype) for shape in shapes)
    return jax.tree.unflatten(structure, _call.bind(*arrays, call=call, results=avals))


def lower_call(context: Any, call: Callable[..., Sequence[Leaf]], operands: Sequence[Leaf]) -> Sequence[Leaf]:
    """Return the call of Python in the compiled program, for the lowering rule of a primitive.

    Unlike an `io_callback`, it gets views of XLA's memory instead of JAX arrays. JAX arrays take longer, and those of
    100 KiB or more a thread of XLA's pool. If all threads of the pool wait in callbacks of replicas for such copies,
    they wait forever (seen with 8 replicas, 8 threads, 100.004 KiB).
    """
    results, _, _ = mlir.emit_python_callback(
        context,
        call,
        None,
        operands,
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
        returns_token=False,
    )
    return results


def _raise_no_derivative(primals: Leaf, tangents: Leaf, **_: object) -> NoReturn:
    raise TypeError("a call of Python has no derivative; put jax.lax.stop_gradient around its arguments")


def _batch(arguments: Sequence[Leaf], axes: Sequence[int | None], **parameters: Any) -> tuple[list[Leaf], list[int]]:
    """Call Python for one row after another, as JAX does for its own calls."""
    size = next(one.shape[axis] for one, axis in zip(arguments, axes, strict=True) if axis is not None)
    rows = [
        jnp.broadcast_to(one, (size, *one.shape)) if axis is None else jnp.moveaxis(one, axis, 0)
        for one, axis in zip(arguments, axes, strict=True)
    ]
    results = jax.lax.map(lambda given: _call.bind(*given, **parameters), rows)
    return results, [0] * len(results)


@functools.cache
def _effects() -> frozenset[object]:
    return frozenset(jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects)


_call.def_effectful_abstract_eval(lambda *_, call, results: (results, _effects()))
ad.primitive_jvps[_call] = _raise_no_derivative
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, lambda context, *operands, call, results: lower_call(context, call, operands))


@functools.cache
def effects_of_calls() -> frozenset[object]:
    """Return the effects of an equation for a call of Python; JAX accepts it inside of `jax.checkpoint`.

    There JAX computes the equation once and keeps the result.
    """
    return frozenset(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects)


FAILED = -1
"""The token after a feed has failed. The program feeds and fetches nothing more, and its loops end."""

CHUNK = 8
"""The most elements that arrive, or leave, in one call into Python; the call copies them once more."""

COLLECTED_BYTES = 8 * 1024
"""The largest value that a loop collects."""
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
        if sum(array.nbytes for array in arrays) > COLLECTED_BYTES:
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
