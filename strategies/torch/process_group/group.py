"""The process group: the collectives of torch.distributed over one of our communicators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed import ProcessGroup, distributed_c10d

from collectives import Communicator, LayoutMismatchError, UnsupportedBufferError
from collectives.tree import combined
from strategies.torch.process_group.messages import NO_LIMIT, GroupWork, Messages, TensorMessage, WorkQueue
from strategies.torch.tensors import dtype_of

Tensors: TypeAlias = Sequence[torch.Tensor]
Options: TypeAlias = Any
"""The options of a collective, such as `torch._C._distributed_c10d.AllreduceOptions`; stubs lack what is read here."""
NAME = "popdist"
_Base: Any = ProcessGroup  # its stubs also declare overloads that nothing here calls

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


class PopDistProcessGroup(_Base):
    """A process group whose ranks call the same collectives in the same order.

    The calls of all ranks are compared first: if shapes, dtypes, operations or roots differ, every rank raises
    `LayoutMismatchError`, no tensor is changed, and the group stays usable. Sums have the order of the tree over the
    ranks (`collectives.tree`), whatever carries them. All tensors are dense and on the CPU.

    Methods have the names and arguments of `torch.distributed.ProcessGroup`; torch.distributed calls them.

    Args:
        communicator: Ranks of the group; closed with it.
        name: Name of the group, for threads.
    """

    def __init__(self, communicator: Communicator, name: str = NAME) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._communicator = communicator
        self._name = self._description = name
        self._queue = WorkQueue(name)
        self._messages: Messages | None = None
        self._is_left = False  # whether another rank has destroyed the group

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    # The group's own name and description are in C++ only for groups that have a backend of C++.
    def setGroupName(self, name: str) -> None:
        """Set the name by which torch.distributed finds the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name by which torch.distributed finds the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set the description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._description

    # torch.distributed.checkpoint asks on which devices the group works, and torch then asks for the backend there.
    # While PyTorch 2.15 registers the group, it attaches a flight recorder if there are devices, which needs C++.
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self in distributed_c10d._world.pg_map else []

    def _get_backend(self, device: torch.device) -> PopDistProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend {NAME} works with the CPU, not with {device}; name another backend for it")
        return self

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: Options = None) -> GroupWork:
        """Reduce tensors over all ranks, in place."""
        op = [_op_of(opts, tensor) for tensor in tensors][0]
        name = _descriptions(tensors) if len(tensors) > 1 else ""

        def action() -> None:
            for tensor in tensors:  # in their shapes, so that calls with other shapes differ
                _copy_into(tensor, _all_reduce(self._communicator, _shaped(tensor), op, name))

        return self._begin("all_reduce", action, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Options) -> GroupWork:
        """Reduce a tensor over all ranks; only the root's tensor changes."""
        [tensor], root = tensors, int(opts.rootRank)
        op = _op_of(opts, tensor)

        def action() -> None:
            reduced = _all_reduce(self._communicator, _shaped(tensor).clone(), op, f"reduce to rank {root}")
            if self.rank() == root:
                _copy_into(tensor, reduced)

        return self._begin("reduce", action, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options = None) -> GroupWork:
        """Reduce a list of one tensor per rank; each rank receives its own."""
        for output, tensors in zip(outputs, inputs, strict=True):
            self._check_tensor_list(output, tensors, "reduce_scatter")
        return self._scatter_reduced("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> GroupWork:
        """Reduce several tensors of one block per rank; each rank receives its own blocks."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_even_blocks(tensor, output, "reduce_scatter_single")
        return self._scatter_reduced("reduce_scatter_single", outputs, [[tensor] for tensor in inputs], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Options = None) -> GroupWork:
        """Reduce a tensor of one block per rank; each rank receives its own block."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_reduced(self, title: str, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> GroupWork:
        op, every = _op_of(opts, outputs[0]), [tensor for tensors in inputs for tensor in tensors]
        name = _descriptions(every)

        def action() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                values = _flat(tensors[0]) if len(tensors) == 1 else torch.cat([_flat(each) for each in tensors])
                out = _flat(output)
                if op in _ORDERED and values.dtype is not torch.bool:
                    self._communicator.reduce_scatter(_numbers(values), _numbers(out), _ORDERED[op], name=name)
                else:
                    whole = _all_reduce(self._communicator, values.clone(), op, f"reduce_scatter {name}")
                    out.copy_(whole.view(self.size(), -1)[self.rank()])
                _copy_into(output, out)

        return self._begin(title, action, [*outputs, *every], opts, len(outputs))

    # ---- moves

    def broadcast(self, tensors: Tensors, opts: Options) -> GroupWork:
        """Copy the root's tensors to all ranks."""
        root, name = int(opts.rootRank), _descriptions(tensors)

        def action() -> None:
            for tensor in tensors:
                values = _flat(tensor)
                self._communicator.broadcast(_bits(values), root, name=name)
                _copy_into(tensor, values)

        return self._begin("broadcast", action, tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options = None) -> GroupWork:
        """Copy each rank's tensor to all ranks, into one tensor per rank."""
        return self._gather_all("all_gather", [[tensor] for tensor in outputs[0]], inputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options = None) -> GroupWork:
        """Gather several tensors as `allgather` does; `outputs` has a list for each rank."""
        return self._gather_all("all_gather_coalesced", outputs, inputs, opts)

    def _gather_all(self, title: str, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> GroupWork:
        name, of_inputs = _descriptions(inputs), [[each[number] for each in outputs] for number in range(len(inputs))]
        for tensor, tensors in zip(inputs, of_inputs, strict=True):
            self._check_tensor_list(tensor, tensors, title)

        def action() -> None:
            for tensor, tensors in zip(inputs, of_inputs, strict=True):
                _deal_out(self._communicator.all_gather(_bits(_flat(tensor)), name=name), tensors)

        results = [tensor for each in outputs for tensor in each]
        return self._begin(title, action, [*results, *inputs], opts, len(results))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> GroupWork:
        """Copy several tensors of each rank to all ranks, into one block per rank."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_even_blocks(output, tensor, "all_gather_single")
        name = _descriptions(inputs)

        def action() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                values = _flat(output)
                rows = _bits(values).reshape(self.size(), -1)
                self._communicator.all_gather(_bits(_flat(tensor)), rows, name=name)
                _copy_into(output, values)

        return self._begin("all_gather_single", action, [*outputs, *inputs], opts, len(outputs))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Options = None) -> GroupWork:
        """Copy each rank's tensor to all ranks, into one block per rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> GroupWork:
        """Copy each rank's tensor to the root, into one tensor per rank."""
        [tensor], root = inputs, int(opts.rootRank)
        tensors = self._of_root(root, outputs, tensor, "gather")

        def action() -> None:
            rows = self._communicator.gather(_bits(_flat(tensor)), root, name=_descriptions(inputs))
            if rows is not None:
                _deal_out(rows, tensors)

        return self._begin("gather", action, [*tensors, tensor], opts, len(tensors))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> GroupWork:
        """Copy one tensor of the root to each rank."""
        [output], root = outputs, int(opts.rootRank)
        tensors = self._of_root(root, inputs, output, "scatter")

        def action() -> None:
            rows = np.empty((self.size(), output.numel() * output.itemsize), np.uint8)
            for row, tensor in zip(rows, tensors, strict=False):  # only the root has tensors
                row[:] = _bits(_flat(tensor))
            self._communicator.broadcast(rows, root, name=f"scatter {_descriptions(outputs)}")
            _deal_out(rows[self.rank()][np.newaxis], outputs)

        return self._begin("scatter", action, [output, *tensors], opts, 1)

    def _of_root(self, root: int, lists: Sequence[Tensors], tensor: torch.Tensor, title: str) -> Tensors:
        """Return the root's list of one tensor per rank; the other ranks have none."""
        if self.rank() != root:
            return []
        self._check_tensor_list(tensor, lists[0], title)
        return lists[0]

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> GroupWork:
        """Send one tensor to each rank, and receive one from each."""
        return self._all_to_all(outputs, inputs, opts, _descriptions([each.new_empty(0) for each in inputs[:1]]))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options = None,
    ) -> GroupWork:
        """Send a part of the first axis to each rank, and receive one from each; no splits: equal parts."""
        received = _splits_of(output, output_splits, self.size(), "output")
        sent = _splits_of(tensor, input_splits, self.size(), "input")
        if not output.is_contiguous():
            raise ValueError("the output of all_to_all_single is not contiguous; give a contiguous tensor")
        name = _descriptions([tensor[:0]])  # dtype and shape of the rows, of which ranks have different numbers
        return self._all_to_all(output.split(received), tensor.split(sent), opts, name)

    alltoall_base = all_to_all_single

    def _all_to_all(self, outputs: Tensors, inputs: Tensors, opts: Options, name: str) -> GroupWork:
        if not len(outputs) == len(inputs) == self.size():
            raise ValueError(
                f"all_to_all was called with {len(inputs)} inputs and {len(outputs)} outputs in a group of "
                f"{self.size()} ranks; give one of each per rank"
            )

        def action() -> None:
            expected = [each.numel() * each.itemsize for each in outputs]
            blocks = self._exchanged([_bits(_flat(each)) for each in inputs], expected, name)
            for output, block in zip(outputs, blocks, strict=True):
                _deal_out(block[np.newaxis], [output])

        return self._begin("all_to_all", action, [*outputs, *inputs], opts, len(outputs))

    def _exchanged(self, blocks: Sequence[np.ndarray], expected: Sequence[int], name: str) -> list[np.ndarray]:
        """Send block r to rank r; return the block that each rank sends to this one.

        The ranks first tell each other all sizes, so that all of them see a mismatch. In round d each rank sends to the
        rank d places before it.
        """
        rank, size = self.rank(), self.size()
        own = np.array([[block.size for block in blocks], expected], np.int64)
        sizes = self._communicator.all_gather(own, name=f"all_to_all {name}")
        sent = sizes[:, 0]  # bytes that rank i sends to rank j
        for source, to in np.argwhere(sent != sizes[:, 1].T):
            raise LayoutMismatchError(
                f"all_to_all: rank {source} sends {sent[source, to]} bytes to rank {to}, which expects "
                f"{sizes[to, 1, source]}; give splits that fit on all ranks"
            )
        received = [blocks[rank]] * size
        for distance in range(1, size):
            padded = np.zeros(max(sent[each, (each - distance) % size] for each in range(size)), np.uint8)
            block = blocks[(rank - distance) % size]
            padded[: block.size] = block
            source = (rank + distance) % size
            found = self._communicator.shift(padded, distance=distance, name="all_to_all")
            received[source] = found[: sent[source, rank]]
        return received

    def barrier(self, opts: Options = None) -> GroupWork:
        """Wait until all ranks have called this."""
        return self._begin("barrier", self._communicator.barrier, [], opts)

    # ---- arguments

    def _check_tensor_list(self, tensor: torch.Tensor, tensors: Tensors, title: str) -> None:
        """Refuse a list that does not have one tensor per rank, each of the size and dtype of `tensor`."""
        if len(tensors) != self.size():
            raise ValueError(
                f"{title} was called with a list of {len(tensors)} tensors in a group of {self.size()} ranks"
            )
        for each in tensors:
            if each.dtype != tensor.dtype or each.numel() != tensor.numel():
                raise ValueError(
                    f"{title} was called with {_descriptions([tensor])} and, in the list, {_descriptions([each])}; the "
                    "backend popdist needs tensors of equal size and dtype, so pad them"
                )

    def _check_even_blocks(self, whole: torch.Tensor, part: torch.Tensor, title: str) -> None:
        """Refuse a tensor of blocks that does not have one block per rank, each of the size and dtype of `part`."""
        size = self.size()
        if whole.dtype != part.dtype or whole.numel() != size * part.numel():
            raise ValueError(
                f"{title} was called with {_descriptions([whole])} and {_descriptions([part])} in a group of {size} "
                f"ranks; the larger one has to have {size} times the elements of the other one, and the same dtype"
            )

    # ---- messages between two ranks

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> GroupWork:
        """Send a tensor to a rank; the work ends when the tensor may be changed."""
        return self._message(tensors[0], "send", f" (to rank {to})", to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        """Receive a tensor from a rank."""
        return self._message(tensors[0], "recv", f" (from rank {source})", source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        """Receive a tensor from the rank that sends first."""
        return self._message(tensors[0], "recv", "", None, tag)

    def _message(self, tensor: torch.Tensor, verb: str, where: str, other: int | None, tag: int) -> GroupWork:
        self._communicator.refuse_in_child()
        _check_plain_tensors([tensor])
        if other == self.rank():
            raise ValueError(f"rank {other} cannot {verb} to or from itself; copy the tensor")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"the tensor of {verb} is not contiguous, or a lazy negative; give tensor.clone()")
        if self._messages is None:
            if (link := self._communicator.beside) is None:
                raise RuntimeError(
                    f"messages between two ranks need MPI or gRPC, and {self.size()} rank(s) are connected by "
                    f"{self._communicator.mechanism!r}; use collectives"
                )
            self._messages = Messages(link, self._communicator.watch_beside())
        work = GroupWork(f"{verb} {_descriptions([tensor])}{where}", lambda: None, [tensor])
        return self._messages.begin(TensorMessage(_bits(tensor), str(tensor.dtype), other, tag, work, verb == "send"))

    # ---- life cycle

    def drain(self) -> None:
        """Wait until the works that were begun have ended; receives without a message yet fail."""
        self._queue.drain()
        if self._messages is not None:
            self._messages.finish()

    def shutdown(self) -> None:
        """Wait for pending works, then for the other ranks, and release all resources.

        While an exception is being handled, or after another rank has done this too early, wait for nobody.
        """
        if self._communicator.is_inherited:
            return  # a forked child leaves the group to its parent
        try:
            if sys.exc_info()[0] is None and not self._is_left:
                self.drain()
                self._communicator.close()
        finally:
            self._release()

    def abort(self) -> None:
        """Release all resources without waiting for other ranks."""
        if not self._communicator.is_inherited:
            self._release()

    def _release(self) -> None:
        self._queue.close()
        if self._messages is not None:
            self._messages.close()
        self._communicator.abandon()

    def set_timeout(self, timeout: timedelta) -> None:
        """Let waits for other ranks end after this time."""
        self._communicator.limit_waits(timeout.total_seconds())

    def _begin(
        self, title: str, action: Callable[[], None], tensors: Tensors, opts: object, results: int | None = None
    ) -> GroupWork:
        """Begin an operation; the first `results` of the tensors, by default all, hold its result."""
        self._communicator.refuse_in_child()
        _check_plain_tensors(tensors)
        is_async = bool(getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", NO_LIMIT)
        return self._queue.begin(GroupWork(title, partial(self._run, action, timeout), [*tensors[:results]]), is_async)

    def _run(self, action: Callable[[], None], timeout: timedelta) -> None:
        """Carry an operation out; if `timeout` is positive, it limits each wait in place of the group's."""
        of_group_s = self._communicator.limits.timeout_s
        if timeout > NO_LIMIT:
            self.set_timeout(timeout)
        try:
            action()
        except LayoutMismatchError as error:
            self._is_left = self._is_left or bool(error.closed)
            raise
        finally:
            if timeout > NO_LIMIT:
                self._communicator.limit_waits(of_group_s)


def _op_of(opts: Options, tensor: torch.Tensor) -> str:
    """Return the name of a reduction in `torch.distributed.ReduceOp`.

    Raises:
        UnsupportedBufferError: Tensors of this dtype cannot be reduced so.
    """
    op, dtype = "SUM" if opts is None else str(opts.reduceOp.op.name), tensor.dtype
    known = [*_OF_BOOLS] if dtype is torch.bool else [*_ORDERED, *_GATHERED]
    if op not in known or (op.startswith("B") and (dtype.is_floating_point or dtype.is_complex)):
        raise UnsupportedBufferError(
            f"the backend popdist cannot reduce {dtype} by {op}; use one of {', '.join(known)} (BAND, BOR and BXOR for "
            "integers)"
        )
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 1):
        way = "torch.view_as_real(tensor)" if dtype.is_complex else "tensor.float()"
        raise UnsupportedBufferError(f"the backend popdist cannot reduce {dtype}; convert it, for example with {way}")
    return op


def _splits_of(tensor: torch.Tensor, splits: Sequence[int], size: int, title: str) -> list[int]:
    """Return the number of rows for each rank; no splits: equal numbers."""
    length = tensor.shape[0] if tensor.dim() else 0
    if not splits and length % size == 0:
        return [length // size] * size
    if len(splits) != size or sum(splits) != length:
        raise ValueError(
            f"the {title} of all_to_all_single has {length} rows and the splits {list(splits)} in a group of {size} "
            "ranks; give one split per rank, whose sum is the number of rows"
        )
    return list(splits)


def _check_plain_tensors(tensors: Tensors) -> None:
    """Refuse tensors that are on a device, or sparse, or have no memory of their own.

    Raises:
        UnsupportedBufferError: There is such a tensor.
    """
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ not in _PLAIN:
            raise UnsupportedBufferError(
                f"the backend popdist takes plain tensors, not {type(tensor).__name__}, which wraps another one; give "
                "the one inside, such as tensor.to_local() of a DTensor, or tensor.wait() of an AsyncCollectiveTensor"
            )
        kind = "quantized " if tensor.is_quantized else "" if tensor.layout is torch.strided else "sparse "
        if tensor.device.type != "cpu":
            way_out = "move it with tensor.cpu(), or make a group of another backend for it: new_group(backend='nccl')"
        elif tensor.is_quantized:
            way_out = "give tensor.dequantize()"
        elif kind:
            way_out = "give tensor.to_dense(), or make an embedding with sparse=False"
        else:
            continue
        raise UnsupportedBufferError(
            f"the backend popdist takes dense tensors on the CPU, not a {kind}tensor on {tensor.device}; {way_out}"
        )


def _shaped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a contiguous tensor of the same shape, without a copy if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a contiguous tensor of one dimension, without a copy if possible."""
    return _shaped(tensor).view(-1)


class _Memory:
    """The memory of a contiguous tensor, as NumPy asks for it; an array of it keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        place = (tensor.data_ptr(), False)
        shape = (tensor.numel() * tensor.itemsize,)
        self.tensor = tensor
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": place}


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor of any dtype, as flat uint8.

    `tensor.numpy()` would forbid PyTorch to resize the tensor afterwards, as FSDP and hooks of DDP do.
    """
    return np.asarray(_Memory(tensor))


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as numbers, in its shape."""
    return _bits(tensor).view(dtype_of(tensor)).reshape(tensor.shape)


def _descriptions(tensors: Tensors) -> str:
    """Format dtypes and shapes for messages and for the comparison of calls: `float32[3,4] int64[]`."""
    return " ".join(f"{str(one.dtype).removeprefix('torch.')}[{','.join(map(str, one.shape))}]" for one in tensors)


def _copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy flat values into a tensor, unless they are its memory."""
    if tensor.data_ptr() != values.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(values.view(tensor.shape))


def _deal_out(rows: np.ndarray, tensors: Tensors) -> None:
    """Copy the bits of each row into a tensor."""
    for row, tensor in zip(torch.from_numpy(rows), tensors, strict=True):
        if tensor.numel():  # rows without elements have strides that view refuses
            _copy_into(tensor, row.view(tensor.dtype))


def _all_reduce(communicator: Communicator, values: torch.Tensor, op: str, name: str = "") -> torch.Tensor:
    """Reduce a tensor over all ranks in the order of the tree; return it or another one, with the result.

    Args:
        communicator: Ranks of the group.
        values: Contiguous tensor; may be overwritten.
        op: Name of the operation in `torch.distributed.ReduceOp`.
        name: Facts for the comparison of calls.
    """
    if values.dtype is torch.bool and op in _OF_BOOLS:
        return _all_reduce(communicator, values.view(torch.uint8), _OF_BOOLS[op], f"bool {op} {name}").view(torch.bool)
    if op in _ORDERED:
        communicator.all_reduce(_numbers(values), _ORDERED[op], name=name)
        return values
    # The collectives do not have the other operations, so gather the values.
    rows = torch.from_numpy(communicator.all_gather(_bits(values), name=f"{op} {_descriptions([values])} {name}"))
    if not values.numel():  # view refuses the strides of rows without elements
        return values
    each = [row.view(values.dtype) for row in rows]
    if values.dtype in _IN_FLOAT32:
        each = [row.float() for row in each]
    result: torch.Tensor = combined(each, _GATHERED[op])
    return result.to(values.dtype)
