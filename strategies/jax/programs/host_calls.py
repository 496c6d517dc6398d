"""The calls from compiled programs into Python."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from strategies.typing import Function, Leaf, Tree

PIECE_BYTES = 64 * 1024
"""The largest argument of a call. JAX copies an argument of 100 KiB or more in XLA's thread pool. If all threads of the
pool wait in callbacks of replicas for such copies, they wait forever (seen with 8 replicas, 8 threads, 100.004 KiB)."""

SMALL_BYTES = 1024
WORDS = ("float32", "int32", "uint32")
"""The dtypes of small arrays that travel together, because each argument takes JAX some 50 us."""


def call_host(function: Function, results: Tree, arguments: Sequence[jax.Array], *, is_ordered: bool = False) -> Tree:
    """Add a call of `function` to the program that is being traced.

    Args:
        function: Function of NumPy arrays, which it may keep only as copies; it returns NumPy arrays.
        results: Pytree of the shapes and dtypes of its results.
        arguments: Arrays of any size. Differentiation refuses them, unless they went through `jax.lax.stop_gradient`.
        is_ordered: Whether JAX keeps all such calls of the thread in order. After an error in one of them, JAX fails
            all later programs of the thread that have ordered calls.
    """
    arrays = [jnp.asarray(argument) for argument in arguments]
    are_small = [array.nbytes <= SMALL_BYTES and array.dtype.name in WORDS for array in arrays]
    small = [array for array, is_small in zip(arrays, are_small, strict=True) if is_small]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    small_shapes = [shape for shape, is_small in zip(shapes, are_small, strict=True) if is_small]
    large = [array for array, is_small in zip(arrays, are_small, strict=True) if not is_small]
    pieces = [_cut(array) for array in (_packed(small), *large)]
    counts = [len(parts) for parts in pieces]

    def call(*parts: Leaf) -> Tree:
        rest = iter(parts)
        words, *others = (_joined([np.asarray(part) for part in itertools.islice(rest, count)]) for count in counts)
        small_ones, large_ones = _unpacked(words, small_shapes), iter(others)
        return function(
            *[
                next(small_ones if is_small else large_ones).reshape(shape.shape)
                for shape, is_small in zip(shapes, are_small, strict=True)
            ]
        )

    return io_callback(call, results, *itertools.chain(*pieces), ordered=is_ordered)


def calls_host(jaxpr: jax.extend.core.ClosedJaxpr) -> bool:
    """Return whether a traced function calls into Python with effects, by `call_host` or by JAX's own functions."""
    return bool(jaxpr.effects & _effects_of_calls())


@functools.cache
def effects_of_calls() -> frozenset[object]:
    """Return the effects of an equation for a call of Python; JAX accepts it inside of `jax.checkpoint`.

    There JAX computes the equation once and keeps the result.
    """
    return frozenset(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects)


@functools.cache
def _effects_of_calls() -> frozenset[object]:
    def calls() -> None:
        for is_ordered in (False, True):
            io_callback(lambda: None, None, ordered=is_ordered)
            jax.debug.callback(lambda: None, ordered=is_ordered)

    return frozenset(jax.make_jaxpr(calls)().effects)


def _packed(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the bits of small arrays as one array."""
    words = [jax.lax.bitcast_convert_type(_constant(array), jnp.int32).reshape(-1) for array in arrays]
    return jnp.concatenate(words) if words else jnp.zeros(1, jnp.int32)


@jax.custom_jvp
def _constant(array: jax.Array) -> jax.Array:
    """Make JAX refuse to differentiate the array, as it does for arguments of `io_callback` but not for their bits."""
    return array


@_constant.defjvp
def _refuse(primals: Leaf, tangents: Leaf) -> Leaf:
    raise TypeError("a call of Python has no derivative; put jax.lax.stop_gradient around its arguments")


def _unpacked(words: np.ndarray, shapes: Sequence[jax.ShapeDtypeStruct]) -> Iterator[np.ndarray]:
    start = 0
    for shape in shapes:
        yield words[start : start + shape.size].view(shape.dtype)
        start += shape.size


def _cut(argument: jax.Array) -> list[jax.Array]:
    if argument.nbytes <= PIECE_BYTES:
        return [argument]
    size = PIECE_BYTES // argument.dtype.itemsize
    flat = argument.reshape(-1)
    return [flat[start : start + size] for start in range(0, argument.size, size)]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
