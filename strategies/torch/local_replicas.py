"""The replicas of this instance, on threads: one at once per core, or one at once on an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

import strategies.trees as trees
from strategies.core.engine import Buffers
from strategies.errors import StrategyError
from strategies.exchange.means import Bucket
from strategies.jax.replicas.devices import THREADS
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.running.driver import raise_first
from strategies.torch.contribution import Contribution
from strategies.torch.gradient_exchange import GradientExchange, TorchGradientPlan
from strategies.torch.meetings import ReplicaMeetings, adding_over
from strategies.torch.module_parts import is_compiled
from strategies.torch.on_device.contribution import DeviceContribution
from strategies.torch.on_device.exchange import DeviceExchange
from strategies.torch.options import TorchOptions
from strategies.torch.outside_networks import OutsideNetworks
from strategies.torch.parameter_writes import WrittenBits
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.replica_run import LossFunction, ReplicaTurn, TorchReplicaRun
from strategies.torch.sync_batch_norm import sync_layers_of
from strategies.torch.tensors import parts_of
from strategies.torch.threads import intra_op_threads
from strategies.typing import Batch

AnyExchange = GradientExchange | DeviceExchange

MakeExchange = Callable[[tuple[str, ...]], AnyExchange]
"""(names of the metrics) -> the exchange of their gradients."""


@dataclass
class _FirstStep:
    """The handshake of the first step: a replica gives the names of its metrics, and gets the plan of the gradients.

    Attributes:
        names: The names of the metrics, from the first replica that computes them; None if a replica failed before.
        plan: The plan of the gradients.
    """

    names: Future[tuple[str, ...] | None] = field(default_factory=Future)
    plan: Future[TorchGradientPlan] = field(default_factory=Future)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, names: tuple[str, ...] | None) -> None:
        """Set the names, unless they are known."""
        with self._lock:
            if not self.names.done():
                self.names.set_result(names)


class LocalReplicas:
    """The local replicas, which compute gradients.

    A single replica whose gradients are not streamed runs in the calling thread. If gradients stay on the device,
    replicas run in that thread too, one after another; each begins when the gradients before it were added. Several
    replicas that wait for one another in their passes (SyncBatchNorm) run in threads.

    Args:
        replicas: The replicas of all instances.
        memory: The memory of the module and of its copies.
        loss_fn: The loss function of `Trainer`.
        options: The options of the step.
        instances: Number of instances, if gradients stay on the device; 0 if the host exchanges them.

    Attributes:
        replicas: The global indices of the local replicas.
        communicator: The communicator of all instances.
        agreed: The shapes of batches for which all instances were found to compute the same.
        exchange: The exchange of gradients; None before the first forward pass.
    """

    def __init__(
        self,
        replicas: Replicas,
        memory: ReplicaMemory,
        loss_fn: LossFunction,
        options: TorchOptions,
        instances: int = 0,
    ) -> None:
        streams = options.streams_over(replicas) and not instances
        self.replicas, self.communicator = replicas.local_replicas, replicas.communicator
        self.agreed: set[object] = set()
        memory.follow()
        at_once = memory.at_once(len(self.replicas))
        self._meetings: ReplicaMeetings | None = None
        if sync_layers_of(memory.module):
            is_cut = options.pipeline is not None
            add, timeout_s = adding_over(self.communicator, streams or is_cut), self.communicator.limits.timeout_s
            self._meetings = ReplicaMeetings(self.replicas, add, None if is_cut else at_once, timeout_s, memory.device)
            at_once = len(self.replicas)
        of_all, instruments = replicas.num_replicas_in_sync, replicas.instruments
        is_alone = len(self.replicas) == 1 and not streams
        self.runs = [
            TorchReplicaRun(replica, memory, loss_fn, options, of_all, instruments, self._meetings, instances, is_alone)
            for replica in self.replicas
        ]
        for run in self.runs:
            run.follow()
        self.exchange: AnyExchange | None = None
        self._is_on_device = instances > 0
        self._is_in_turn = self._is_on_device and self._meetings is None
        self._is_alone = is_alone and not self._is_in_turn
        self._has_pipeline = options.pipeline is not None
        self._waiting: list[Callable[[], None]] = []  # replicas that compute in turn
        self._make_exchange: MakeExchange | None = None
        self._first = _FirstStep()
        self._begun: list[Future[None]] = []
        self._memory = memory
        self._bits = WrittenBits(memory.parameters)
        functions = {"loss_fn": loss_fn, "map_gradient": options.map_gradient}
        copies = [run.copy.module for run in self.runs]
        is_single = of_all == 1  # it may write other networks
        self._outside = None if is_single else OutsideNetworks(memory.module, copies, functions)
        waits = is_compiled(memory.module) and self._meetings is None  # replicas that meet must not hold a lock
        self._compiling: threading.Lock | None = threading.Lock() if waits else None
        self._compiled: set[object] = set()  # the shapes of batches for which the module is compiled
        self._intra_op = options.intra_op_threads
        self._micro_batches = options.gradient_accumulation_count
        self._threads = ThreadPoolExecutor(at_once, f"{THREADS}-torch", torch.set_num_threads, (self._intra_op,))

    def close(self) -> None:
        """End the threads after the work that has begun, and drop the replicas."""
        self._wait()
        self._threads.shutdown(wait=True)
        for run in self.runs:
            if run.pipeline is not None:
                run.pipeline.close()
        self.runs = []

    def fits(self, replicas: Replicas) -> bool:
        """Return whether replicas, instances and trained parameters are the same as when this object was made."""
        is_here = self.replicas == replicas.local_replicas and self.communicator is replicas.communicator
        return is_here and bool(self.runs) and self.runs[0].is_of_these

    def follow(self) -> None:
        """Take over changes that the program has made to the module."""
        self._memory.follow()
        for run in self.runs:
            run.follow()

    def begin(
        self,
        batch: Batch,
        turns: Sequence[ReplicaTurn],
    ) -> None:
        """Begin to compute gradients, and do not wait for them.

        Args:
            batch: A pytree of tensors, for all local replicas.
            turns: The turn of each local replica.

        Raises:
            ValueError: If the batch cannot be divided evenly among the replicas.
        """
        self._wait()  # threads of a step that was given up may still run
        if self._meetings is not None:
            self._meetings.begin()
        parts = parts_of(batch, len(self.runs), self._micro_batches)
        self._bits.begin()
        if self._outside is not None:
            self._outside.begin()
        turns_of_each = list(zip(self.runs, parts, turns, strict=True))
        if self._is_in_turn or self._computes_here:
            for run in self.runs:
                run.clear()
            self._waiting = [partial(run.compute, part, turn) for run, part, turn in turns_of_each]
            return
        for run in self.runs:
            for event in run.finished:
                event.clear()
        compiling = self._new_compilation(parts[0])
        self._begun = [self._threads.submit(_compute, *each, compiling) for each in turns_of_each]
        if self.exchange is None:
            first = self._first
            self._begun[0].add_done_callback(lambda _: first.tell(None))

    def _new_compilation(self, batch: Batch) -> AbstractContextManager[object]:
        """Return the lock to hold while the first replica compiles; a null context if nothing is compiled."""
        if self._compiling is None:
            return nullcontext()
        shapes = tuple(getattr(leaf, "shape", None) for leaf in trees.leaves(batch))
        is_new = shapes not in self._compiled
        self._compiled.add(shapes)
        return self._compiling if is_new else nullcontext()

    @property
    def _computes_here(self) -> bool:
        """Whether the only replica computes in the calling thread. Threads of a pipeline cannot make the exchange."""
        return self._is_alone and (self.exchange is not None or not self._has_pipeline)

    def collect(self, make_exchange: MakeExchange) -> Iterator[tuple[Bucket, Buffers]]:
        """Yield each bucket as soon as it is ready, as `PendingStep.buckets` does.

        Args:
            make_exchange: Makes the exchange. Called once, in the first step. Collective.
        """
        if self._waiting:
            yield (self._collect_in_turn if self._is_in_turn else self._collect_alone)(make_exchange)
            return
        if self.exchange is None:
            self._make_first(make_exchange)
        if isinstance(self.exchange, DeviceExchange):
            self._end()
            yield self._added(self.exchange)
            return
        assert self.exchange is not None
        last = len(self.exchange.buckets) - 1
        for bucket in range(last + 1):
            for run in self.runs:
                run.finished[bucket].wait()
            if bucket == last or any(future.done() and future.exception() for future in self._begun):
                self._end()
            arrays = [run.contribution.arrays(bucket) for run in self.runs if run.contribution is not None]
            yield self.exchange.buckets[bucket], [list(of_buffer) for of_buffer in zip(*arrays, strict=True)]

    def _collect_alone(self, make_exchange: MakeExchange) -> tuple[Bucket, Buffers]:
        """Let the only replica compute in this thread, and return its gradients, which are in one bucket."""
        self._make_exchange = make_exchange
        (run,), (compute,), self._waiting = self.runs, self._waiting, []
        with intra_op_threads(self._intra_op):
            compute()
        self._refuse_writes()
        if isinstance(self.exchange, DeviceExchange):
            return self._added(self.exchange)
        assert isinstance(run.contribution, Contribution)
        assert self.exchange is not None
        return self.exchange.buckets[0], [[array] for array in run.contribution.arrays(0)]

    # ---- on a device

    def _collect_in_turn(self, make_exchange: MakeExchange) -> tuple[Bucket, Buffers]:
        """Let the replicas compute one after another in this thread, and add their gradients."""
        self._make_exchange = make_exchange
        waiting, self._waiting = self._waiting, []
        for run, compute in zip(self.runs, waiting, strict=True):
            run.refuse_gradients_of_others()
            with intra_op_threads(self._intra_op):
                compute()
            self._add(run)
        for run in self.runs:
            run.refuse_gradients_of_others()
        self._refuse_writes()
        assert isinstance(self.exchange, DeviceExchange)
        return self.exchange.buckets[0], self.exchange.take()

    def _added(self, exchange: DeviceExchange) -> tuple[Bucket, Buffers]:
        """Add the gradients of all replicas after all have computed."""
        for run in self.runs:
            self._add(run)
        return exchange.buckets[0], exchange.take()

    def _add(self, run: TorchReplicaRun) -> None:
        assert isinstance(self.exchange, DeviceExchange)
        assert isinstance(run.contribution, DeviceContribution)
        self.exchange.add(run.replica, run.contribution.arrays(0), run.contribution.told)

    # ---- ends of a step

    def share_frozen(self, all_but: frozenset[str]) -> None:
        """Let replicas share frozen parameters, except those in `all_but`, which steps change."""
        for run in self.runs:
            run.copy.share(all_but)

    def give_back(self) -> None:
        """Release the gradients of the step."""
        for run in self.runs:
            if run.contribution is not None:
                run.contribution.give_back()

    # ---- the plan

    def planned(self, names: tuple[str, ...]) -> TorchGradientPlan:
        """Return the plan for gradients.

        The first replica that calls gives the names of the metrics. All replicas wait until the plan is made.

        Raises:
            StrategyError: If a replica's metrics have other names, or another replica failed before the plan was made.
        """
        if self.exchange is not None and names == self.exchange.names:
            return self.exchange.plan
        first = self._first
        first.tell(names)
        if self._make_exchange is not None and self.exchange is None:  # this is the collecting thread itself
            self.exchange = self._make_exchange(names)
            first.plan.set_result(self.exchange.plan)
        found = first.names.result()
        if found not in (names, None):
            raise StrategyError(
                f"a replica has the metrics {', '.join(names)}, but earlier the metrics were "
                f"{', '.join(found or ())}; return the same names, in the same order, in every step"
            )
        return first.plan.result()

    def _make_first(self, make_exchange: MakeExchange) -> None:
        """Make the exchange as soon as the first replica has computed its metrics."""
        first = self._first
        begun: list[Future[None]] = []
        try:
            names = first.names.result()
            if names is not None:
                self.exchange = make_exchange(names)
                for run, future in zip(self.runs, self._begun, strict=True):
                    run.finished = [threading.Event() for _ in self.exchange.buckets]
                    future.add_done_callback(partial(_finish, run))
                first.plan.set_result(self.exchange.plan)
        finally:
            if self.exchange is None:
                begun = self._wait()
        raise_first(begun)

    # ---- ends

    def _end(self) -> None:
        """Wait until all replicas have ended, and raise the error of the first one that failed."""
        raise_first(self._wait())
        self._refuse_writes()

    def _refuse_writes(self) -> None:
        """Raise if replicas have written tensors that they share: parameters, or networks outside of the module."""
        self._memory.refuse_writes(self._bits.written())
        if self._outside is not None:
            self._outside.refuse_writes()

    def _wait(self) -> list[Future[None]]:
        """Wait until all replicas have ended, even in a step that was given up. Return their futures."""
        begun, self._begun = self._begun, []
        self._waiting = []
        if self.exchange is not None and not begun:
            return begun
        if self.exchange is None:  # wake replicas that wait for a plan
            failed = StrategyError("there is no plan for gradients, because another replica has failed")
            self._first.plan.set_exception(failed)
            wait(begun)
            self._first = _FirstStep()
        wait(begun)
        return begun


def _compute(run: TorchReplicaRun, part: Batch, turn: ReplicaTurn, compiling: AbstractContextManager[object]) -> None:
    with compiling:
        run.compute(part, turn)


def _finish(run: TorchReplicaRun, _: Future[None]) -> None:
    """Mark all buckets of a replica as finished, even if it has failed, so that no thread waits for them."""
    for event in run.finished:
        event.set()
