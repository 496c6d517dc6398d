"""The process group: the collectives of torch.distributed over one of our communicators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.distributed import ProcessGroup, distributed_c10d

from collectives import Communicator, LayoutMismatchError
from strategies.torch.process_group import arguments, arrays
from strategies.torch.process_group.arrays import bits, copy_into, description, descriptions, flat, shaped
from strategies.torch.process_group.messages import NO_LIMIT, GroupWork, Messages, WorkQueue

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )

    Reducing: TypeAlias = AllreduceOptions | ReduceOptions | ReduceScatterOptions

    class RankedGroup:
        """The methods of ProcessGroup that are used; its stubs also declare overloads that nothing here calls."""

        def __init__(self, rank: int, size: int) -> None:
            """Note rank and size."""

        def rank(self) -> int:
            """Return this rank."""

        def size(self) -> int:
            """Return the number of ranks."""

else:
    RankedGroup = ProcessGroup

Tensors = list[torch.Tensor]
NAME = "popdist"


class PopDistProcessGroup(RankedGroup):
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
        is_registered = self in distributed_c10d._world.pg_map  # type: ignore[comparison-overlap, unused-ignore]  # see RankedGroup
        return [torch.device("cpu")] if is_registered else []

    def _get_backend(self, device: torch.device) -> PopDistProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend {NAME} works with the CPU, not with {device}; name another backend for it")
        return self

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions | None = None) -> GroupWork:
        """Reduce a tensor over all ranks, in place."""
        op = _op_of(opts, tensors[0])
        return self._begin("all_reduce", partial(self._reduce_each, tensors, op), tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None) -> GroupWork:
        """Reduce several tensors over all ranks, in place."""
        for tensor in tensors:
            _op_of(opts, tensor)
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: ReduceOptions) -> GroupWork:
        """Reduce a tensor over all ranks; only the root's tensor changes."""
        op, root = _op_of(opts, tensors[0]), int(opts.rootRank)
        return self._begin("reduce", partial(self._reduce_to, tensors[0], op, root), tensors, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: ReduceScatterOptions | None = None
    ) -> GroupWork:
        """Reduce a list of one tensor per rank; each rank receives its own."""
        [output], [tensors] = outputs, inputs
        arguments.refuse_others_than(output, tensors, self.size(), "reduce_scatter")
        op = _op_of(opts, output)
        action = partial(self._scatter_reduced, output, tensors, op, descriptions(tensors))
        return self._begin("reduce_scatter", action, [output, *tensors], opts, 1)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> GroupWork:
        """Reduce a tensor of one block per rank; each rank receives its own block."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions | None = None
    ) -> GroupWork:
        """Reduce several tensors as `reduce_scatter_single` does."""
        for output, tensor in zip(outputs, inputs, strict=True):
            arguments.refuse_uneven(tensor, output, self.size(), "reduce_scatter_single")
        op, name = _op_of(opts, outputs[0]), descriptions(inputs)

        def action() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._scatter_reduced(output, [tensor], op, name)

        return self._begin("reduce_scatter_single", action, [*outputs, *inputs], opts, len(outputs))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_each(self, tensors: Tensors, op: str) -> None:
        name = descriptions(tensors) if len(tensors) > 1 else ""
        for tensor in tensors:  # in their shapes, so that calls with other shapes differ
            copy_into(tensor, arrays.all_reduce(self._communicator, shaped(tensor), op, name))

    def _reduce_to(self, tensor: torch.Tensor, op: str, root: int) -> None:
        reduced = arrays.all_reduce(self._communicator, shaped(tensor).clone(), op, f"reduce to rank {root}")
        if self.rank() == root:
            copy_into(tensor, reduced)

    def _scatter_reduced(self, output: torch.Tensor, tensors: Tensors, op: str, name: str) -> None:
        values = flat(tensors[0]) if len(tensors) == 1 else torch.cat([flat(each) for each in tensors])
        out = flat(output)
        arrays.reduce_scatter(self._communicator, values, out, op, name)
        copy_into(output, out)

    # ---- moves

    def broadcast(self, tensors: Tensors, opts: BroadcastOptions) -> GroupWork:
        """Copy the root's tensor to all ranks."""
        root, name = int(opts.rootRank), descriptions(tensors)

        def action() -> None:
            for tensor in tensors:
                values = flat(tensor)
                self._communicator.broadcast(bits(values), root, name=name)
                copy_into(tensor, values)

        return self._begin("broadcast", action, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None) -> GroupWork:
        """Copy each rank's tensor to all ranks, into one tensor per rank."""
        [tensors], [tensor] = outputs, inputs
        arguments.refuse_others_than(tensor, tensors, self.size(), "all_gather")

        def action() -> None:
            _deal_out(self._gathered(tensor, description(tensor)), tensors, tensor.dtype)

        return self._begin("all_gather", action, [*tensors, tensor], opts, len(tensors))

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> GroupWork:
        """Gather several tensors as `allgather` does; `outputs` has a list for each rank."""
        name = descriptions(inputs)

        def action() -> None:
            for number, tensor in enumerate(inputs):
                _deal_out(self._gathered(tensor, name), [each[number] for each in outputs], tensor.dtype)

        results = [tensor for each in outputs for tensor in each]
        return self._begin("all_gather_coalesced", action, [*results, *inputs], opts, len(results))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> GroupWork:
        """Copy each rank's tensor to all ranks, into one block per rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> GroupWork:
        """Gather several tensors as `all_gather_single` does."""
        for output, tensor in zip(outputs, inputs, strict=True):
            arguments.refuse_uneven(output, tensor, self.size(), "all_gather_single")
        name = descriptions(inputs)

        def action() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                values = flat(output)
                self._gathered(tensor, name, bits(values).reshape(self.size(), -1))
                copy_into(output, values)

        return self._begin("all_gather_single", action, [*outputs, *inputs], opts, len(outputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: GatherOptions) -> GroupWork:
        """Copy each rank's tensor to the root, into one tensor per rank."""
        [tensor], root = inputs, int(opts.rootRank)
        tensors = outputs[0] if self.rank() == root else []
        if self.rank() == root:
            arguments.refuse_others_than(tensor, tensors, self.size(), "gather")

        def action() -> None:
            rows = self._communicator.gather(bits(flat(tensor)), root, name=description(tensor))
            if rows is not None:
                _deal_out(rows, tensors, tensor.dtype)

        return self._begin("gather", action, [*tensors, tensor], opts, len(tensors))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: ScatterOptions) -> GroupWork:
        """Copy one tensor of the root to each rank."""
        [output], root = outputs, int(opts.rootRank)
        tensors = inputs[0] if self.rank() == root else []
        if self.rank() == root:
            arguments.refuse_others_than(output, tensors, self.size(), "scatter")

        def action() -> None:
            row = bits(flat(output))
            rows = np.empty((self.size(), row.size), np.uint8)
            for each, tensor in zip(rows, tensors, strict=False):  # only the root has tensors
                each[:] = bits(flat(tensor))
            self._communicator.broadcast(rows, root, name=f"scatter {description(output)}")
            _deal_out(rows[self.rank()][np.newaxis], [output], output.dtype)

        return self._begin("scatter", action, [output, *tensors], opts, 1)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: AllToAllOptions | None = None) -> GroupWork:
        """Send one tensor to each rank, and receive one from each."""
        return self._all_to_all(outputs, inputs, opts, descriptions([each.new_empty(0) for each in inputs[:1]]))

    def _all_to_all(self, outputs: Tensors, inputs: Tensors, opts: AllToAllOptions | None, name: str) -> GroupWork:
        if not len(outputs) == len(inputs) == self.size():
            raise ValueError(
                f"all_to_all was called with {len(inputs)} inputs and {len(outputs)} outputs in a group of "
                f"{self.size()} ranks; give one of each per rank"
            )

        def action() -> None:
            blocks = self._exchanged(
                [bits(flat(each)) for each in inputs], [each.numel() * each.itemsize for each in outputs], name
            )
            for output, block in zip(outputs, blocks, strict=True):
                _deal_out(block[np.newaxis], [output], output.dtype)

        return self._begin("all_to_all", action, [*outputs, *inputs], opts, len(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions | None = None,
    ) -> GroupWork:
        """Send a part of the first axis to each rank, and receive one from each; no splits: equal parts."""
        received = arguments.splits_of(output, output_splits, self.size(), "output")
        sent = arguments.splits_of(tensor, input_splits, self.size(), "input")
        if not output.is_contiguous():
            raise ValueError("the output of all_to_all_single is not contiguous; give a contiguous tensor")
        name = description(tensor[:0])  # dtype and shape of the rows, of which ranks have different numbers
        return self._all_to_all(list(output.split(received)), list(tensor.split(sent)), opts, name)

    alltoall_base = all_to_all_single

    def barrier(self, opts: BarrierOptions | None = None) -> GroupWork:
        """Wait until all ranks have called this."""
        return self._begin("barrier", self._communicator.barrier, [], opts)

    def _gathered(self, tensor: torch.Tensor, name: str, out: np.ndarray | None = None) -> np.ndarray:
        return self._communicator.all_gather(bits(flat(tensor)), out, name=name)

    def _exchanged(self, blocks: Sequence[np.ndarray], expected: Sequence[int], name: str) -> list[np.ndarray]:
        """Send block r to rank r; return the block that each rank sends to this one.

        The ranks first tell each other all sizes, so that all of them see a mismatch. In round d each rank sends to the
        rank d places before it.
        """
        rank, size = self.rank(), self.size()
        own = np.array([[block.size for block in blocks], expected], np.int64)
        sizes = self._communicator.all_gather(own, name=f"all_to_all {name}")
        arguments.refuse_crossed_sizes(sizes)
        received: list[np.ndarray] = [np.empty(0, np.uint8)] * size
        received[rank] = blocks[rank]
        for distance in range(1, size):
            sends = [sizes[each, 0, (each - distance) % size] for each in range(size)]
            padded = np.zeros(max(sends), np.uint8)
            block = blocks[(rank - distance) % size]
            padded[: block.size] = block
            source = (rank + distance) % size
            found = self._communicator.shift(padded, distance=distance, name="all_to_all")
            received[source] = found[: sizes[source, 0, rank]]
        return received

    # ---- messages between two ranks

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> GroupWork:
        """Send a tensor to a rank; the work ends when the tensor may be changed."""
        return self._message(tensors[0], "send", to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        """Receive a tensor from a rank."""
        return self._message(tensors[0], "recv", source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        """Receive a tensor from the rank that sends first."""
        return self._message(tensors[0], "recv", None, tag)

    def _message(self, tensor: torch.Tensor, verb: str, other: int | None, tag: int) -> GroupWork:
        self._communicator.refuse_in_child()
        arrays.refuse_others([tensor])
        if other == self.rank():
            raise ValueError(f"rank {other} cannot {verb} to or from itself; copy the tensor")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"the tensor of {verb} is not contiguous, or a lazy negative; give tensor.clone()")
        title = f"{verb} {description(tensor)}" + ("" if other is None else f" ({_PREPOSITIONS[verb]} rank {other})")
        work = GroupWork(title, lambda: None, [tensor])
        messages = self._connected_messages()
        if verb == "send":
            assert other is not None
            messages.send(bits(tensor), str(tensor.dtype), other, tag, work)
        else:
            messages.receive(bits(tensor), str(tensor.dtype), other, tag, work)
        return work

    def _connected_messages(self) -> Messages:
        if self._messages is None:
            link = self._communicator.beside
            if link is None:
                raise RuntimeError(
                    f"messages between two ranks need MPI or gRPC, and {self.size()} rank(s) are connected by "
                    f"{self._communicator.mechanism!r}; use collectives"
                )
            self._messages = Messages(link, self._communicator.watch_beside())
        return self._messages

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
        if sys.exc_info()[0] is None and not self._is_left:
            try:
                self.drain()
                self._communicator.close()
            finally:
                self._release()
        else:
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
        arrays.refuse_others(tensors)
        is_async = bool(getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", NO_LIMIT)
        return self._queue.begin(GroupWork(title, partial(self._run, action, timeout), tensors[:results]), is_async)

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


_PREPOSITIONS = {"send": "to", "recv": "from"}


def _op_of(opts: Reducing | None, tensor: torch.Tensor) -> str:
    op: str = "SUM" if opts is None else opts.reduceOp.op.name  # type: ignore[attr-defined, unused-ignore]  # the stub lacks it
    return arrays.checked_op(op, tensor.dtype)


def _deal_out(rows: np.ndarray, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    for row, tensor in zip(torch.from_numpy(rows), tensors, strict=True):
        if tensor.numel():  # rows without elements have strides that view refuses
            copy_into(tensor, row.view(dtype))
