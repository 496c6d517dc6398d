"""Functions that have values of another program in them, which cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax


def tracers_in(value: Any) -> Iterator[Any]:
    """The values of a program that is being traced, in a pytree, or in the closures of functions in it."""
    return _look_into(value, set())


def _look_into(value: Any, seen: set[int]) -> Iterator[Any]:
    for leaf in jax.tree.leaves(value):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, jax.core.Tracer):
            yield leaf
        elif isinstance(leaf, partial):
            yield from _look_into([leaf.func, leaf.args, leaf.keywords], seen)
        else:
            yield from _look_into([_contents(cell) for cell in getattr(leaf, "__closure__", None) or ()], seen)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
