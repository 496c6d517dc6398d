"""Optimizers of Keras that apply the means of all replicas' gradients while a program is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import jax
import keras
from jax.flatten_util import ravel_pytree

from strategies.jax.replicas.replica_context import get_replica_context
from strategies.keras.patches import Method, method_replaced
from strategies.typing import Tree

Mean: TypeAlias = Callable[[Tree], Tree]

_PLACES = {"apply": 0, "stateless_apply": 1}
"""The methods that apply gradients, and the position of the gradients among their arguments."""


def mean_over_replicas(gradients: Tree) -> Tree:
    """Average gradients over all replicas, in the order of the tree, with one all-reduce per dtype."""
    leaves, structure = jax.tree.flatten(gradients)
    means = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, unravel = ravel_pytree([leaves[place] for place in places])
        of_dtype = unravel(get_replica_context().all_reduce("mean", flat))
        for place, value in zip(places, of_dtype, strict=True):
            means[place] = value
    return jax.tree.unflatten(structure, means)


@contextmanager
def averaging(optimizers: Iterable[keras.Optimizer], mean: Mean = mean_over_replicas) -> Iterator[None]:
    """Make optimizers apply `mean(gradients)` instead of their gradients, inside the block."""
    is_inside = False  # averages once only: `stateless_apply` calls `apply`, maybe that of an inner optimizer

    def averaged(apply: Method, place: int) -> Method:
        signature = inspect.signature(apply)
        gradients = list(signature.parameters)[place]

        def apply_mean(*arguments: object, **named: object) -> object:
            nonlocal is_inside
            if is_inside:
                return apply(*arguments, **named)
            given = signature.bind(*arguments, **named)
            given.arguments[gradients] = mean(given.arguments[gradients])
            is_inside = True
            try:
                return apply(*given.args, **given.kwargs)
            finally:
                is_inside = False

        return apply_mean

    with ExitStack() as stack:
        for optimizer in {id(one): one for one in optimizers}.values():
            for name, place in _PLACES.items():
                stack.enter_context(method_replaced(optimizer, name, averaged(getattr(optimizer, name), place)))
        yield
