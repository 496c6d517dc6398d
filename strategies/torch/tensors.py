"""Tensors on the host as NumPy's arrays, and the other way round; nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np
import torch

from collectives.arrays import ALIGNMENT_BYTES
from strategies.typing import Batch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor on the CPU, in its shape.

    Raises:
        TypeError: NumPy has no such dtype, or the tensor is on another device, or sparse.
    """
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: np.ndarray = tensor.numpy()
    return array


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor, see `as_array`; of one on another device a copy, which waits for the device."""
    return as_array(tensor.detach().cpu())


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the memory of an array as a tensor; an array that may not be written is copied."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_of(tensor: torch.Tensor) -> np.dtype:
    """Return the dtype of a tensor as NumPy, or ml_dtypes, has it."""
    return as_array(torch.empty(0, dtype=tensor.dtype)).dtype


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one device have one shape, dtype and bits: 0 and -0 differ, a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(bits_of(one), bits_of(other)))


def have_other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors of one device, shape and dtype have other bits, as a boolean there."""
    return torch.ne(bits_of(one), bits_of(other)).any()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as integers; other tensors are returned unchanged."""
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.view(_INTEGERS[real.itemsize])


def tensors_of(batch: Batch) -> Batch:
    """Return the arrays of a batch, of NumPy or JAX, as tensors; other leaves stay as they are."""
    return jax.tree.map(lambda leaf: as_tensor(np.asarray(leaf)) if _is_array(leaf) else leaf, batch)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array)


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch along its first axis into parts of equal size, each as aligned as if it had been alone.

    Libraries may round otherwise where rows do not begin at addresses as an allocator gives them.

    Args:
        batch: a pytree of tensors; what else is in it goes into every part.
        count: how many parts.

    Raises:
        ValueError: if it cannot be divided so.
    """
    leaves, structure = jax.tree.flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        if not leaf.ndim or len(leaf) % count:
            raise ValueError(
                f"a batch of shape {list(leaf.shape)} for {count} micro-batches of this instance; its first axis must "
                "be a multiple of their number"
            )
    cut = [_cut(leaf, count) for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[number] for parts in cut]) for number in range(count)]


def _cut(leaf: object, count: int) -> Sequence[object]:
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * count
    return [_aligned(leaf)] if count == 1 else [_aligned(part) for part in torch.tensor_split(leaf, count)]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    is_aligned = tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT_BYTES
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)
