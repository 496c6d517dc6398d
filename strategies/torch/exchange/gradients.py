"""The mean gradients of a module over all replicas: they are taken from replicas, reduced on a path, and divided."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NoReturn, final

import numpy as np
import torch

from collectives.tree import TreeNode, add_last, combined
from strategies.core.engine import Buffers
from strategies.errors import StrategyError
from strategies.exchange.choice import DevicePath
from strategies.exchange.flat import not_made
from strategies.exchange.means import Allocate, Bucket, Means
from strategies.exchange.window_path import lock_pages
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.exchange.contribution import Contribution
from strategies.torch.exchange.plan import Tail, TailValues, TorchGradientPlan
from strategies.torch.options import are_weighted
from strategies.torch.replicas.gradient_map import GroupRow
from strategies.torch.tensors import (
    HOST,
    ReplicaMemory,
    TorchArithmetic,
    as_tensor,
    copy_pairs,
    divide,
    event_on,
    put,
    real_views,
    torch_dtype,
)
from strategies.typing import Leaf


def raise_gradient_came_twice(name: str) -> NoReturn:
    """Raise for a gradient that was already taken in this step."""
    raise StrategyError(
        f"the gradient of {name} came twice in one backward pass, as it does if several reentrant checkpoints use the "
        "parameter; use checkpoint(..., use_reentrant=False), or stream_gradients=False"
    )


@final
class GradientExchange:
    """An exchange of gradients for one plan and the present instances. The order of calls is the same on all instances.

    A `Trainer` takes the gradients of each local replica, and tells its numbers. Then it reduces each bucket, and asks
    for the weight, the means and the tail. A loop of the program takes gradients, calls `finish`, then `give`. If the
    tail shows that the means cannot be used, no instance calls `give`. If a call raises, the step has no means.

    On the host, the communicator computes the means of the replicas' buffers. The mean of a gradient with a buffer of
    its own is written over the gradient of the first local replica: it takes no memory, and nobody copies it. The other
    means lie in memory of the exchange. A loop writes no mean over a gradient before the tail shows that the means can
    be used: if an instance has another plan, all exchange the same gradients again. Gradients that leave earlier are
    not written over.

    On a device, a path computes the means of sums. Two neighbours in the tree are added as soon as both are there, so
    at most log2(local replicas) + 1 sums exist. Gradients of one replica are passed on as autograd has made them. A
    loop first exchanges the replicas' tails over the communicator, because the host knows them. So instances whose
    loops have diverged detect it there, and no host waits for the device.

    Args:
        plan: The plan of the gradients; on a device it has one bucket. Its tail has all values. If one instance has all
            replicas on a device it has only the metrics, and for a loop on a device no values.
        names: The names of the metrics in the tail.
        replicas: The replicas of all instances.
        memory: The memory of the replicas.
        rows: For each local replica, its rows of grouped parameters, by their numbers.
        path: The path that makes means of sums on a device; None for the host.
        allocate: Makes the memory of means on the host. Collective if instances share it.
        writes_over: Whether means may be written over gradients. If not, gradients can be inspected afterwards.
        checks: Whether to record which gradients on a device are finite.

    Attributes:
        plan: The plan of the gradients.
        names: The names of the metrics in the tail.
        is_weighted: Whether losses have weights.
        is_of_one: Whether one instance has all replicas, on a device.
        buckets: The buckets, with the memory of the exchange.
    """

    def __init__(
        self,
        plan: TorchGradientPlan,
        names: tuple[str, ...],
        replicas: Replicas,
        memory: ReplicaMemory,
        rows: Sequence[Mapping[int, GroupRow]],
        path: DevicePath | None = None,
        allocate: Allocate = not_made,
        writes_over: bool = False,
        checks: bool = False,
    ) -> None:
        self.plan, self.names, self.is_weighted = plan, names, are_weighted(names)
        self._communicator, self._first = replicas.communicator, replicas.local_replicas.start
        self._memory, self._gpu, self._path = memory, memory.gpu, path
        self._is_alone = replicas.num_replicas_in_sync == 1  # the mean over one replica is its gradient
        self.is_of_one = path is not None and path.spread.size == 1
        self._checks = checks and path is not None
        device = None if path is None else memory.device
        self._device = device or HOST
        self._contributions = [Contribution(plan, of_replica, device, memory.gpu is not None) for of_replica in rows]
        self.buckets = plan.buckets(allocate, writes_over)
        self._numbers = {bucket.name: number for number, bucket in enumerate(self.buckets)}
        all_over, passes = path is not None or self._is_alone, writes_over and plan.shards is None
        self._over = [  # the buffers whose means are not written into memory of the exchange
            [number for number, buffer in enumerate(layout.buffers) if all_over or (passes and buffer.is_of_one)]
            for layout in plan.layouts
        ]
        pairs = zip(self.buckets, self._over, strict=True)
        self._kept = [[one for one in (*bucket.whole, *bucket.in_parts) if one not in over] for bucket, over in pairs]
        self._passing = {number for number, one in enumerate(plan.places) if one.buffer in self._over[one.bucket]}
        self._means = Means(self._communicator)
        self._dtypes = [torch_dtype(parameter.dtype) for parameter in plan.parameters]
        self._travelling = [torch_dtype(plan.transfer.dtype_of(parameter.dtype)) for parameter in plan.parameters]
        self._received: dict[int, torch.Tensor] = {}  # views of means in memory of the exchange
        self._result_locks: Sequence[object] = ()
        if self._gpu is not None and path is None:
            self._result_locks = lock_pages([one for bucket in self.buckets for one in bucket.results], self._gpu)
        self.let_go()

    def let_go(self) -> None:
        """Drop the means of the last step."""
        self._results: list[list[Leaf]] = [list(bucket.results) for bucket in self.buckets]
        self._alone: list[torch.Tensor | None] = []  # the gradients of the only replica, on a device
        self._sums: list[tuple[TreeNode, Sequence[torch.Tensor]]] = []
        self._are_finite: list[torch.Tensor] = []  # for each local replica
        self._tail_values: list[TailValues] = []

    def give_back(self) -> None:
        """Release the gradients of the step."""
        for contribution in self._contributions:
            contribution.release()

    # ---- the gradients of local replicas

    def take(self, gradients: Sequence[torch.Tensor | None], place: int = 0, first: int = 0) -> None:
        """Take gradients of a local replica, None for zeros: all of them, or on the host some while a pass runs.

        Args:
            gradients: The gradients. The caller must not change them any more; the exchange may.
            place: The place of the replica among the local replicas.
            first: The number of the parameter of the first one; the others follow in order.

        Raises:
            StrategyError: If a gradient is sparse; on a device also if it is on another one, or a CUDA graph is being
                captured.
        """
        if self._path is not None and self._gpu is not None and torch.cuda.is_current_stream_capturing():
            raise StrategyError(
                "a CUDA graph is captured around the backward pass, but its replay would not exchange gradients with "
                "other replicas; capture the module inside, or leave the graph out"
            )
        own = self._contributions[place]
        with torch.no_grad():
            own.make_whole(found := real_views(gradients), first)
            if self._checks:
                self._are_finite.append(are_finite(found, self._device))
            if len(found) > 1:
                separate(found)
            if self._path is None:
                own.take(found, first)
            elif self._is_alone:
                self._alone = _cast(found, self._travelling)
            else:
                own.release()  # an earlier step may have failed half-way
                own.take(found)

    def set_tail(self, tail_values: TailValues, place: int = 0) -> None:
        """Set the numbers behind a replica's gradients, after all of its gradients were taken; add those on a device.

        On a device, metrics are read there.
        """
        last, own = len(self.buckets) - 1, self._contributions[place]
        if self._path is None:
            self._tail_in([own.buffer(last, 0)])[:] = [*map(float, tail_values.facts)]
            return
        self._tail_values.append(tail_values)
        if self._is_alone:
            buffers = [torch.empty(self.plan.tail, dtype=torch.float32, device=self._device)]
        else:
            buffers = [one for [one] in self._buffers_of([own], last)]
        tail, facts = self._tail_in(buffers), tail_values.facts[: self.plan.tail]
        on_device = {number: one for number, one in enumerate(facts) if isinstance(one, torch.Tensor)}
        if not self.is_of_one:  # the host knows some of them
            known = [0.0 if number in on_device else one for number, one in enumerate(facts)]
            tail.copy_(put(torch.tensor(known, dtype=torch.float32), self._device))
        copy_pairs([(tail[number], one) for number, one in on_device.items()])
        if self._is_alone:
            self._results[last][0] = tail
            return
        own.release()
        self._sums.append((TreeNode(self._first + place, self._first + place + 1), buffers))
        add_last(self._sums, self._path.nodes, self._path.spread.replicas, _totals)

    def buffers(self, bucket: int) -> Buffers:
        """Return the buffers of the local replicas for a bucket; on a device their sums, once."""
        if self._path is None:
            return self._buffers_of(self._contributions, bucket)
        sums, self._sums = [of_node for _, of_node in self._sums], []
        return [list(of_buffer) for of_buffer in zip(*sums, strict=True)]

    def _buffers_of(self, contributions: Sequence[Contribution], bucket: int) -> list[list[Leaf]]:
        count = len(self.plan.layouts[bucket].buffers)
        return [[one.buffer(bucket, buffer) for one in contributions] for buffer in range(count)]

    def is_finite(self, place: int, number: int) -> bool:
        """Return whether a gradient of a local replica is finite. Valid until the gradients are released."""
        if self._path is not None:
            return not self._are_finite or bool(self._are_finite[place][number])
        return self._contributions[place].is_finite(number)

    # ---- means

    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Compute the means of a bucket from the buffers of the local replicas. Collective."""
        number = self._numbers[bucket.name]
        self._reduce(number, self._kept[number], contributions)
        self._reduce(number, self._over[number], contributions)

    def _reduce(self, number: int, buffers: Sequence[int], contributions: Buffers) -> None:
        """Compute the means that are not written over gradients, or the others. Collective.

        Args:
            number: The number of the bucket.
            buffers: Its buffers in `_kept` or `_over`. In the first case gradients stay as they are.
            contributions: The buffers of the local replicas.
        """
        bucket, results = self.buckets[number], self._results[number]
        if self._path is None and buffers is self._over[number]:
            for buffer in buffers:
                results[buffer] = contributions[buffer][0]
        if not buffers or self._is_alone:
            return
        if self._path is not None:
            results[:] = self._path.means(bucket.name, contributions, [one.dtype for one in bucket.layout.buffers])
            return
        if self._gpu is not None:  # the GPU may still be reading the last means
            torch.cuda.current_stream(self._gpu).synchronize()
        if self.plan.shards is None:
            self._means.reduce_whole(bucket, contributions, buffers, results)
        else:
            self._means.reduce(bucket, contributions)

    @property
    def weight(self) -> float | None:
        """The mean weight of the losses; None if they have no weights. May wait for the device.

        An instance that has all replicas on a device adds their weights on the host, in the order of the tree.
        """
        if not self.is_weighted:
            return None
        if not self.is_of_one:
            weight = self._tail_in(self._results[-1])[len(self.names) - 1]
            return float(weight if self._path is None else self._memory.read(weight))
        total = combined([np.float32(one.weight or 0) for one in self._tail_values], operator.add)
        return float(np.float32(total) / np.float32(len(self._tail_values)))

    def means(self, *divisors: float) -> list[torch.Tensor | None]:
        """Return the mean gradients, divided, in the dtypes of their parameters; valid until the next step.

        If means are sharded, they are this instance's shards. If there is one replica on a device, the mean of a
        parameter without a gradient is None. On a device this may be called once.

        Args:
            divisors: Numbers by which to divide, one after another: the loss scale and the mean weight of losses.
        """
        others = [divisor for divisor in divisors if divisor != 1]
        with torch.no_grad():
            found = self._alone or [self._mean(number) for number in range(len(self._dtypes))]
            if others:
                is_shared = self._path is None  # other instances may have the same memory
                found = [
                    None if one is None else one.to(torch.promote_types(one.dtype, torch.float32), copy=is_shared)
                    for one in found
                ]
                for divisor in others:
                    divide([one for one in found if one is not None], divisor)
            return _cast(found, self._dtypes)

    def _mean(self, number: int) -> torch.Tensor:
        """Return the memory of a mean as a tensor; if means are sharded, this instance's shard, flat."""
        if number in self._received:
            return self._received[number]
        own, parameter = self.plan.places[number], self.plan.parameters[number]
        mean = self._results[own.bucket][own.buffer]
        if own.buffer not in self.buckets[own.bucket].scattered:
            mean = mean[own.start : own.stop].reshape(parameter.shape)
        view = as_tensor(mean) if self._path is None else mean
        if number not in self._passing:  # the memory stays the same
            self._received[number] = view
        return view

    def _tail_in(self, buffers: Sequence[Leaf]) -> Leaf:
        """Return the float32 values behind the gradients in the buffers of the last bucket."""
        return self.buckets[-1].layout.tail_view(buffers)

    def tail_and_flags(self, means: Sequence[torch.Tensor | None], checks: bool) -> tuple[Tail, np.ndarray | None]:
        """Return the tail, and for each mean whether it is not finite; None without `checks`.

        The host reads the tail and the check of a device in one read. If one instance has all replicas, the host waits
        for the device only if `checks` is True.
        """
        flags = [~are_finite(means, self._device)] if checks else []
        if self._path is None or self.is_of_one:
            return self._known_tail(), self._memory.read(flags[0]) if checks else None
        arrived = self._tail_in(self._results[-1])
        values = self._memory.read(torch.cat([arrived, *(each.float() for each in flags)]))
        return self._tail_of(values[: self.plan.tail]), values[self.plan.tail :] > 0 if checks else None

    def _tail_of(self, values: np.ndarray) -> Tail:
        return Tail.of(values, len(self.names), len(self.plan.parameters), self.is_weighted)

    def _known_tail(self) -> Tail:
        """Return the tail on the host, or that of the only instance on a device.

        The metrics of the latter stay on the device until they are read. Its `has_changed` is empty.
        """
        tail = self._tail_in(self._results[-1])
        if self._path is None:
            return self._tail_of(tail)
        first, weight = self._tail_values[0], self.weight
        shares = np.array([one.has_gradient for one in self._tail_values]).mean(axis=0, dtype=np.float32)
        values = tail.clone() if weight is None else tail[:-1].clone()
        divide([values], 1.0 if weight is None else weight)
        metrics, words = UnreadMetrics(values, self._memory), (float(first.settings), float(first.settings) ** 2)
        return Tail(metrics, float(first.notice), words, shares, np.zeros(0, np.float32), weight)

    # ---- in a loop of the program

    def finish(self, tail_values: Sequence[TailValues]) -> Tail:
        """Exchange the last bucket and the numbers of each local replica, and return their means. Collective."""
        last = len(self.buckets) - 1
        if self._path is None:
            for place, own in enumerate(tail_values):
                self.set_tail(own, place)
            self._reduce(last, self._kept[last], self.buffers(last))
            return self._known_tail()
        values = [np.array([*map(float, own.facts)], np.float32) for own in tail_values]
        return self._tail_of(self._communicator.ordered_all_reduce(values, op="mean", name=f"{self.plan.title}/tail"))

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace each gradient of the first local replica by its mean, in place; None leaves one out. Collective."""
        last, found = len(self.buckets) - 1, real_views(gradients)
        lent = self._contributions[0].lent if self._path is None else {}
        with torch.no_grad():
            self._reduce(last, self._over[last], self._buffers_of(self._contributions, last))
            for number in self._passing:
                place, own = self.plan.places[number], found[number]
                if own is not None and (place.bucket, place.buffer) in lent:  # the mean was written over it
                    torch.autograd.graph.increment_version(own)
                    found[number] = None
            pairs = [(one, self._mean(number)) for number, one in enumerate(found) if one is not None]
            copy_pairs(pairs, non_blocking=True)
            if self._gpu is not None and self._path is None:  # the next step may overwrite the means
                torch.cuda.current_stream(self._gpu).synchronize()
        self.let_go()
        self.give_back()


def _totals(nodes: Sequence[TreeNode], *sums: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the sums of two neighbours in the tree, buffer by buffer."""
    return [TorchArithmetic().total(nodes, pair) for pair in zip(*sums, strict=True)]


def separate(gradients: list[torch.Tensor | None]) -> None:
    """Give each gradient memory of its own, because autograd may give the same tensor to two parameters."""
    seen: set[int] = set()
    for number, gradient in enumerate(gradients):
        if gradient is not None and gradient.numel():
            if (address := gradient.data_ptr()) in seen:
                gradients[number] = gradient.clone()
            seen.add(address)


def _cast(tensors: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor | None]:
    pairs = zip(tensors, dtypes, strict=True)
    return [one if one is None or one.dtype is dtype else one.to(dtype) for one, dtype in pairs]


def are_finite(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return booleans on the device: whether all of each tensor is finite; True for None."""
    finite = torch.zeros(1, device=device)
    found = [finite if one is None or not one.numel() else one for one in tensors]
    return torch.stack(torch._foreach_norm(found, math.inf)).isfinite()


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
