"""The mean gradients of a module over all replicas, computed on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from strategies.errors import StrategyError
from strategies.exchange.flat import private_memory
from strategies.exchange.means import Allocate, Bucket, Means
from strategies.exchange.window_path import lock_pages
from strategies.torch.exchange.plan import GradientExchange, Tail, TailValues, TorchGradientPlan, separate
from strategies.torch.replicas.gradient_map import GroupRow
from strategies.torch.tensors import HOST, as_array, as_tensor, copy_pairs, real_view, real_views, torch_dtype


def raise_gradient_came_twice(name: str) -> NoReturn:
    """Raise for a gradient that was already taken in this step."""
    raise StrategyError(
        f"the gradient of {name} came twice in one backward pass, as it does if several reentrant checkpoints use the "
        "parameter; use checkpoint(..., use_reentrant=False), or stream_gradients=False"
    )


@final
class HostExchange(GradientExchange):
    """An exchange over the communicator. All instances compute the means on the host.

    If a gradient has a buffer of its own, in its own dtype, it is exchanged from autograd's memory. Other gradients are
    copied, from a GPU into page-locked memory: 496 MB take 9 ms on an H100, and 319 ms without page locks.

    The mean of a gradient with a buffer of its own is written over the gradient of the first local replica: it takes no
    memory, and nobody copies it. The other means lie in memory of the exchange. A loop writes no mean over a gradient
    before the tail shows that the means can be used: if an instance has another plan, all exchange the same gradients
    again. Gradients that leave earlier are not written over.

    Args:
        plan: The plan of the gradients.
        names: The names of the metrics in the tail.
        communicator: The communicator of all instances.
        replicas: The number of replicas of all instances.
        rows: For each local replica, its rows of grouped parameters, by their numbers.
        allocate: Makes the memory of the means. Collective if instances share it.
        writes_over: Whether means may be written over gradients. If not, gradients can be inspected afterwards.
        gpu: The ordinal of the GPU to which means go; None if they stay on the host.
    """

    def __init__(
        self,
        plan: TorchGradientPlan,
        names: tuple[str, ...],
        communicator: Communicator,
        replicas: int,
        rows: Sequence[Mapping[int, GroupRow]],
        allocate: Allocate,
        writes_over: bool = False,
        gpu: int | None = None,
    ) -> None:
        super().__init__(plan, names, rows)
        self._means = Means(communicator)
        self._is_alone = replicas == 1  # the mean over one replica is its gradient
        self.buckets = plan.buckets(allocate, writes_over)
        self._numbers = {bucket.name: number for number, bucket in enumerate(self.buckets)}
        passes = writes_over and plan.shards is None
        self._over = [  # the buffers whose means are written over gradients
            [n for n, buffer in enumerate(layout.buffers) if self._is_alone or (passes and buffer.is_of_one)]
            for layout in plan.layouts
        ]
        pairs = list(zip(self.buckets, self._over, strict=True))
        self._kept = [[buffer for buffer in bucket.whole if buffer not in over] for bucket, over in pairs]
        self._results = [list(bucket.results) for bucket in self.buckets]
        self._memory: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in rows]  # by bucket and buffer
        self._borrowed: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in rows]  # memory of autograd
        self._given: list[dict[int, torch.Tensor]] = [{} for _ in rows]  # the memory of copied gradients
        self._gpu = gpu
        results = [one for of_bucket in self._results for one in of_bucket]
        self._result_locks = [] if gpu is None else lock_pages(results, gpu)
        self._locks: dict[tuple[int, int, int], Sequence[object]] = {}
        self._dtypes = [torch_dtype(parameter.dtype) for parameter in plan.parameters]
        places = enumerate(plan.places)
        self._passing = frozenset(number for number, place in places if place.buffer in self._over[place.bucket])
        self._received: dict[int, torch.Tensor] = {}

    # ---- the gradients of local replicas

    @override
    def take(self, number: int, gradient: torch.Tensor | None, place: int = 0) -> None:
        self._take([(number, real_view(gradient))], place)

    @override
    def take_all(self, gradients: Sequence[torch.Tensor | None], place: int = 0) -> None:
        separate(found := real_views(gradients))
        self._take(enumerate(found), place)

    def _take(self, numbered: Iterable[tuple[int, torch.Tensor | None]], place: int) -> None:
        rows, places = self._rows[place], self.plan.places
        views, copied, gpus = [], [], set()
        for number, gradient in numbered:
            row = rows.get(number)
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    self._raise_sparse(number)
                if row is None and places[number].is_of_one and self._borrows(number, gradient, place):
                    continue
            view = self._view(number, place)
            if gradient is None or row is not None:  # clear the other rows: a reduction may have written to them
                view.zero_()
            if gradient is None:
                continue
            views.append(view if row is None else view[row.number])
            copied.append(gradient if row is None else gradient * row.gain)
            if gradient.is_cuda:
                self._lock(number, place, gradient.device)
                gpus.add(gradient.device)
        if copied:
            with torch.no_grad():
                torch._foreach_copy_(views, copied, non_blocking=bool(gpus))
            for gpu in gpus:
                torch.cuda.current_stream(gpu).synchronize()

    def _borrows(self, number: int, gradient: torch.Tensor, place: int) -> bool:
        """Return whether a gradient can be exchanged from autograd's memory. If so, put that memory into its bucket."""
        own = self.plan.places[number]
        buffer = self.plan.layouts[own.bucket].buffers[own.buffer]
        if gradient.numel() != buffer.size or gradient.device != HOST or not gradient.is_contiguous():
            return False
        if (array := as_array(gradient)).dtype != buffer.dtype:
            return False
        self._borrowed[place][own.bucket, own.buffer] = array.reshape(-1)
        return True

    def _view(self, number: int, place: int) -> torch.Tensor:
        """Return the memory to which a gradient is copied, in the dtype in which the gradient travels."""
        own, view = self.plan.places[number], self._given[place].get(number)
        if own.is_of_one:
            self._borrowed[place].pop((own.bucket, own.buffer), None)
        if view is None:
            shape = self.plan.parameters[number].shape
            flat = self._array(own.bucket, own.buffer, place)[own.start : own.start + math.prod(shape)]
            view = self._given[place][number] = as_tensor(flat.reshape(shape))
        return view

    def _array(self, bucket: int, buffer: int, place: int) -> np.ndarray:
        """Return a buffer of a local replica. The first call allocates it, filled with zeros."""
        key = bucket, buffer
        if (array := self._borrowed[place].get(key, self._memory[place].get(key))) is None:
            own = self.plan.layouts[bucket].buffers[buffer]
            array = self._memory[place][key] = private_memory((own.size,), own.dtype)
            array[...] = 0
        return array

    def _lock(self, number: int, place: int, device: torch.device) -> None:
        """Lock the pages of a gradient's buffer: a GPU then copies to it at 54 GB/s instead of 1.5."""
        own = self.plan.places[number]
        key = own.bucket, own.buffer, place
        if key not in self._locks:
            self._locks[key] = lock_pages([self._array(*key)], device.index)

    @override
    def set_tail(self, tail_values: TailValues, place: int = 0) -> None:
        last = self.buckets[-1].layout
        last.tail_view([self._array(len(self.buckets) - 1, 0, place)])[:] = tail_values.values

    @override
    def buffers(self, bucket: int) -> list[list[np.ndarray]]:
        places, count = range(len(self._rows)), len(self.plan.layouts[bucket].buffers)
        return [[self._array(bucket, buffer, place) for place in places] for buffer in range(count)]

    @override
    def is_finite(self, place: int, number: int) -> bool:
        own = self.plan.places[number]
        arrays = [of_buffer[place] for of_buffer in self.buffers(own.bucket)]
        return bool(torch.isfinite(as_tensor(self.plan.layouts[own.bucket].view(own.leaf, arrays))).all())

    @override
    def give_back(self) -> None:
        for borrowed in self._borrowed:
            borrowed.clear()

    # ---- means

    @override
    def reduce(self, bucket: Bucket, contributions: Sequence[Sequence[np.ndarray]]) -> None:
        number = self._numbers[bucket.name]
        self._reduce_kept(number, contributions)
        self._reduce_over(number, contributions)

    def _reduce_kept(self, number: int, contributions: Sequence[Sequence[np.ndarray]]) -> None:
        """Compute the means that are not written over gradients, and the tail. Gradients stay as they are. Collective.

        Args:
            number: The number of the bucket.
            contributions: The buffers of the local replicas.
        """
        if self._gpu is not None:  # the GPU may still be reading the last means
            torch.cuda.current_stream(self._gpu).synchronize()
        if self.plan.shards is None or self._is_alone:
            self._reduce(number, self._kept[number], contributions)
        else:
            self._means.reduce(self.buckets[number], contributions)

    def _reduce_over(self, number: int, contributions: Sequence[Sequence[np.ndarray]]) -> None:
        """Write the means over the gradients of the first local replica, after `_reduce_kept`. Collective."""
        results, over = self._results[number], self._over[number]
        for buffer in over:
            results[buffer] = contributions[buffer][0]
        if not self._is_alone:
            self._reduce(number, over, contributions)

    def _reduce(self, number: int, buffers: Sequence[int], contributions: Sequence[Sequence[np.ndarray]]) -> None:
        if buffers:
            self._means.reduce_whole(self.buckets[number], contributions, buffers, self._results[number])

    @override
    def let_go(self) -> None:
        self._results = [list(bucket.results) for bucket in self.buckets]

    @property
    def _tail(self) -> Tail:
        """The numbers that arrived behind the last bucket."""
        last = self.buckets[-1].layout.tail_view(self._results[-1])
        return Tail.of(last, len(self.names), len(self.plan.parameters), self.is_weighted)

    @property
    @override
    def weight(self) -> float | None:
        return self._tail.weight if self.is_weighted else None

    @override
    def means(self, *divisors: float) -> list[torch.Tensor]:
        others = [divisor for divisor in divisors if divisor != 1]
        return [self._mean(number, dtype, others) for number, dtype in enumerate(self._dtypes)]

    def _mean(self, number: int, dtype: torch.dtype, divisors: Sequence[float]) -> torch.Tensor:
        received = self._view_of_mean(number)
        wide = received.to(torch.promote_types(received.dtype, torch.float32)) if divisors else received
        for divisor in divisors:
            wide = wide / divisor
        return wide if wide.dtype is dtype else wide.to(dtype)

    def _view_of_mean(self, number: int) -> torch.Tensor:
        """Return the memory of a mean as a tensor; if means are sharded, this instance's shard, flat."""
        if (view := self._received.get(number)) is not None:
            return view
        own = self.plan.places[number]
        bucket, results = self.buckets[own.bucket], self._results[own.bucket]
        is_part = own.buffer in bucket.scattered
        view = as_tensor(results[own.buffer] if is_part else bucket.layout.view(own.leaf, results))
        if number not in self._passing:  # the memory stays the same
            self._received[number] = view
        return view

    @override
    def tail_and_flags(self, means: Sequence[torch.Tensor | None], checks: bool) -> tuple[Tail, np.ndarray]:
        bad = [checks and not bool(torch.isfinite(one).all()) for one in means if one is not None]
        return self._tail, np.array(bad, bool)

    # ---- in a loop of the program

    @override
    def finish(self, tail_values: Sequence[TailValues]) -> Tail:
        for place, own in enumerate(tail_values):
            self.set_tail(own, place)
        last = len(self.buckets) - 1
        self._reduce_kept(last, self.buffers(last))
        return self._tail

    @override
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        last = len(self.buckets) - 1
        self._reduce_over(last, self.buffers(last))
        others, borrowed = real_views(gradients), self._borrowed[0]
        for number in self._passing:
            place, own = self.plan.places[number], others[number]
            if own is not None and (place.bucket, place.buffer) in borrowed:  # the mean was written over it
                torch.autograd.graph.increment_version(own)
                others[number] = None
        with torch.no_grad():
            copy_pairs([(one, self._view_of_mean(number)) for number, one in enumerate(others) if one is not None])
        self.let_go()
        self.give_back()
