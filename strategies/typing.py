"""Types of arguments and results, named by their roles.

A pytree is an array, or nested tuples, lists, dictionaries and classes registered with JAX, with arrays as leaves.
Python's types cannot express such structures, so type checkers see `Any`; the names are for readers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import jax

Tree: TypeAlias = Any
"""A pytree of arrays."""

Leaf: TypeAlias = Any
"""An array of a pytree: of JAX, NumPy or PyTorch, a tracer of one, or its shape and dtype."""

Variables: TypeAlias = Tree
"""The trained variables, by which a loss function is differentiated: a pytree of floating-point arrays."""

Gradients: TypeAlias = Tree
"""Gradients, their means, or the updates that an optimizer computes from them: a pytree like the variables."""

OptimizerState: TypeAlias = Tree
"""The state that an optimizer of optax keeps for the variables."""

Batch: TypeAlias = Tree
"""A pytree of arrays whose leading axis runs over the local replicas' elements, in replica order."""

Element: TypeAlias = Tree
"""An element of a data set: for a feed, the input of one replica in one iteration; otherwise a row or a batch."""

Data: TypeAlias = Any
"""The source of a data set: arrays, an iterable, or an object with a length and `[i]`."""

Key: TypeAlias = Any
"""A random key of JAX."""

Scalar: TypeAlias = "jax.Array | np.float32 | np.int32"
"""An array of shape (), of NumPy or on a device."""

Numbers: TypeAlias = Any
"""An array, or a Python number."""

Number: TypeAlias = Any
"""A number of Python or NumPy, or a one-element array of any framework."""

Metric: TypeAlias = Any
"""A result of an evaluation: a number, or another object with a method `merge`."""

Function: TypeAlias = Callable[..., Tree]
"""A function of arrays that JAX can trace."""

LossFunction: TypeAlias = Function
"""`(variables, batch, key) -> loss`, or a longer result; see `strategies.Trainer`."""

MapGradient: TypeAlias = Callable[[Leaf, Leaf], Leaf]
"""`(gradient, variable) -> gradient` for one variable, traceable by JAX."""

AccumulationDtype: TypeAlias = Any
"""None for the variable's dtype; a dtype; or a function that returns either, given a variable's shape and dtype."""
