"""Types of arguments and results, named by their roles.

A pytree is an array, or nested tuples, lists, dictionaries and classes that are registered with JAX, with arrays at the
leaves. Python's types cannot say which structures these are, so type checkers see `Any`; readers see what is meant.
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
"""Gradients, means of them, or the changes that an optimizer makes of them: a pytree like the variables."""

OptimizerState: TypeAlias = Tree
"""The state that an optimizer of optax keeps for the variables."""

Batch: TypeAlias = Tree
"""A pytree of arrays whose leading axis runs over the local replicas' elements, in replica order."""

Element: TypeAlias = Tree
"""An element of a data set: for a feed the input of one iteration of one replica, otherwise a row or a batch."""

Data: TypeAlias = Any
"""The source of a data set: arrays, an iterable, or an object with a length and `[i]`."""

Key: TypeAlias = Any
"""A key of JAX's random numbers."""

Scalar: TypeAlias = "jax.Array | np.float32 | np.int32"
"""An array of shape (), on a device or of NumPy."""

Numbers: TypeAlias = Any
"""An array, or a number of Python."""

Number: TypeAlias = Any
"""A number of Python or NumPy, or an array of one, of whatever framework."""

Metric: TypeAlias = Any
"""A result of an evaluation: a number, or another object that merges."""

Function: TypeAlias = Callable[..., Tree]
"""A function of arrays that JAX can trace."""

LossFunction: TypeAlias = Function
"""`(variables, batch, key) -> loss`, or more; see `strategies.Trainer`."""

MapGradient: TypeAlias = Callable[[Leaf, Leaf], Leaf]
"""`(gradient, variable) -> gradient` of one variable, traceable."""

AccumulationDtype: TypeAlias = Any
"""None for the variable's dtype, a dtype, or a function of the variable (its shape and dtype) that returns either."""
