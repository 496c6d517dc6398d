"""The mean gradients of a module over all replicas, computed on the device of the replicas."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NoReturn, final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from collectives.tree import TreeNode, combined, node_of_halves
from strategies.core.engine import Buffers
from strategies.errors import StrategyError
from strategies.exchange.means import Bucket
from strategies.exchange.on_device import DevicePath
from strategies.torch.device import ReplicaMemory, put
from strategies.torch.exchange.arithmetic import TorchArithmetic, divide, torch_dtype
from strategies.torch.exchange.interface import GradientExchange
from strategies.torch.exchange.plan import Fact, Tail, Told, TorchGradientPlan
from strategies.torch.outcomes import are_weighted
from strategies.torch.replicas.groups import GroupRow
from strategies.torch.tensors import copy_pairs, real_views


class UnreadMetrics:
    """An array of one axis on a device. NumPy's first access reads it, which waits for the device.

    Args:
        values: A tensor on the device, which must not change any more.
        memory: The memory of the replicas, which counts reads.
    """

    def __init__(self, values: torch.Tensor, memory: ReplicaMemory) -> None:
        self._unread: tuple[torch.Tensor, ReplicaMemory, torch.cuda.Event | None] | None
        self._unread = values, memory, _event_of(values)
        self._read = np.empty(0, np.float32)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        unread = self._unread  # read the attribute once: another thread may clear it
        if unread is not None:
            values, memory, event = unread
            if event is not None:
                event.synchronize()  # this thread may have another current stream
            self._read = memory.read(values)
            self._unread = None  # free the device's memory: programs keep metrics
        return self._read.copy() if copy else self._read

    def __getitem__(self, number: int) -> np.float32:
        return np.float32(np.asarray(self)[number])

    def is_ready(self) -> bool:
        """Return whether the values can be read without waiting."""
        _, _, event = self._unread or (None, None, None)
        return event is None or bool(event.query())

    def is_deleted(self) -> bool:
        """Return False: the memory is never released early."""
        return False


def _event_of(values: torch.Tensor) -> torch.cuda.Event | None:
    """Return a CUDA event that follows the computation of the values; None if the device is not CUDA."""
    if values.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return event


@final
class DeviceExchange(GradientExchange):
    """An exchange whose sums and means stay on a device.

    A large gradient is passed on as autograd has made it; small gradients are copied into the buffer of their dtype.
    Two neighbours in the tree are added as soon as both are there, so at most log2(local replicas) + 1 sums exist.

    A loop of the program first exchanges the replicas' tails over the communicator, because the host knows them. So
    instances whose loops have diverged detect it there, and no host waits for the device.

    Args:
        plan: The plan of the gradients, with one bucket, not quantised. Its tail has all values, the metrics only if
            one instance has all replicas, or none for a loop.
        names: The names of the metrics.
        path: The path that makes means of sums.
        memory: The memory of the replicas.
        communicator: The communicator of all instances, for loops.
        rows: For each local replica, its rows of grouped parameters, by their numbers.
        first: The global index of the first local replica.
        checks: Whether to record which gradients are finite.
    """

    def __init__(
        self,
        plan: TorchGradientPlan,
        names: tuple[str, ...],
        path: DevicePath,
        memory: ReplicaMemory,
        communicator: Communicator,
        rows: Sequence[Mapping[int, GroupRow]] = ({},),
        first: int = 0,
        checks: bool = False,
    ) -> None:
        super().__init__(plan, names)
        self.buckets = [Bucket(f"{plan.title}/0", plan.layouts[0], (), frozenset())]
        self._path, self._memory, self._communicator = path, memory, communicator
        self._rows, self._first, self._checks = rows, first, checks
        self._is_of_one, self._is_alone = path.spread.size == 1, path.spread.replicas == 1
        self._dtypes = [torch_dtype(parameter.dtype) for parameter in plan.parameters]
        self._travelling = [torch_dtype(plan.transfer.dtype_of(parameter.dtype)) for parameter in plan.parameters]
        self._taken: list[torch.Tensor | None] = []  # the buffers of the last replica
        self._nodes: list[TreeNode] = []
        self._sums: list[Sequence[torch.Tensor]] = []  # of the nodes
        self._are_finite: list[torch.Tensor] = []  # for each local replica
        self._told: list[Told] = []
        self._results: Sequence[torch.Tensor | None] = ()

    @property
    def is_of_one(self) -> bool:
        """Whether one instance has all replicas."""
        return self._is_of_one

    @property
    def changed(self) -> list[Sequence[Fact]]:
        """Return whether the step has changed each buffer of each local replica (`Told.has_changed`)."""
        return [one.has_changed for one in self._told]

    # ---- the gradients of local replicas

    @override
    def let_go(self) -> None:
        self._results, self._taken = (), []
        self._told, self._are_finite, self._nodes, self._sums = [], [], [], []

    @override
    def give_back(self) -> None:
        self._taken = []

    @override
    def take(self, number: int, gradient: torch.Tensor | None, place: int = 0) -> NoReturn:
        """Raise: gradients on a device are not exchanged while the backward pass runs."""
        raise AssertionError("gradients on a device are exchanged at the end of the backward pass")

    @override
    def take_all(self, gradients: Sequence[torch.Tensor | None], place: int = 0) -> None:
        """Take all gradients of a local replica; see `GradientExchange`. The exchange may change them from here on.

        Raises:
            StrategyError: If a gradient is sparse or on another device, or a CUDA graph is being captured.
        """
        if self._memory.gpu is not None and torch.cuda.is_current_stream_capturing():
            raise StrategyError(
                "a CUDA graph is captured around the backward pass, but its replay would not exchange gradients with "
                "other replicas; capture the module inside, or leave the graph out"
            )
        with torch.no_grad():
            found = [self._whole(place, number, one) for number, one in enumerate(real_views(gradients))]
            if self._checks:
                self._are_finite.append(are_finite(found, self._memory.device))
            _separate(found)
            if self._is_alone:
                pairs = zip(found, self._travelling, strict=True)
                self._taken = [one if one is None or one.dtype is dtype else one.to(dtype) for one, dtype in pairs]
            else:
                self._taken = [*self._flat(found)]

    def _whole(self, place: int, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient in the shape of the whole parameter: a row of it is padded with zeros."""
        if gradient is None:
            return None
        parameter = self.plan.parameters[number]
        if gradient.layout is not torch.strided:
            raise StrategyError(
                f"the gradient of {parameter.name} is sparse, but only dense ones can be averaged; construct its layer "
                "with sparse=False"
            )
        if gradient.device.type != self._memory.device.type:
            raise StrategyError(
                f"the gradient of {parameter.name} is on {gradient.device}, but the module was on "
                f"{self._memory.device} before; move the module first"
            )
        row = self._rows[place].get(number)
        if row is None:
            return gradient
        whole = torch.zeros(parameter.shape, dtype=gradient.dtype, device=gradient.device)
        whole[row.number].copy_(gradient * row.gain)  # the other rows stay zero
        return whole

    def _flat(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the buffers of the plan, with zeros for missing gradients.

        A gradient that has a buffer alone may become that buffer without a copy; others are copied.
        """
        places, device = self.plan.places, self._memory.device
        alone = {place.buffer: gradients[number] for number, place in enumerate(places) if place.is_of_one}
        buffers = []
        for number, buffer in enumerate(self.plan.layouts[0].buffers):
            dtype, own = torch_dtype(buffer.dtype), alone.get(number)
            flat = torch.zeros(buffer.size, dtype=dtype, device=device) if own is None else own.to(dtype).reshape(-1)
            buffers.append(flat)
        pairs = [
            (view, gradient)
            for view, place, gradient in zip(self._views(buffers), places, gradients, strict=True)
            if gradient is not None and not place.is_of_one
        ]
        copy_pairs(pairs)
        return buffers

    def _views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients in the buffers of the plan, as views."""
        return [
            buffers[place.buffer][place.start : place.start + math.prod(parameter.shape)].view(tuple(parameter.shape))
            for place, parameter in zip(self.plan.places, self.plan.parameters, strict=True)
        ]

    @override
    def tell(self, told: Told, place: int = 0) -> None:
        """Write the numbers of a replica, its metrics from the device, and add its gradients."""
        self._told.append(told)
        values = torch.stack([one for one in told.metrics if isinstance(one, torch.Tensor)]).float()
        if self._is_alone:
            self._results = [*self._taken, values]
            return
        buffers = [one for one in self._taken if one is not None]
        tail = buffers[0][buffers[0].numel() - self.plan.tail :]
        tail[: len(values)].copy_(values)
        if not self._is_of_one:
            self._tell_all(told, tail[len(values) :])
        self._add(TreeNode(self._first + place, self._first + place + 1), buffers)

    def _tell_all(self, told: Told, tail: torch.Tensor) -> None:
        changed = [0.0 if isinstance(one, torch.Tensor) else one for one in told.has_changed]
        known = [told.notice, told.settings, told.settings**2, *told.has_gradient, *changed]
        tail.copy_(put(torch.tensor(known, dtype=torch.float32), self._memory.device))
        first = len(known) - len(changed)
        for number, one in enumerate(told.has_changed):
            if isinstance(one, torch.Tensor):
                tail[first + number].copy_(one)

    def _add(self, node: TreeNode, buffers: Sequence[torch.Tensor]) -> None:
        """Add the buffers of a replica, which may be overwritten. Replicas come in their order."""
        self._nodes.append(node)
        self._sums.append(buffers)
        while (found := self._parent()) is not None:
            pairs = zip(*self._sums[-2:], strict=True)
            total = [TorchArithmetic().total(self._nodes[-2:], pair) for pair in pairs]
            self._nodes[-2:], self._sums[-2:] = [found], [total]

    def _parent(self) -> TreeNode | None:
        """Return the parent node of the last two sums if a node of the path covers it; otherwise None."""
        if len(self._nodes) < 2:
            return None
        left, right = self._nodes[-2:]
        parent = node_of_halves(left, right, self._path.spread.replicas)
        is_taken = parent is not None and any(node.covers(parent) for node in self._path.nodes)
        return parent if is_taken else None

    @override
    def buffers(self, bucket: int) -> Buffers:
        """Return, for each buffer, the sums of the local replicas."""
        if self._is_alone:
            return [[one] for one in self._results]
        found = [list(of_buffer) for of_buffer in zip(*self._sums, strict=True)]
        self._nodes, self._sums = [], []
        return found

    @override
    def is_finite(self, place: int, number: int) -> bool:
        return not self._are_finite or bool(self._are_finite[place][number])

    # ---- means

    @override
    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Compute the means of the bucket. Collective. If there is one replica, its gradients are the means."""
        if not self._is_alone:
            dtypes = [buffer.dtype for buffer in bucket.layout.buffers]
            self._results = self._path.means(bucket.name, contributions, dtypes)

    @property
    @override
    def weight(self) -> float | None:
        """The mean weight of the losses; None if they have no weights. With several instances, read the device.

        One instance knows the weights of all replicas, and adds them on the host, in the order of the tree.
        """
        if not are_weighted(self.names):
            return None
        if not self._is_of_one:
            place = len(self.names) - 1
            return float(self._memory.read(self._tail[place : place + 1])[0])
        total = combined([np.float32(one.weight or 0) for one in self._told], operator.add)
        return float(np.float32(total) / np.float32(len(self._told)))

    @override
    def means(self, *divisors: float) -> list[torch.Tensor | None]:
        """Return the mean gradients; see `GradientExchange`. May be called once.

        If there is one replica, the mean of a parameter without a gradient is None.
        """
        others = [divisor for divisor in divisors if divisor != 1]
        with torch.no_grad():
            found = self._received()
            if others:
                wide = [None if one is None else one.to(_wide(one.dtype)) for one in found]
                for divisor in others:
                    divide([one for one in wide if one is not None], divisor)
                found = wide
            pairs = zip(found, self._dtypes, strict=True)
            return [one if one is None or one.dtype is dtype else one.to(dtype) for one, dtype in pairs]

    def _received(self) -> list[torch.Tensor | None]:
        if self._is_alone:
            return list(self._results[:-1])
        return [*self._views([one for one in self._results if one is not None])]

    @override
    def arrived(self, means: Sequence[torch.Tensor | None], checks: bool) -> tuple[Tail, np.ndarray]:
        """Return the tail, and which means are not finite; see `GradientExchange`.

        If one instance has all replicas, the host waits for the device only if `checks` is True. With several instances
        the host reads the tail and the check in one read.
        """
        flags = [~are_finite(means, self._memory.device)] if checks else []
        if self._is_of_one:
            bad = self._memory.read(flags[0]) if checks else np.zeros(len(means), bool)
            return self._own_tail(), bad
        values = self._memory.read(torch.cat([self._tail, *(each.float() for each in flags)]))
        is_weighted = are_weighted(self.names)
        tail = Tail.of(values[: self.plan.tail], len(self.names), len(self.plan.parameters), is_weighted)
        return tail, values[self.plan.tail :] > 0 if checks else np.zeros(len(means), bool)

    @property
    def _tail(self) -> torch.Tensor:
        """The float32 values that travel behind the gradients, still on the device."""
        last = self._results[-1] if self._is_alone else self._results[0]
        assert last is not None
        return last[last.numel() - self.plan.tail :]

    def _own_tail(self) -> Tail:
        """Return the tail of the only instance, whose metrics stay on the device until they are read.

        Its `has_changed` is empty; `changed` tells which buffers have changed.
        """
        first = self._told[0]
        shares = np.array([one.has_gradient for one in self._told]).mean(axis=0, dtype=np.float32)
        word = float(first.settings)
        weight = self.weight
        values = self._tail.clone() if weight is None else self._tail[:-1].clone()
        divide([values], 1.0 if weight is None else weight)
        metrics = UnreadMetrics(values, self._memory)
        return Tail(metrics, float(first.notice), (word, word * word), shares, np.zeros(0, np.float32), weight)

    # ---- in a loop of the program

    @override
    def reduce_early(self, bucket: int) -> NoReturn:
        """Raise: the plan has only one bucket, which `give` exchanges."""
        raise AssertionError("gradients on a device are exchanged at the end of the backward pass")

    @override
    def finish(self, told: Sequence[Told]) -> Tail:
        [own] = told
        values = np.array(own.values, np.float32)
        mean = self._communicator.ordered_all_reduce([values], op="mean", name=f"{self.plan.title}/tail")
        return Tail.of(mean, len(own.metrics), len(self.plan.parameters))

    @override
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        with torch.no_grad():
            self.reduce(self.buckets[0], [[one] for one in self._taken])
            pairs = zip(real_views(gradients), self._received(), strict=True)
            given = [(own, mean) for own, mean in pairs if own is not None and mean is not None]
            copy_pairs(given)
        self.let_go()


def _separate(gradients: list[torch.Tensor | None]) -> None:
    """Give each gradient memory of its own, because autograd may give the same tensor to two parameters."""
    addresses = [one.data_ptr() for one in gradients if one is not None and one.numel()]
    if len(set(addresses)) == len(addresses):
        return
    seen: set[int] = set()
    for number, gradient in enumerate(gradients):
        if gradient is None or not gradient.numel():
            continue
        if gradient.data_ptr() in seen:
            gradients[number] = gradient.clone()
        seen.add(gradient.data_ptr())


def are_finite(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return booleans on the device: whether all of each tensor is finite; True for None."""
    places = [number for number, one in enumerate(tensors) if one is not None and one.numel()]
    if len(places) < len(tensors):
        found = torch.ones(len(tensors), dtype=torch.bool, device=device)
        for number in places:
            one = tensors[number]
            assert one is not None
            found[number] = one.isfinite().all()
        return found
    largest = torch._foreach_norm([one for one in tensors if one is not None], math.inf)
    return torch.stack(largest).isfinite()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
