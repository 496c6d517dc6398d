"""Conversions between tensors on the host and NumPy arrays, which share memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TypeVar

import ml_dtypes
import numpy as np
import torch

import strategies.trees as trees
from collectives.arrays import ALIGNMENT_BYTES
from strategies.late_jax import is_jax_array
from strategies.torch.collated import CollatedBatch
from strategies.typing import Batch, Tree

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor on the CPU, in its shape.

    Raises:
        TypeError: If NumPy has no such dtype, or the tensor is on another device, or sparse.
    """
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: np.ndarray = tensor.numpy()
    return array


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor as an array. If the tensor is on a device, wait for the device and copy."""
    return as_array(tensor.detach().cpu())


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the memory of an array as a tensor; an array that may not be written is copied."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_of(tensor: torch.Tensor) -> np.dtype:
    """Return the dtype of a tensor as a dtype of NumPy or ml_dtypes."""
    return as_array(torch.empty(0, dtype=tensor.dtype)).dtype


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors on one device have equal shapes, dtypes and bits; 0 and -0 differ, a NaN is equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(bits_of(one), bits_of(other)))


def have_other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a boolean on the device: whether the bits of two tensors of one device, shape and dtype differ."""
    return torch.ne(bits_of(one), bits_of(other)).any()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as integers; other tensors are returned unchanged."""
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.view(_INTEGERS[real.itemsize])


_Optional = TypeVar("_Optional", torch.Tensor, torch.Tensor | None)


def real_view(tensor: _Optional) -> _Optional:
    """Return the memory of complex numbers with a last axis for the real and the imaginary part; others unchanged."""
    if tensor is None or not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj())


def complex_view(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the memory of a `real_view` as complex numbers; None for None."""
    return None if tensor is None else torch.view_as_complex(tensor)


def copy_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, without waiting for a device. Autograd must be off."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [one for _, one in pairs])


def real_views(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return views of gradients in which complex numbers have a last axis, as `real_view`, to write to them.

    Raises:
        RuntimeError: If one is conjugated only when it is read, so that it has no such view.
    """
    return [torch.view_as_real(one) if one is not None and one.is_complex() else one for one in gradients]


def kept_apart(tree: Tree, others: Iterable[torch.Tensor]) -> Tree:
    """Return a tree with tensors without history, and with copies of those that share memory with other tensors."""
    with torch._C.DisableTorchFunction():  # a mode, as that of a pipeline, must not take this for a use
        memory = {one.untyped_storage().data_ptr() for one in others}

    def apart(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shares = leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() in memory
        return leaf.detach().clone() if shares else leaf.detach()

    return trees.map(apart, tree)


def tensors_of(batch: Batch) -> Batch:
    """Return a batch with its NumPy and JAX arrays as tensors; other leaves stay as they are."""
    return trees.map(lambda leaf: as_tensor(np.asarray(leaf)) if _is_array(leaf) else leaf, batch)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) or is_jax_array(leaf)


def parts_of(batch: Batch, count: int, of_each: int = 1) -> list[Batch]:
    """Cut a batch along its first axis into parts of equal size, each aligned as an allocated tensor is.

    Without the alignment, libraries may round differently.

    Args:
        batch: A pytree of tensors; other leaves go into every part.
        count: The number of parts.
        of_each: The number of micro-batches in each part, for batches that a `collate_fn` has made.

    Raises:
        ValueError: If the first axis of a tensor is not a multiple of `count`; or a collated batch has other parts.
    """
    leaves, structure = trees.flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        if not leaf.ndim or len(leaf) % count:
            raise ValueError(
                f"a batch of shape {list(leaf.shape)} cannot be divided into {count} micro-batches of this instance; "
                "its first axis must be a multiple of their number; give ragged rows as a CollatedBatch, or give "
                "distribute_dataset a collate_fn"
            )
    cut = [_cut(leaf, count, of_each) for leaf in leaves]
    return [trees.unflatten(structure, [parts[number] for parts in cut]) for number in range(count)]


def _cut(leaf: object, count: int, of_each: int) -> Sequence[object]:
    if isinstance(leaf, CollatedBatch):
        return [trees.map(_aligned_if_tensor, part) for part in leaf.groups(count, of_each)]
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * count
    return [_aligned(leaf)] if count == 1 else [_aligned(part) for part in torch.tensor_split(leaf, count)]


def _aligned_if_tensor(leaf: object) -> object:
    return _aligned(leaf) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided else leaf


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    is_aligned = tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT_BYTES
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def tensors_in(outputs: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors in the outputs of a module: in mappings, lists, tuples and dataclasses."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for one in outputs.values():
            yield from tensors_in(one)
    elif isinstance(outputs, list | tuple):
        for one in outputs:
            yield from tensors_in(one)
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        yield from tensors_in(vars(outputs))
