"""Tensors of PyTorch as arrays, their bits and arithmetic, and the devices of replicas."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import is_dataclass
from functools import cache
from typing import Generic, TypeVar, final

import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

import strategies.trees as trees
from collectives.dlpack import ExportedArray
from collectives.tree import TreeNode, steps
from strategies.errors import StrategyError
from strategies.exchange.choice import DeviceArithmetic
from strategies.jax.programs.xla_pitfalls import WAY_OUT
from strategies.typing import Tree

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NARROW = (torch.float16, torch.bfloat16)
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


@cache
def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return the PyTorch dtype for a dtype of NumPy or ml_dtypes."""
    return as_tensor(np.empty(0, dtype)).dtype


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


def copy_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], non_blocking: bool = False) -> None:
    """Copy the second tensor of each pair into the first. Autograd must be off.

    Args:
        pairs: The tensors. If they are on one device, the call does not wait for it.
        non_blocking: Whether not to wait for copies between a device and page-locked memory either.
    """
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [one for _, one in pairs], non_blocking=non_blocking)


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


def tensors_in(outputs: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors in the outputs of a module: in mappings, lists, tuples and dataclasses."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    if is_dataclass(outputs) and not isinstance(outputs, Mapping | type):
        outputs = vars(outputs)
    if isinstance(outputs, Mapping | list | tuple):
        for one in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors_in(one)


# ---- arithmetic


def nodes_behind(tensor: torch.Tensor) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes of autograd's graph on which a tensor depends, each once."""
    seen: set[torch.autograd.graph.Node | None] = {None}
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [each for each, _ in node.next_functions]


class TorchArithmetic(DeviceArithmetic):
    """PyTorch's arithmetic on flat tensors of one device, with the bits of `collectives.reduction.Reduction`.

    If the given tensors have the accumulators' dtype, sums overwrite them.
    """

    def total(self, nodes: Sequence[TreeNode], sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of neighbours in the tree, in the order of the tree and in the accumulators' dtype.

        Args:
            nodes: Neighbours in their order, which together are one node.
            sums: The sums of these nodes, which may be overwritten.
        """
        with torch.no_grad():
            values = list(sums)
            for left, right, _ in steps(tuple(nodes)):
                values.append(_added(values[left], values[right]))
            return values[-1].float() if values[-1].dtype in _NARROW else values[-1]

    @override
    def mean(
        self, nodes: Sequence[TreeNode], sums: Sequence[torch.Tensor], dtype: np.dtype, replicas: int
    ) -> torch.Tensor:
        with torch.no_grad():
            total = self.total(nodes, sums)
            divide([total], replicas)
            return total.to(torch_dtype(dtype))


def _added(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype not in _NARROW:
        return left.add_(right)
    if right.dtype not in _NARROW:
        return torch.add(left, right, out=right)
    return left.float().add_(right)


def divide(tensors: Sequence[torch.Tensor], divisor: float) -> None:
    """Divide tensors in place, once, as IEEE 754 defines division. On any device the bits are those of the host.

    CUDA's kernels multiply by the reciprocal of a number on the host, but divide by a tensor on the device.
    """
    if divisor == 1 or not tensors:
        return
    if math.frexp(divisor)[0] == 0.5 and 2.0**-126 <= divisor <= 2.0**126:
        torch._foreach_mul_(list(tensors), 1 / divisor)  # exact, so the same bits as a division
        return
    on_device: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for one in tensors:
        kind = one.dtype, one.device
        if kind not in on_device:
            on_device[kind] = torch.full((), divisor, dtype=one.dtype, device=one.device)
        one.div_(on_device[kind])


@final
class TorchViews:
    """PyTorch's form of `DeviceViews`. It waits for all streams of the device."""

    def view(self, array: ExportedArray) -> torch.Tensor:
        """Return an array in memory of the path as a tensor, without a copy."""
        found: torch.Tensor = from_dlpack(array)
        return found

    def addresses(self, arrays: Sequence[torch.Tensor]) -> list[int]:
        """Wait until contiguous tensors have been computed, and return their addresses."""
        if arrays:
            _awaited(arrays[0])
        return [array.data_ptr() for array in arrays]

    def dtype_of(self, array: torch.Tensor) -> np.dtype:
        """Return the dtype of a tensor as a NumPy dtype."""
        return dtype_of(array)

    def taken(self, view: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of parts of a flat view, once they are made; they are parts of one tensor."""
        whole = _awaited(view.clone())
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def stacked(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of flat views, stacked along a new first axis, once it is made."""
        return _awaited(torch.stack(list(rows)))


def _awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor has been computed, and return it."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor


# ---- devices

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
HOST = torch.device("cpu")
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: one of the two settings with which cuBLAS gives the same bits in each run."""
_DETERMINISTIC_WORKSPACES = (WORKSPACE, ":16:8")
_COMPLAINT = "deterministic"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
_NEVER = -1
_LARGE_BYTES = 1 << 30
"""Blocks of at least this size, as data sets have, are returned to the kernel when they are freed."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


class ReplicaMemory:
    """The memory in which an instance's replicas compute: the host's, or that of a device on which gradients may stay.

    Args:
        device: The device of the module if it was chosen for the replicas; None for the host.

    Attributes:
        device: The device of the replicas; the CPU if none was given.
        is_shared: Whether a device was given.
        is_on_host: Whether replicas compute in the memory of the host.
        gpu: The CUDA ordinal of the device; None for other devices.
        reads: The number of times that values were read from the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or HOST
        self.is_shared = device is not None
        self.is_on_host: bool = self.device.type == HOST.type
        self.gpu: int | None = None
        if self.device.type == "cuda":
            self.gpu = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.reads = 0

    def read(self, values: torch.Tensor) -> np.ndarray:
        """Copy values from the device to the host. The call waits until the device has computed them."""
        self.reads += 1
        return as_array(values.cpu())

    def put(self, tree: Tree) -> Tree:
        """Return the tree with its tensors on the device of the replicas."""
        return _mapped(tree, lambda tensor: put(tensor, self.device)) if self.is_shared else tree

    def put_means(self, means: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return gradients of the host on the device of the parameters.

        The call does not wait for a GPU to copy them: the host's memory stays unchanged until the next gradients
        arrive.
        """
        return [None if mean is None else mean.to(self.device, non_blocking=True) for mean in means]

    def fetched(self, tree: Tree) -> Tree:
        """Return the tree with its tensors in the memory of the host."""
        return _mapped(tree, torch.Tensor.cpu) if self.is_shared else tree


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, without waiting for the GPU's earlier work.

    The caller may overwrite the host's memory at once: a GPU copies from a page-locked copy.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    own = tensor.pin_memory()
    if own.data_ptr() == tensor.data_ptr():
        own = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return own.to(device, non_blocking=True)


def event_on(device: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event that follows the work queued so far; None on a device that computes at once."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _mapped(tree: Tree, function: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    return trees.map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


# ---- choice of a device


def as_device(given: object) -> torch.device | None:
    """Return the given device of replicas as a `torch.device`; None for None.

    Raises:
        TypeError: If it is neither a device nor a name.
        ValueError: If PyTorch knows no such device, or it is "meta".
    """
    if given is None:
        return None
    if not isinstance(given, torch.device | str):
        raise TypeError(f"replica_device is {given!r}; give 'cuda', 'cuda:1', a torch.device, or None for the host")
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"replica_device is {given!r}, which PyTorch does not know; use 'cuda', say") from error
    if device.type == "meta":
        raise ValueError("replica_device is 'meta', whose tensors have no values; use 'cuda', for example")
    return device


def chosen(device: torch.device, count: int, local_index: int) -> torch.device:
    """Return the accelerator on which the replicas of an instance compute.

    Args:
        device: The requested device. Without a number, the instances of a host take the devices in turn.
        count: The number of devices of this type that the instance sees.
        local_index: The index of the instance on its host.

    Raises:
        StrategyError: If there is no device of this type, or none with this number.
    """
    if device.type == "cpu":
        return HOST
    if not count:
        raise StrategyError(
            f"replica_device is {str(device)!r}, but PyTorch sees no {device.type} device here; install PyTorch for "
            "it, or leave replica_device out: replicas then compute on the CPU"
        )
    if device.index is not None and device.index >= count:
        raise StrategyError(
            f"replica_device is {str(device)!r}, but there are only {count} here, numbered from 0; use a smaller "
            f"number, or {device.type!r}, so that the instances of a host take them in turn"
        )
    return torch.device(device.type, local_index % count if device.index is None else device.index)


def chosen_here(device: torch.device, local_index: int) -> torch.device:
    """Return the accelerator on which the replicas of an instance compute, among those that PyTorch sees."""
    return chosen(device, count_of(device.type), local_index)


def count_of(kind: str) -> int:
    """Return the number of devices of a type that PyTorch sees."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # PyTorch was built without this type
        return 0
    return int(module.device_count()) if module.is_available() else 0


# ---- threads


class ThreadValue(threading.local, Generic[_T]):
    """A value that each thread has for itself.

    Args:
        default: The value in threads that have set none.

    Attributes:
        now: The value of the calling thread.
    """

    def __init__(self, default: _T) -> None:
        self.now = default

    def using(self, value: _T) -> Binding[_T]:
        """Set the value for this thread inside a `with` block or a decorated function."""
        return Binding(self, value)


class Binding(ContextDecorator, Generic[_T]):
    """The context of `ThreadValue.using`. A generator would take twice as long, and a step has several contexts."""

    def __init__(self, holder: ThreadValue[_T], value: _T) -> None:
        self._holder, self._value = holder, value

    def _recreate_cm(self) -> Binding[_T]:
        return Binding(self._holder, self._value)

    def __enter__(self) -> None:
        holder = self._holder
        self._before, holder.now = holder.now, self._value

    def __exit__(self, *error: object) -> None:
        self._holder.now = self._before


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Use `count` threads within an operation, in this thread. The number decides how sums are split, and so bits."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


# ---- settings of the process


def use_deterministic_operations(environ: MutableMapping[str, str]) -> None:
    """Make PyTorch use deterministic operations in this process. Call this before CUDA starts.

    An earlier choice of the user (`torch.use_deterministic_algorithms`, also with `warn_only`) is kept. cuDNN's
    benchmark of algorithms is turned off. PyTorch's filling of new memory is turned off, too, because it costs time and
    changes no result.

    Args:
        environ: `os.environ`, from which cuBLAS reads its workspace when CUDA starts.
    """
    if environ.get(WORKSPACE_VARIABLE) not in _DETERMINISTIC_WORKSPACES:
        if WORKSPACE_VARIABLE in environ or torch.cuda.is_initialized():
            _warn_of_workspace(environ.get(WORKSPACE_VARIABLE, ""))
        environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)
    torch.backends.cudnn.benchmark = False
    if not torch.are_deterministic_algorithms_enabled():
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined, unused-ignore]
        torch.use_deterministic_algorithms(True)


@contextmanager
def way_out_of_refusals() -> Iterator[None]:
    """Add a way out to PyTorch's error about an operation that has no deterministic form."""
    try:
        yield
    except RuntimeError as error:
        if _COMPLAINT in str(error) and WAY_OUT not in getattr(error, "__notes__", ()):
            error.add_note(WAY_OUT)
        raise


@cache
def _warn_of_workspace(value: str) -> None:
    said = f"is {value!r}" if value else "was not set when CUDA started"
    logger.warning(
        "%s %s, so products on GPUs may have other bits in each run; set it to %s before the program starts, or "
        "accept other bits with Defaults(deterministic=False)",
        WORKSPACE_VARIABLE,
        said,
        WORKSPACE,
    )


def keep_freed_memory() -> bool:
    """Make glibc keep the memory that PyTorch frees, in the whole process, unless the environment sets this.

    By default glibc returns free memory at the end of its heap to the kernel, and large blocks at once. A training step
    frees its activations and gradients, and the next step needs as much again. The kernel then clears and maps each
    page anew, which took up to a third of a step of a small convolutional network. With this setting a process keeps
    the memory that its largest step needed.

    Returns:
        Whether glibc keeps memory now; False if the environment decides, or the C library is another one.
    """
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGE_BYTES))


def return_unused_memory() -> None:
    """Return the free pages inside of glibc's heap to the kernel, where glibc keeps what PyTorch frees.

    PyTorch aligns its blocks, and glibc before 2.38 seldom finds a freed aligned block for a request of the same size.
    So the heap grows in the first steps, and many of its pages are not used again.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
