"""A step of the local replicas of a `Trainer`: their turns, whose gradients go to the exchange."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

import torch

from strategies.core.engine import Buffers
from strategies.errors import StrategyError
from strategies.exchange.means import Bucket
from strategies.jax.replicas.devices import THREADS
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.running.driver import raise_first
from strategies.torch.data import copied, parts_of
from strategies.torch.exchange.gradients import GradientExchange, raise_gradient_came_twice
from strategies.torch.exchange.plan import TailValues
from strategies.torch.options import TorchOptions
from strategies.torch.pipelines import PipelineRun
from strategies.torch.replicas.gradient_map import ReplicaRows
from strategies.torch.replicas.guard import is_due
from strategies.torch.replicas.passes import LossFunction, ReplicaPasses, ReplicaResults
from strategies.torch.replicas.sync_batch_norm import SyncLayers, sync_layers_of
from strategies.torch.replicas.turns import Gradients, ReplicaTurns, Turn, TurnsOfStep
from strategies.torch.tensors import intra_op_threads, real_view
from strategies.torch.training import TorchTraining
from strategies.typing import Batch

MakeExchange = Callable[[tuple[str, ...]], GradientExchange]
"""(names of the metrics) -> the exchange of their gradients."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step that all local replicas share.

    Attributes:
        turns: The step in which they take turns.
        scale: The loss scale of the backward pass.
        notice: Whether the instance was given a notice, which travels in the tail behind the metrics.
        settings: The hash of the settings, see `StepSettings.settings_hash`.
    """

    turns: TurnsOfStep
    scale: float
    notice: bool
    settings: int


class LocalReplicas:
    """The turns of this instance's replicas in a step.

    They run in the calling thread, or in one thread beside it if gradients leave while the last backward pass runs. If
    layers wait for other replicas (SyncBatchNorm), each of several local replicas has a thread, and one of them
    computes at a time. If gradients stay on the device, they are added after each turn.

    Args:
        replicas: The replicas of all instances.
        training: The module, its optimizer, and their state.
        loss_fn: The loss function of `Trainer`.
        options: The options of the step.
        instances: Number of instances, if gradients stay on the device; 0 if the host exchanges them.

    Attributes:
        replicas: The global indices of the local replicas.
        communicator: The communicator of all instances.
        agreed: The shapes of batches for which all instances were found to compute the same.
        exchange: The exchange of gradients; None before the first turn.
        results: The results of the local replicas in the last step.
        turns: The turns of the replicas with the module.
        pipeline: The pipeline of the module; None without one.
        rows: The rows of grouped parameters, by local replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        training: TorchTraining,
        loss_fn: LossFunction,
        options: TorchOptions,
        instances: int = 0,
    ) -> None:
        self._training, self._options = training, options
        self._module, self._memory = training.module, training.memory_of_replicas
        self.replicas, self.communicator = replicas.local_replicas, replicas.communicator
        self.agreed: set[object] = set()
        self.exchange: GradientExchange | None = None
        self.results: list[ReplicaResults] = []
        self._of_all, self._instances = replicas.num_replicas_in_sync, instances
        self._instruments = replicas.instruments
        self._streams = options.streams_over(replicas) and not instances
        training.attributes.follow()
        self.turns = ReplicaTurns[ReplicaResults](
            self._module, training.watch, training.buffers, training.attributes, self._of_all
        )
        self.rows = [ReplicaRows(self._module, replica, self._of_all) for replica in self.replicas]
        meets = bool(sync_layers_of(self._module))
        self._layers = SyncLayers(self._module, replicas, meets, self._streams, self._memory.is_on_host)
        self._passes = ReplicaPasses(self._module, self._memory, loss_fn, options, instances > 0, self._layers)
        self.pipeline: PipelineRun | None = None
        if options.pipeline is not None:
            count, threads = options.gradient_accumulation_count, options.intra_op_threads
            self.pipeline = PipelineRun(
                options.pipeline, count, threads, self._module, True, self._instruments, not meets
            )
        threads = 1 + len(self.replicas) if meets else 1
        self._threads = ThreadPoolExecutor(
            threads, f"{THREADS}-torch", torch.set_num_threads, (options.intra_op_threads,)
        )
        self._trained = training.trained

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)
        if self.pipeline is not None:
            self.pipeline.close()

    def fits(self, replicas: Replicas) -> bool:
        """Return whether replicas, instances and trained parameters are the same as when this object was made."""
        is_here = self.replicas == replicas.local_replicas and self.communicator is replicas.communicator
        return is_here and [*map(id, self._trained)] == [*map(id, self._training.trained)]

    # ---- a step

    def collect(
        self, batch: Batch, inputs: StepInputs, make_exchange: MakeExchange
    ) -> Iterator[tuple[Bucket, Buffers]]:
        """Let the replicas compute, and yield each bucket as soon as it is ready, as `PendingStep.buckets` does.

        Args:
            batch: A pytree of tensors, for all local replicas.
            inputs: The inputs that they share.
            make_exchange: Makes the exchange. Called once, in the first step. Collective.

        Raises:
            ValueError: If the batch cannot be divided evenly among the replicas.
        """
        parts = parts_of(batch, len(self.replicas), self._options.gradient_accumulation_count)
        self.results = []
        exchange = self.exchange
        # In due steps it is counted in how many parts gradients come.
        if self._streams and not is_due(inputs.turns.number) and exchange is not None and exchange.plan.streams:
            yield from self._streamed(parts, inputs, exchange)
            return
        self._take_turns(parts, inputs, make_exchange, None)
        exchange = self.exchange
        assert exchange is not None
        for number, bucket in enumerate(exchange.buckets):
            yield bucket, exchange.buffers(number)

    def _take_turns(
        self,
        parts: Sequence[Batch],
        inputs: StepInputs,
        make_exchange: MakeExchange | None,
        streamed: StreamedGradients | None,
    ) -> None:
        last = len(parts) - 1
        turns: list[Turn[ReplicaResults]] = [
            partial(self._turn, place, part, inputs, streamed if place == last else None)
            for place, part in enumerate(parts)
        ]
        is_repeated = self.turns.repeats_in(inputs.turns)
        first = copied(parts[0]) if is_repeated else None
        again = partial(self._turn, 0, first, inputs, None, is_again=True)
        self._layers.begin(is_repeated)
        if self._layers.meets and last:
            turns = self._at_once(turns)

        def take(place: int, results: ReplicaResults, gradients: Gradients) -> None:
            if (exchange := self.exchange) is None:
                assert make_exchange is not None
                exchange = self.exchange = make_exchange(results.names)
            if results.names != exchange.names:
                raise StrategyError(
                    f"a replica has the metrics {', '.join(results.names)}, but earlier the metrics were "
                    f"{', '.join(exchange.names)}; return the same names, in the same order, in every step"
                )
            self.results.append(results)
            if streamed is not None and place == last:
                streamed.rest(gradients)
            else:
                exchange.take(gradients, place)
            flags = results.seen, results.changes, inputs.notice
            exchange.set_tail(TailValues(results.values, inputs.settings, *flags, results.weight), place)

        with intra_op_threads(self._options.intra_op_threads):
            self.turns.run(inputs.turns, turns, again, take, self._layers.repeated())

    def _at_once(self, turns: Sequence[Turn[ReplicaResults]]) -> list[Turn[ReplicaResults]]:
        """Return turns that are taken on threads, because layers wait for other replicas: the first call begins all."""
        begun: list[Future[tuple[ReplicaResults, Gradients]]] = []

        def result(place: int) -> tuple[ReplicaResults, Gradients]:
            if not begun:
                begun.extend(self._threads.submit(turn) for turn in turns)
                wait(begun)
                raise_first(begun)
            return begun[place].result()

        return [partial(result, place) for place in range(len(turns))]

    def _turn(
        self, place: int, part: Batch, inputs: StepInputs, streamed: StreamedGradients | None, is_again: bool = False
    ) -> tuple[ReplicaResults, Gradients]:
        """Let a local replica compute, and return its results and gradients."""
        replica = self.replicas[place]
        pipeline = None if is_again else self.pipeline  # without one the bits are the same
        is_noted = self.pipeline is None and not is_again  # a pipeline notifies of each stage
        parameters: list[torch.Tensor] = []
        rows: Mapping[int, torch.Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(self._layers.attended_by(replica))
            stack.enter_context(
                self.turns.of(replica, self._memory.device, lambda: self._left(place, parameters, rows))
            )
            rows = stack.enter_context(self.rows[place].put())
            parameters += [rows.get(id(one), one) for one in self._trained]
            self._drop_gradients()
            stack.callback(self._drop_gradients)
            if is_noted:
                self._instruments.replica_begins(replica, 0)
            ends: Callable[[], object] | None = None
            if streamed is not None:
                ends = stack.enter_context(streamed.of(parameters))
            elif self._streams and not is_again and is_due(inputs.turns.number):
                stack.enter_context(self._counting(parameters))
            results = self._passes.run(replica, part, inputs.turns.step, inputs.scale, parameters, pipeline, ends)
            gradients = [real_view(one.grad) for one in parameters]
            seen = [one is not None for one in gradients]
            if streamed is not None:
                seen = [here or left for here, left in zip(seen, streamed.seen, strict=True)]
            if is_noted:
                self._instruments.replica_ends(
                    replica, 0, 0 if self.exchange is None else len(self.exchange.buckets) - 1
                )
            changes, slots = self.turns.ended(replica, waits=not self._instances)
            return replace(results, seen=seen, changes=changes, slots=slots), gradients

    @contextmanager
    def _counting(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Stream no gradients if one comes in parts, as it does if several reentrant checkpoints use a parameter."""
        counts: Counter[int] = Counter()

        def gradient_is_complete(parameter: torch.Tensor) -> None:
            counts[id(parameter)] += 1

        with ExitStack() as hooks:
            for one in parameters:
                hooks.enter_context(one.register_post_accumulate_grad_hook(gradient_is_complete))
            yield
        self._streams &= max(counts.values(), default=0) <= self._options.gradient_accumulation_count

    def _drop_gradients(self) -> None:
        for one in self._training.parameters:
            one.grad = None

    def _left(
        self, place: int, parameters: Sequence[torch.Tensor], rows: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        """Take the module away from a replica that waits for others, and return the way back."""
        if len(self.replicas) == 1:
            return lambda: None
        gradients, module_comes_back = [one.grad for one in parameters], self.turns.leave(self.replicas[place])

        def come_back() -> None:
            module_comes_back()
            self.rows[place].give(rows)
            for one, gradient in zip(parameters, gradients, strict=True):
                one.grad = gradient

        return come_back

    # ---- gradients that leave while the backward pass runs

    def _streamed(
        self, parts: Sequence[Batch], inputs: StepInputs, exchange: GradientExchange
    ) -> Iterator[tuple[Bucket, Buffers]]:
        """Let the replicas compute in a thread, and yield buckets while the last backward pass runs."""
        ready: SimpleQueue[int] = SimpleQueue()
        last = len(exchange.buckets) - 1
        ended = partial(self._instruments.replica_ends, self.replicas[-1], 0)
        streamed = StreamedGradients(exchange, len(parts) - 1, ready.put, ended)
        begun = self._threads.submit(self._take_turns, parts, inputs, None, streamed)
        begun.add_done_callback(lambda _: ready.put(last))
        try:
            left: set[int] = set()
            for number in range(last + 1):
                while number not in left and last not in left:
                    left.add(ready.get())
                if last in left:
                    begun.result()
                yield exchange.buckets[number], exchange.buffers(number)
        finally:
            wait([begun])


class StreamedGradients:
    """The gradients of the last local replica, sent while its last backward pass runs.

    Args:
        exchange: The exchange.
        place: The place of the replica among the local replicas.
        is_ready: Called with the number of each bucket that is complete, except the last one, which waits for its tail.
        ended: Called with the same number, for instruments.

    Attributes:
        seen: Whether each trained parameter has a gradient that has left.
    """

    def __init__(
        self, exchange: GradientExchange, place: int, is_ready: Callable[[int], object], ended: Callable[[int], object]
    ) -> None:
        plan = exchange.plan
        self._exchange, self._place, self._is_ready, self._ended = exchange, place, is_ready, ended
        self._missing = [len(numbers) for numbers in plan.members]
        self._taken = [False] * len(plan.parameters)
        self.seen = [False] * len(plan.parameters)
        self._thread = 0  # in which the last backward pass runs

    @contextmanager
    def of(self, parameters: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Take the gradients of a replica's parameters as soon as they are complete; yield a function that begins."""
        with ExitStack() as hooks:
            for number, one in enumerate(parameters):
                hooks.enter_context(one.register_post_accumulate_grad_hook(partial(self._send, number)))
            yield self._begin

    def _begin(self) -> None:
        self._thread = threading.get_ident()

    def _send(self, number: int, parameter: torch.Tensor) -> None:
        """Take a complete gradient. Called by autograd in the thread of the backward pass."""
        if self._thread != threading.get_ident():
            return
        if self._taken[number]:
            raise_gradient_came_twice(self._exchange.plan.parameters[number].name)
        self._take(number, real_view(parameter.grad))
        parameter.grad = None

    def _take(self, number: int, gradient: torch.Tensor | None) -> None:
        self._taken[number], self.seen[number] = True, gradient is not None
        self._exchange.take([gradient], self._place, number)
        bucket = self._exchange.plan.places[number].bucket
        self._missing[bucket] -= 1
        if not self._missing[bucket] and bucket != len(self._missing) - 1:
            self._ended(bucket)
            self._is_ready(bucket)

    def rest(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients that have not left."""
        for number, gradient in enumerate(gradients):
            if not self._taken[number]:
                self._take(number, gradient)
