"""The memory of tensors as collectives move and reduce it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from collectives import Communicator, UnsupportedBufferError
from collectives.tree import combined
from strategies.torch.tensors import dtype_of

_ORDERED = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max"}
_OF_BOOLS = {"SUM": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "MAX": "MAX"}
_GATHERED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_PLAIN = (torch.Tensor.__torch_dispatch__, torch.nn.Parameter.__torch_dispatch__)
_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def refuse_others(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that are not in the memory of the host.

    Raises:
        UnsupportedBufferError: A tensor is on a device, or sparse, or has no memory of its own.
    """
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ not in _PLAIN:
            raise UnsupportedBufferError(
                f"the backend popdist takes plain tensors, not {type(tensor).__name__}, which wraps another one; give "
                "the one inside, such as tensor.to_local() of a DTensor, or tensor.wait() of an AsyncCollectiveTensor"
            )
        is_dense = tensor.layout is torch.strided
        if tensor.device.type != "cpu" or not is_dense or tensor.is_quantized:
            kind = "quantized " if tensor.is_quantized else "" if is_dense else "sparse "
            way_out = (
                "move it with tensor.cpu(), or make a group of another backend for it: new_group(backend='nccl')"
                if tensor.device.type != "cpu"
                else "give tensor.dequantize()"
                if tensor.is_quantized
                else "give tensor.to_dense(), or make an embedding with sparse=False"
            )
            raise UnsupportedBufferError(
                f"the backend popdist takes dense tensors on the CPU, not a {kind}tensor on {tensor.device}; {way_out}"
            )


def shaped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a contiguous tensor of the same shape, without a copy if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a contiguous tensor of one dimension, without a copy if possible."""
    return shaped(tensor).view(-1)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor of any dtype, as flat uint8.

    `tensor.numpy()` would forbid PyTorch to resize the tensor afterwards, as FSDP and hooks of DDP do.
    """
    return np.asarray(_Memory(tensor))


def description(tensor: torch.Tensor) -> str:
    """Format dtype and shape for messages and for the comparison of calls: `float32[3,4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def descriptions(tensors: Sequence[torch.Tensor]) -> str:
    """Format several tensors, so that calls with another number of tensors differ from the first tensor on."""
    return " ".join(map(description, tensors))


def copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy flat values into a tensor, unless they are its memory."""
    if tensor.data_ptr() != values.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(values.view(tensor.shape))


def all_reduce(communicator: Communicator, values: torch.Tensor, op: str, name: str = "") -> torch.Tensor:
    """Reduce a tensor over all ranks in the order of the tree; return it or another one, with the result.

    Args:
        communicator: Ranks of the group.
        values: Contiguous tensor; may be overwritten.
        op: Name of the operation in `torch.distributed.ReduceOp`.
        name: Facts for the comparison of calls.
    """
    if values.dtype is torch.bool and op in _OF_BOOLS:
        return all_reduce(communicator, values.view(torch.uint8), _OF_BOOLS[op], f"bool {op} {name}").view(torch.bool)
    if op in _ORDERED:
        communicator.all_reduce(numbers(values), _ORDERED[op], name=name)
        return values
    return _combined(communicator, values, op, name)


def reduce_scatter(
    communicator: Communicator, values: torch.Tensor, out: torch.Tensor, op: str, name: str = ""
) -> None:
    """Reduce a flat tensor as `all_reduce` does; write this rank's block into `out`, a flat contiguous tensor."""
    if op in _ORDERED and values.dtype is not torch.bool:
        communicator.reduce_scatter(numbers(values), numbers(out), _ORDERED[op], name=name)
        return
    whole = all_reduce(communicator, values.clone(), op, f"reduce_scatter {name}")
    out.copy_(whole.view(communicator.size, -1)[communicator.rank])


def checked_op(op: str, dtype: torch.dtype) -> str:
    """Return the name of a reduction.

    Raises:
        UnsupportedBufferError: Tensors of this dtype cannot be reduced so.
    """
    is_known = op in _OF_BOOLS if dtype is torch.bool else op in _ORDERED or op in _GATHERED
    if not is_known or (op.startswith("B") and (dtype.is_floating_point or dtype.is_complex)):
        known = ", ".join(_OF_BOOLS if dtype is torch.bool else (*_ORDERED, *_GATHERED))
        raise UnsupportedBufferError(
            f"the backend popdist cannot reduce {dtype} by {op}; use one of {known} (BAND, BOR and BXOR for integers)"
        )
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 1):
        way = "torch.view_as_real(tensor)" if dtype.is_complex else "tensor.float()"
        raise UnsupportedBufferError(f"the backend popdist cannot reduce {dtype}; convert it, for example with {way}")
    return op


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as numbers, in its shape."""
    return bits(tensor).view(_dtype_of(tensor.dtype)).reshape(tensor.shape)


@functools.cache
def _dtype_of(dtype: torch.dtype) -> np.dtype:
    return dtype_of(torch.empty(0, dtype=dtype))


class _Memory:
    """The memory of a contiguous tensor, as NumPy asks for it; an array of it keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        place = (tensor.data_ptr(), False)
        shape = (tensor.numel() * tensor.itemsize,)
        self.tensor = tensor
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": place}


def _combined(communicator: Communicator, values: torch.Tensor, op: str, name: str) -> torch.Tensor:
    """Reduce by gathering: for operations that the collectives do not have."""
    rows = torch.from_numpy(communicator.all_gather(bits(values), name=f"{op} {description(values)} {name}"))
    if not values.numel():  # view refuses the strides of rows without elements
        return values
    each = [row.view(values.dtype) for row in rows]
    if values.dtype in _IN_FLOAT32:
        each = [row.float() for row in each]
    result: torch.Tensor = combined(each, _GATHERED[op])
    return result.to(values.dtype)
