"""Casts of batches that travel to the devices in a small dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import strategies.trees as trees
from strategies.data.sources import Masked
from strategies.late_jax import jax, jnp
from strategies.typing import Batch, Function, Numbers, Tree, Variables

if TYPE_CHECKING:
    from jax.typing import DTypeLike

DTypes: TypeAlias = Any
"""One dtype (or `Cast`) for all leaves, or one for each entry of the batch, in a mapping or tuple like the batch.

If the mapping lacks an entry, or has None for it, the entry stays as it is.
"""

_Change = Callable[[DTypes, str, Numbers], Numbers]
"""(dtype, name, leaf) -> the changed leaf."""


@dataclass(frozen=True)
class Cast:
    """The conversion of an array on the device: `array.astype(dtype) * scale`, with the factor in that dtype.

    Example::

        strategies.Cast("bfloat16", 1 / 255)  # bytes of an image become numbers from 0 to 1

    Attributes:
        dtype: Dtype of the result.
        scale: Factor, such as 1/255 for images of bytes.
    """

    dtype: DTypeLike
    scale: float = 1.0

    def __call__(self, array: jax.Array) -> jax.Array:
        """Return the converted array."""
        cast = jnp.asarray(array).astype(self.dtype)
        return cast if self.scale == 1.0 else cast * jnp.asarray(self.scale, self.dtype)


def casting(loss_fn: Function, dtypes: DTypes) -> Function:
    """Return a loss function that casts its batch inside the compiled step.

    The training has the bits of a data set that was cast in advance, because a barrier keeps the compiler from merging
    the cast with other operations.

    Example::

        dataset = strategy.distribute_dataset(data, 32, transfer_dtype={"image": np.uint8})
        loss_fn = strategies.casting(loss_fn, {"image": strategies.Cast("float32", 1 / 255)})

    Args:
        loss_fn: `loss_fn(variables, batch, ...)`, or another function whose second argument is a batch.
        dtypes: Dtype or `Cast` for all leaves, or one for each entry; see `DTypes`. For a `Masked` batch they apply to
            its `values`.

    Raises:
        ValueError: When the function is called, if `dtypes` names an entry that the batch lacks.
    """
    on_device = partial(_map_where, lambda to, name, leaf: (to if isinstance(to, Cast) else Cast(to))(leaf))

    @wraps(loss_fn)
    def with_casts(variables: Variables, batch: Batch, *rest: Tree, **named: Tree) -> Tree:
        return loss_fn(variables, jax.lax.optimization_barrier(on_device(dtypes, batch)), *rest, **named)

    return with_casts


def converted(dtypes: DTypes, batch: Batch) -> Batch:
    """Return the batch in the dtypes in which it travels to the devices.

    Raises:
        ValueError: If `dtypes` names an entry that the batch lacks, or a number does not fit into its dtype.
        TypeError: If floating-point numbers would become integers.
    """
    return _map_where(_convert, dtypes, batch)


def _convert(to: DTypeLike, name: str, leaf: Numbers) -> np.ndarray:
    array, dtype = np.asarray(leaf), np.dtype(to)
    if (dtype.kind in "biu" and array.dtype.kind not in "biu") or (array.dtype.kind == "c" and dtype.kind != "c"):
        raise TypeError(f"{name} is {array.dtype} and cannot travel as {dtype}; choose a floating or complex dtype")
    with np.errstate(over="ignore"):
        small = array.astype(dtype)
    if array.dtype.kind in "biu":
        fits = np.array_equal(small, array)  # of other signs too
    else:  # all finite numbers have to stay finite
        is_narrower = small.dtype.itemsize < array.dtype.itemsize
        fits = not is_narrower or np.array_equal(np.isfinite(small.astype(float)), np.isfinite(array.astype(float)))
    if not fits:
        raise ValueError(f"{name} has numbers from {array.min()} to {array.max()}, which {dtype} cannot hold")
    return small


def _map_where(change: _Change, dtypes: DTypes, batch: Batch, name: str = "the batch") -> Batch:
    """Return the batch with `change(dtype, name, leaf)` in place of each leaf for which `dtypes` has a dtype."""
    if dtypes is None:
        return batch
    if isinstance(batch, Masked):
        return batch._replace(values=_map_where(change, dtypes, batch.values, name))
    if isinstance(dtypes, Mapping):
        return _map_entries(change, dtypes, batch, name)
    if isinstance(dtypes, tuple | list):
        if not isinstance(batch, tuple | list) or len(batch) != len(dtypes):
            raise ValueError(f"{len(dtypes)} dtypes were given for {name}, which is {_shape_of(batch)}")
        parts = [
            _map_where(change, to, part, f"{name}[{i}]") for i, (to, part) in enumerate(zip(dtypes, batch, strict=True))
        ]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return trees.map_with_path(lambda path, leaf: change(dtypes, name + trees.keystr(path), leaf), batch)


def _map_entries(change: _Change, dtypes: Mapping[str, DTypes], batch: Batch, name: str) -> Batch:
    if not isinstance(batch, Mapping):
        raise ValueError(f"dtypes were given for {', '.join(map(repr, dtypes))} of {name}, which is {_shape_of(batch)}")
    unknown = [repr(key) for key in dtypes if key not in batch]
    if unknown:
        raise ValueError(f"{name} has no {', '.join(unknown)}; it has {', '.join(map(repr, batch))}")
    return {key: _map_where(change, dtypes.get(key), part, f"{name}[{key!r}]") for key, part in batch.items()}


def _shape_of(batch: Batch) -> str:
    if isinstance(batch, tuple | list | Mapping):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"one array of shape {np.shape(batch)}"
