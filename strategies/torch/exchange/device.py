"""The mean gradients of a module over all replicas, computed on the device of the replicas."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from collectives.tree import TreeNode, combined, node_of_halves
from strategies.core.engine import Buffers
from strategies.errors import StrategyError
from strategies.exchange.choice import DevicePath
from strategies.exchange.means import Bucket
from strategies.torch.exchange.plan import Fact, GradientExchange, Tail, TailValues, TorchGradientPlan, separate
from strategies.torch.replicas.gradient_map import GroupRow
from strategies.torch.tensors import (
    ReplicaMemory,
    TorchArithmetic,
    copy_pairs,
    divide,
    event_on,
    put,
    real_views,
    torch_dtype,
)


class UnreadMetrics:
    """An array of one axis on a device. NumPy's first access reads it, which waits for the device.

    Args:
        values: A tensor on the device, which must not change any more.
        memory: The memory of the replicas, which counts reads.
    """

    def __init__(self, values: torch.Tensor, memory: ReplicaMemory) -> None:
        self._unread: tuple[torch.Tensor, ReplicaMemory, torch.cuda.Event | None] | None
        self._unread = values, memory, event_on(values.device)
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


@final
class DeviceExchange(GradientExchange):
    """An exchange whose sums and means stay on a device.

    A large gradient is passed on as autograd has made it; small gradients are copied into the buffer of their dtype.
    Two neighbours in the tree are added as soon as both are there, so at most log2(local replicas) + 1 sums exist.

    A loop of the program first exchanges the replicas' tails over the communicator, because the host knows them. So
    instances whose loops have diverged detect it there, and no host waits for the device.

    Args:
        plan: The plan of the gradients, with one bucket. Its tail has all values, the metrics only if
            one instance has all replicas, or none for a loop.
        names: The names of the metrics.
        path: The path that makes means of sums.
        memory: The memory of the replicas.
        communicator: The communicator of all instances, for loops.
        rows: For each local replica, its rows of grouped parameters, by their numbers.
        first: The global index of the first local replica.
        checks: Whether to record which gradients are finite.

    Attributes:
        is_of_one: Whether one instance has all replicas.
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
        super().__init__(plan, names, rows)
        self.buckets = [Bucket(f"{plan.title}/0", plan.layouts[0], (), frozenset())]
        self._path, self._memory, self._communicator = path, memory, communicator
        self._first, self._checks = first, checks
        self.is_of_one, self._is_alone = path.spread.size == 1, path.spread.replicas == 1
        self._dtypes = [torch_dtype(parameter.dtype) for parameter in plan.parameters]
        self._travelling = [torch_dtype(plan.transfer.dtype_of(parameter.dtype)) for parameter in plan.parameters]
        self._taken: list[torch.Tensor | None] = []  # the buffers of the last replica
        self._nodes: list[TreeNode] = []
        self._sums: list[Sequence[torch.Tensor]] = []  # of the nodes
        self._are_finite: list[torch.Tensor] = []  # for each local replica
        self._tail_values: list[TailValues] = []
        self._results: Sequence[torch.Tensor | None] = ()

    @property
    def changed(self) -> list[Sequence[Fact]]:
        """Return whether the step has changed each buffer of each local replica (`TailValues.has_changed`)."""
        return [one.has_changed for one in self._tail_values]

    # ---- the gradients of local replicas

    @override
    def let_go(self) -> None:
        self._results, self._taken = (), []
        self._tail_values, self._are_finite, self._nodes, self._sums = [], [], [], []

    @override
    def give_back(self) -> None:
        self._taken = []

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
            separate(found)
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
            self._raise_sparse(number)
        if gradient.device.type != self._memory.device.type:
            raise StrategyError(
                f"the gradient of {parameter.name} is on {gradient.device}, but the module was on "
                f"{self._memory.device} before; move the module first"
            )
        if (row := self._rows[place].get(number)) is None:
            return gradient
        whole = torch.zeros(parameter.shape, dtype=gradient.dtype, device=gradient.device)
        whole[row.number].copy_(gradient * row.gain)  # the other rows stay zero
        return whole

    def _flat(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the buffers of the plan, with zeros for missing gradients.

        A gradient that has a buffer alone may become that buffer without a copy; others are copied.
        """
        places, buffers = self.plan.places, []
        alone = {place.buffer: gradients[number] for number, place in enumerate(places) if place.is_of_one}
        for number, buffer in enumerate(self.plan.layouts[0].buffers):
            dtype, own = torch_dtype(buffer.dtype), alone.get(number)
            if own is None:
                buffers.append(torch.zeros(buffer.size, dtype=dtype, device=self._memory.device))
            else:
                buffers.append(own.to(dtype).reshape(-1))
        triples = zip(self._views(buffers), places, gradients, strict=True)
        copy_pairs([(view, one) for view, place, one in triples if one is not None and not place.is_of_one])
        return buffers

    def _views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients in the buffers of the plan, as views."""
        layout = self.plan.layouts[0]
        return [layout.view(place.leaf, buffers) for place in self.plan.places]

    @override
    def set_tail(self, tail_values: TailValues, place: int = 0) -> None:
        """Write the numbers of a replica, its metrics from the device, and add its gradients."""
        self._tail_values.append(tail_values)
        values = torch.stack([one for one in tail_values.metrics if isinstance(one, torch.Tensor)]).float()
        if self._is_alone:
            self._results = [*self._taken, values]
            return
        buffers = [one for one in self._taken if one is not None]
        tail = buffers[0][buffers[0].numel() - self.plan.tail :]
        tail[: len(values)].copy_(values)
        if not self.is_of_one:
            self._set_rest(tail_values, tail[len(values) :])
        self._nodes.append(TreeNode(self._first + place, self._first + place + 1))
        self._sums.append(buffers)
        while (found := self._parent()) is not None:
            pairs = zip(*self._sums[-2:], strict=True)
            total = [TorchArithmetic().total(self._nodes[-2:], pair) for pair in pairs]
            self._nodes[-2:], self._sums[-2:] = [found], [total]

    def _set_rest(self, tail_values: TailValues, tail: torch.Tensor) -> None:
        """Write all numbers of a replica but its metrics; those on the device replace zeros."""
        on_device = [(n, one) for n, one in enumerate(tail_values.has_changed) if isinstance(one, torch.Tensor)]
        changed = [0.0 if isinstance(one, torch.Tensor) else one for one in tail_values.has_changed]
        known = [tail_values.notice, tail_values.settings, tail_values.settings**2, *tail_values.has_gradient, *changed]
        tail.copy_(put(torch.tensor(known, dtype=torch.float32), self._memory.device))
        for number, one in on_device:
            tail[len(known) - len(changed) + number].copy_(one)

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
        if not self.is_weighted:
            return None
        if not self.is_of_one:
            place = len(self.names) - 1
            return float(self._memory.read(self._tail[place : place + 1])[0])
        total = combined([np.float32(one.weight or 0) for one in self._tail_values], operator.add)
        return float(np.float32(total) / np.float32(len(self._tail_values)))

    @override
    def means(self, *divisors: float) -> list[torch.Tensor | None]:
        """Return the mean gradients; see `GradientExchange`. May be called once.

        If there is one replica, the mean of a parameter without a gradient is None.
        """
        others = [divisor for divisor in divisors if divisor != 1]
        with torch.no_grad():
            found = self._received()
            if others:
                found = [
                    None if one is None else one.to(torch.promote_types(one.dtype, torch.float32)) for one in found
                ]
                for divisor in others:
                    divide([one for one in found if one is not None], divisor)
            pairs = zip(found, self._dtypes, strict=True)
            return [one if one is None or one.dtype is dtype else one.to(dtype) for one, dtype in pairs]

    def _received(self) -> list[torch.Tensor | None]:
        if self._is_alone:
            return list(self._results[:-1])
        return [*self._views([one for one in self._results if one is not None])]

    @override
    def tail_and_flags(self, means: Sequence[torch.Tensor | None], checks: bool) -> tuple[Tail, np.ndarray]:
        """Return the tail, and which means are not finite; see `GradientExchange`.

        If one instance has all replicas, the host waits for the device only if `checks` is True. With several instances
        the host reads the tail and the check in one read.
        """
        flags = [~are_finite(means, self._memory.device)] if checks else []
        if self.is_of_one:
            bad = self._memory.read(flags[0]) if checks else np.zeros(len(means), bool)
            return self._own_tail(), bad
        values = self._memory.read(torch.cat([self._tail, *(each.float() for each in flags)]))
        tail = Tail.of(values[: self.plan.tail], len(self.names), len(self.plan.parameters), self.is_weighted)
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
        first, weight = self._tail_values[0], self.weight
        shares = np.array([one.has_gradient for one in self._tail_values]).mean(axis=0, dtype=np.float32)
        values = self._tail.clone() if weight is None else self._tail[:-1].clone()
        divide([values], 1.0 if weight is None else weight)
        metrics, words = UnreadMetrics(values, self._memory), (float(first.settings), float(first.settings) ** 2)
        return Tail(metrics, float(first.notice), words, shares, np.zeros(0, np.float32), weight)

    # ---- in a loop of the program

    @override
    def finish(self, tail_values: Sequence[TailValues]) -> Tail:
        [own] = tail_values
        values = np.array(own.values, np.float32)
        mean = self._communicator.ordered_all_reduce([values], op="mean", name=f"{self.plan.title}/tail")
        return Tail.of(mean, len(own.metrics), len(self.plan.parameters))

    @override
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        with torch.no_grad():
            self.reduce(self.buckets[0], [[one] for one in self._taken])
            pairs = zip(real_views(gradients), self._received(), strict=True)
            copy_pairs([(own, mean) for own, mean in pairs if own is not None and mean is not None])
        self.let_go()


def are_finite(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return booleans on the device: whether all of each tensor is finite; True for None."""
    finite = torch.zeros(1, device=device)
    found = [finite if one is None or not one.numel() else one for one in tensors]
    return torch.stack(torch._foreach_norm(found, math.inf)).isfinite()
