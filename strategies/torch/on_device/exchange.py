"""The mean gradients of a module, computed on the device of its replicas."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from collectives.tree import combined
from strategies.core.engine import Buffers
from strategies.exchange.means import Bucket
from strategies.exchange.on_device import DevicePath
from strategies.torch.gradient_exchange import Tail, TorchGradientPlan
from strategies.torch.on_device.arithmetic import TorchArithmetic, divide, torch_dtype
from strategies.torch.on_device.contribution import Told, ToldByReplica, are_finite
from strategies.torch.on_device.flat_gradients import gradients_in
from strategies.torch.on_device.metrics import UnreadMetrics
from strategies.torch.on_device.sums import TreeSums
from strategies.torch.outcomes import are_weighted
from strategies.torch.replica_memory import ReplicaMemory


class DeviceExchange:
    """An exchange whose sums and means stay on a device.

    Args:
        plan: The plan of the gradients, with one bucket, not quantised. Its tail has all values, or the metrics only if
            one instance has all replicas.
        names: The names of the metrics.
        path: The path that makes means of sums.
        arithmetic: The arithmetic that adds the gradients of the local replicas.
        memory: The memory of the replicas.

    Attributes:
        plan: The plan of the gradients.
        names: The names of the metrics.
        buckets: The only bucket, without memory on the host.
    """

    def __init__(
        self,
        plan: TorchGradientPlan,
        names: tuple[str, ...],
        path: DevicePath,
        arithmetic: TorchArithmetic,
        memory: ReplicaMemory,
    ) -> None:
        self.plan, self.names = plan, names
        self.buckets = [Bucket(f"{plan.title}/0", plan.layouts[0], (), frozenset())]
        self._path, self._memory = path, memory
        self._is_of_one = path.spread.size == 1
        self._is_alone = path.spread.replicas == 1
        self._sums = TreeSums(path, arithmetic)
        self._dtypes = [torch_dtype(parameter.dtype) for parameter in plan.parameters]
        self._results: Sequence[torch.Tensor | None] = ()
        self._told: list[ToldByReplica] = []

    @property
    def is_of_one(self) -> bool:
        """Whether one instance has all replicas."""
        return self._is_of_one

    @property
    def changed(self) -> list[Sequence[Told]]:
        """Return whether the step has changed each buffer of each local replica (`ToldByReplica.has_changed`)."""
        return [one.has_changed for one in self._told]

    def let_go(self) -> None:
        """Drop the results of the last step."""
        self._results = ()
        self._told.clear()
        self._sums.clear()

    def add(self, replica: int, buffers: Sequence[torch.Tensor | None], told: ToldByReplica) -> None:
        """Add a replica's gradients, which may be overwritten. Replicas must come in their order."""
        self._told.append(told)
        if self._is_alone:
            self._results = buffers
        else:
            self._sums.add(replica, [one for one in buffers if one is not None])

    def take(self) -> Buffers:
        """Return, for each buffer, the sums of the local replicas."""
        return [[one] for one in self._results] if self._is_alone else self._sums.take()

    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Compute the means of the bucket. Collective. If there is one replica, its gradients are the means."""
        if not self._is_alone:
            dtypes = [buffer.dtype for buffer in bucket.layout.buffers]
            self._results = self._path.means(bucket.name, contributions, dtypes)

    def weight(self) -> float | None:
        """Return the mean weight of the losses; None if they have no weights. With several instances, read the device.

        One instance knows the weights of all replicas, and adds them on the host, in the order of the tree.
        """
        if not are_weighted(self.names):
            return None
        if not self._is_of_one:
            place = len(self.names) - 1
            return float(self._memory.read(self._tail[place : place + 1])[0])
        total = combined([np.float32(one.weight or 0) for one in self._told], operator.add)
        return float(np.float32(total) / np.float32(len(self._told)))

    def means(self, *divisors: float) -> list[torch.Tensor | None]:
        """Return the mean gradients, divided, in the dtypes of their parameters. May be called once.

        If there is one replica, the mean of a parameter without a gradient is None.

        Args:
            divisors: Numbers by which to divide, one after another: the loss scale and the mean weight of losses.
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
        return [*gradients_in(self.plan, [one for one in self._results if one is not None])]

    def arrived(self, means: Sequence[torch.Tensor | None], checks: bool) -> tuple[Tail, np.ndarray]:
        """Return the tail, and for each mean whether it is not finite. Without `checks`, all means count as finite.

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
        weight = self.weight()
        values = self._tail.clone() if weight is None else self._tail[:-1].clone()
        divide([values], 1.0 if weight is None else weight)
        metrics = UnreadMetrics(values, self._memory)
        return Tail(metrics, float(first.notice), (word, word * word), shares, np.zeros(0, np.float32), weight)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
