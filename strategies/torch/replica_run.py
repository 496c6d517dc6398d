"""A local replica's part of a step: forward and backward passes, whose gradients leave one by one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch.jit import optimized_execution

import strategies.trees as trees
from collectives.instruments import Instruments
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.errors import StrategyError
from strategies.outcome import Outcome
from strategies.torch.contribution import Contribution, refuse_to_come_twice
from strategies.torch.gradient_exchange import TorchGradientPlan
from strategies.torch.gradient_map import GradientMap, ParameterHooks
from strategies.torch.meetings import ReplicaMeetings
from strategies.torch.on_device.arithmetic import divide
from strategies.torch.on_device.contribution import DeviceContribution, Told
from strategies.torch.on_device.determinism import way_out_of_refusals
from strategies.torch.options import TorchOptions
from strategies.torch.outcomes import WEIGHT, outcome_of, refuse_losses, refuse_where_replicas_meet, weighted_loss
from strategies.torch.parameter_writes import WriteCounters
from strategies.torch.pipeline_run import PipelineRun, Walk
from strategies.torch.randomness import drawing_from, seed_of
from strategies.torch.replica_groups import GroupRow
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.replica_modules import ReplicaModule
from strategies.torch.sync_batch_norm import Seat
from strategies.torch.tensors import parts_of
from strategies.torch.threads import ThreadValue
from strategies.typing import Batch, Number, Tree

LossFunction = Callable[[torch.nn.Module, Batch], Tree]
"""(module, batch) -> loss, or (loss, dictionary of metrics), or (loss, metrics, outputs), or `Outcome`, for one replica
and one micro-batch."""

RUNNING_MEAN = GradientAccumulationReductionMethod.RUNNING_MEAN


class ReplicaWatch(Protocol):
    """A watcher of the results of replica 0. Its methods are called in the replica's thread, in no fixed order."""

    def losses(self, found: Sequence[float]) -> None:
        """Take the losses of all micro-batches."""

    def gradient(self, number: int, found: torch.Tensor | None) -> None:
        """Take the whole gradient of a trained parameter. The watcher must not keep or change it."""


@dataclass(frozen=True)
class ReplicaTurn:
    """The inputs of one step for one replica.

    Attributes:
        step: The number of the step.
        scale: The loss scale of the backward pass.
        notice: Whether the instance was given a notice, which travels in the tail behind the metrics.
        plan: Returns the plan of the gradients for the names of the metrics. Waits until the plan is made.
        moving: The numbers of the buffers and frozen parameters that are known to change.
        settings: The hash of the settings, see `StepSettings.word`.
        watch: The watcher of replica 0; None in steps that are not compared.
        masters: The buffers and frozen parameters with which the replica begins.
        residuals: The residuals of int8 gradients.
    """

    step: int
    scale: float
    notice: bool
    plan: Callable[[tuple[str, ...]], TorchGradientPlan]
    moving: frozenset[int]
    settings: int
    watch: ReplicaWatch | None
    masters: Sequence[torch.Tensor]
    residuals: Sequence[np.ndarray]


_running: ThreadValue[TorchReplicaRun | None] = ThreadValue(None)


class TorchReplicaRun:
    """The computations of one local replica.

    Args:
        replica: The global index of the replica.
        memory: The memory of the module and of its copies.
        loss_fn: The loss function.
        options: The options of the step.
        replicas: The number of all replicas.
        instruments: The instruments to notify of passes.
        meetings: The meetings in which its layers wait for other replicas; None if no layer does.
        instances: Number of instances, if gradients stay on the device; 0 if the host exchanges them.
        is_alone: Whether the instance has no other replica, and gradients leave when all are complete. Then autograd
            need not report each gradient, unless the program has a hook for it.

    Attributes:
        copy: The replica's copy of the module.
        finished: For each bucket, an event: its arrays are ready, or never will be. The maker of the plan sets them.
        contribution: The replica's gradients in the form that is exchanged.
        residuals: The new residuals, after the last gradient was taken.
        outputs: For each micro-batch, the loss function's third result, without history, on the replica's device.
        pipeline: The replica's pipeline; None without one.
        weight: The mean weight of the losses of the last step; None if they have no weights.
    """

    def __init__(
        self,
        replica: int,
        memory: ReplicaMemory,
        loss_fn: LossFunction,
        options: TorchOptions,
        replicas: int,
        instruments: Instruments | None = None,
        meetings: ReplicaMeetings | None = None,
        instances: int = 0,
        is_alone: bool = False,
    ) -> None:
        self.replica = replica
        self._replicas, self._instances = replicas, instances
        self.copy = ReplicaModule(memory, replica, replicas)
        self._seat = Seat(replica, replicas, self.copy.module, meetings)
        self._meets = meetings is not None
        self._writes = WriteCounters(self.copy.parameters)
        self._memory = memory
        self._loss_fn = loss_fn
        self._options = options
        self._instruments = instruments or Instruments()
        self._plan: TorchGradientPlan | None = None
        self._trained: list[int] = []  # the numbers of the trained parameters
        self._missing: list[int] = []  # for each bucket, the number of gradients still to come
        self._seen: list[bool] = []  # for each trained parameter, whether its gradient was taken
        self._leaving: int | None = None  # the only thread in which gradients may leave now
        self._watch: ReplicaWatch | None = None
        self.pipeline: PipelineRun | None = None
        if options.pipeline is not None:
            count, threads = options.gradient_accumulation_count, options.intra_op_threads
            self.pipeline = PipelineRun(
                options.pipeline,
                count,
                threads,
                self.copy.module,
                instruments=self._instruments,
                replica=replica,
                meets=meetings is not None,
            )
        self.finished: list[threading.Event] = []
        self.contribution: Contribution | DeviceContribution | None = None
        self.residuals: Sequence[np.ndarray] = ()
        self.outputs: list[Tree] = []
        self.weight: float | None = None
        self._hooks: list[ParameterHooks] = []  # one for each trained parameter
        self._told: set[int] = set()  # the trained parameters whose gradients autograd reports
        self._map = options.mapping()
        self._zeros: GradientMap | None = None  # of gradients of the weight 0, if there were any
        for number, (original, parameter) in enumerate(zip(memory.originals, self.copy.parameters, strict=True)):
            if parameter.requires_grad:
                if not instances and not is_alone:
                    self._be_told(len(self._trained), parameter)
                self._trained.append(number)
                self._hooks.append(ParameterHooks(original, parameter))
                if self._map is not None:
                    self._map.attach(original, parameter)

    @property
    def is_of_these(self) -> bool:
        """Whether the same parameters are trained as when this object was made."""
        flags = [parameter.requires_grad for parameter in self.copy.parameters]
        return [number for number, flag in enumerate(flags) if flag] == self._trained

    def follow(self) -> None:
        """Take over the program's changes to the module."""
        self.copy.follow()
        for number, hooks in enumerate(self._hooks):
            if hooks.follow() and number not in self._told:
                self._be_told(number, self.copy.parameters[self._trained[number]])

    def _be_told(self, number: int, parameter: torch.Tensor) -> None:
        """Make autograd report each gradient of a parameter. For a parameter on a GPU, each report takes 10 us."""
        self._told.add(number)
        parameter.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self), number))

    def clear(self) -> None:
        """Drop gradients left by a step that was given up."""
        for parameter in self.copy.parameters:
            parameter.grad = None

    def refuse_gradients_of_others(self) -> None:
        """Raise if this replica, which is not computing, has gradients: they come from another replica's loss."""
        if any(parameter.grad is not None for parameter in self.copy.parameters):
            self._refuse_to_be_used()

    def _refuse_to_be_used(self) -> NoReturn:
        raise StrategyError(
            f"the loss of a replica depends on parameters of replica {self.replica}. The module or the loss function "
            "keeps tensors of a forward pass in an object shared by all replicas, as a list that a hook refers to; "
            "keep them in attributes of the hook's module argument"
        )

    def compute(self, batch: Batch, turn: ReplicaTurn) -> None:
        """Run the passes of a step in this thread. When it returns or raises, every bucket is finished.

        Raises:
            BaseException: The error of the module or the loss function.
        """
        try:
            if self.pipeline is None:  # a pipeline notifies of each stage
                self._instruments.replica_begins(self.replica, 0)
            with self._seat.attended(), way_out_of_refusals():
                self._compute(batch, turn)
            if self.pipeline is None:
                self._instruments.replica_ends(self.replica, 0, len(self._missing) - 1)
        finally:
            for event in self.finished:
                event.set()

    def _compute(self, batch: Batch, turn: ReplicaTurn) -> None:
        for parameter in self.copy.parameters:
            parameter.grad = None
        self.copy.begin_with(turn.masters)
        self._writes.begin()
        self._watch = turn.watch if self.replica == 0 else None
        count = self._options.gradient_accumulation_count
        parts = [batch] if count == 1 else parts_of(batch, count)
        values: list[list[Told]] = [[] for _ in parts]
        self.outputs = [None for _ in parts]
        weights: list[float | None] = [None for _ in parts]

        def work(number: int, walk: Walk | None) -> None:
            seed = seed_of(self._options.seed, self.replica, turn.step, number)
            device, running = self._memory.device, _running.being(self)
            drawing, seat = drawing_from(seed, device, self.replica), self._seat.computing(number)
            with self._memory.current(), running, seat, drawing, optimized_execution(False):  # see torch_modules.md
                with self._autocast():
                    outcome = outcome_of(lambda: self._loss_fn(self.copy.module, self._memory.put(parts[number])))
                loss, weight = outcome.loss, outcome.weight
                refuse_losses(loss)
                self.outputs[number] = trees.map(_detached, outcome.outputs)
                values[number] = self._values_of(outcome)
                if number == 0:
                    names = ("loss", *outcome.metrics)
                    self._prepare(turn.plan(names if weight is None else (*names, WEIGHT)))
                weights[number] = weight
                loss = self._for_backward(loss, number, turn.scale, weight)
                if walk is not None:
                    walk.turn_round(loss, walk.last_stage)
                if number == count - 1 and self._leaves:
                    self._leaving = threading.get_ident()
                if walk is None:
                    loss.backward()
                else:
                    walk.back(loss)

        try:
            if self.pipeline is None:
                for number in range(count):
                    work(number, None)
            else:
                self.pipeline.each(work)
        finally:
            self._leaving = None
        self.copy.refuse_other_parts()
        self.copy.refuse_writes(self._writes.written())
        if self._watch is not None:
            self._watch.losses([float(value[0]) for value in values])
        self.weight, total = _mean_of(weights), values[0]
        for more in values[1:]:
            total = [one + other for one, other in zip(total, more, strict=True)]
        self._end([_divided(value, count) for value in total], turn)

    def _values_of(self, outcome: Outcome) -> list[Told]:
        """Return the loss and the metrics, times the weight if there is one, and then the weight."""
        named, weight = {"loss": outcome.loss, **outcome.metrics}, outcome.weight
        values = [self._number(name, 0.0 if weight == 0 else value) for name, value in named.items()]
        return values if weight is None else [*(one * weight for one in values), self._number(WEIGHT, weight)]

    def _number(self, name: str, value: Number) -> Told:
        """Return a metric as a number; if gradients stay on the device, as a wide scalar there."""
        device = self._memory.device
        if not self._instances:
            return _number(name, value)
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == device.type:
            return value.detach().reshape(()).to(wide, copy=True)  # a copy: the next pass may change the tensor
        return torch.full((), _number(name, value), dtype=wide, device=device)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self._options.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self._memory.device.type, dtype)

    def _for_backward(self, loss: torch.Tensor, number: int, scale: float, weight: float | None) -> torch.Tensor:
        """Return the loss for the backward pass. For a running mean, also rescale the gradients so far."""
        if self._options.method is RUNNING_MEAN and number:
            for parameter in self.copy.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(number / (number + 1))
        divisor = self._options.divisor(number)
        self._zero_gradients(loss, number, scale, weight)
        if self._map is not None:
            self._map.begin(number, scale, divisor, weight)
            return loss * scale if scale != 1 else loss
        if weight is not None:
            loss = weighted_loss(loss, weight)
        if divisor != 1:
            loss = loss / divisor
        return loss * scale if scale != 1 else loss

    def _zero_gradients(self, loss: torch.Tensor, number: int, scale: float, weight: float | None) -> None:
        """Make zeros of this micro-batch's gradients if its weight is 0, because 0 times NaN is NaN.

        If layers meet those of other replicas, gradients of their losses arrive here as well, and they stay.

        Raises:
            StrategyError: If layers meet others, and gradients are mapped, or the loss has the weight 0 and is not
                finite.
        """
        if weight is not None and self._meets:
            refuse_where_replicas_meet(loss, weight, self._map is not None)
        elif weight is not None and self._zeros is None and (weight == 0 or self.pipeline is not None):
            # In a pipeline before the first timetable: later, other micro-batches would run through the hooked nodes.
            self._zeros = self._options.zeros()
            for own in self._trained:
                self._zeros.attach(self._memory.originals[own], self.copy.parameters[own])
        if self._zeros is not None:
            self._zeros.begin(number, scale, 1, weight)

    # ---- gradients

    @property
    def _is_quantised(self) -> bool:
        return self._options.transfer.is_quantised

    @property
    def _leaves(self) -> bool:
        """Whether gradients leave one by one. If not, all are taken at the end, which is several times faster."""
        return self._plan is not None and self._plan.is_cut

    def _prepare(self, plan: TorchGradientPlan) -> None:
        if plan is not self._plan:
            rows = enumerate(self.copy.rows[number] for number in self._trained)
            self._plan = plan
            self.contribution = self._new_contribution(plan, {number: row for number, row in rows if row is not None})
        self._missing = [len(numbers) for numbers in plan.members]
        self._seen = [False] * len(self._trained)

    def _new_contribution(
        self, plan: TorchGradientPlan, rows: Mapping[int, GroupRow]
    ) -> Contribution | DeviceContribution:
        if not self._instances:
            return Contribution(plan, rows)
        checks = self._options.check_numerics
        return DeviceContribution(plan, rows, self._memory.device, self._replicas == 1, self._instances > 1, checks)

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """Handle a complete gradient. Autograd calls this in the thread of the replica."""
        if _running.now not in (self, None):
            self._refuse_to_be_used()
        self._hooks[number].after_accumulation()
        if self._leaving != threading.get_ident():
            return
        if self._seen[number]:
            assert self._plan is not None
            refuse_to_come_twice(self._plan.parameters[number].name)
        self._take(number, parameter.grad)
        parameter.grad = None

    def _take(self, number: int, gradient: torch.Tensor | None) -> None:
        assert self._plan is not None
        assert isinstance(self.contribution, Contribution)
        self._seen[number] = gradient is not None
        if self._watch is not None:
            self._watch.gradient(number, gradient)
        self.contribution.take(number, gradient)
        bucket = self._plan.places[number].bucket
        self._missing[bucket] -= 1
        if not self._missing[bucket] and bucket != len(self._missing) - 1:  # the last bucket waits for the tail
            if self.pipeline is None:
                self._instruments.replica_ends(self.replica, 0, bucket)
            self.finished[bucket].set()

    def _end(self, values: Sequence[Told], turn: ReplicaTurn) -> None:
        """Take the gradients that have not left yet, and set the tail."""
        assert self._plan is not None
        assert self.contribution is not None
        gradients = [self.copy.parameters[number].grad for number in self._trained]
        if self._watch is not None and not self._leaves:
            for number, gradient in enumerate(gradients):
                self._watch.gradient(number, gradient)
        if self._options.scaling is not None and self._is_quantised:
            for gradient in gradients:
                if gradient is not None:
                    gradient.div_(turn.scale)
        if self._leaves:
            for number, gradient in enumerate(gradients):
                if not self._seen[number]:
                    self._take(number, gradient)
        else:
            self._take_all(gradients, turn)
        for number in self._trained:
            self.copy.parameters[number].grad = None
        own, notice, settings = self.contribution, turn.notice, turn.settings
        if isinstance(own, DeviceContribution):
            own.set_tail(
                values, notice, settings, self._seen, self.copy.changes(turn.masters, turn.moving), self.weight
            )
        else:
            changed = self.copy.changed(turn.masters, turn.moving)
            own.set_tail([float(value) for value in values], notice, settings, self._seen, changed)

    def _take_all(self, gradients: Sequence[torch.Tensor | None], turn: ReplicaTurn) -> None:
        assert self.contribution is not None
        self._seen = [gradient is not None for gradient in gradients]
        if isinstance(self.contribution, Contribution) and self._is_quantised:
            self.residuals = self.contribution.encode(gradients, turn.residuals, self.weight)
        else:
            self.contribution.take_all(gradients)

    @property
    def seen(self) -> list[bool]:
        """Whether each trained parameter had a gradient in the last step."""
        return list(self._seen)

    def is_finite(self, number: int) -> bool:
        """Return whether the gradient of a parameter is finite. Valid until the gradient is released."""
        assert self.contribution is not None
        return self.contribution.is_finite(number)


def _tell(run: weakref.ref[TorchReplicaRun], number: int, parameter: torch.Tensor) -> None:
    """Report a gradient, for autograd. A strong reference would make a cycle that the garbage collector cannot see."""
    if (found := run()) is not None:
        found._arrived(number, parameter)


def _divided(value: Told, count: int) -> Told:
    """Return a quotient in float64, with the host's bits on any device."""
    if not isinstance(value, torch.Tensor):
        return value / count
    divide([value], count)
    return value


def _mean_of(weights: Sequence[float | None]) -> float | None:
    """Return the mean weight of micro-batches, as the metrics are averaged; None without weights.

    Raises:
        StrategyError: If only some micro-batches have a weight.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        raise StrategyError(
            "the loss of some micro-batches has a weight, and that of others has none; give all of them weights, 1.0 "
            "for example"
        )
    return float(np.float32(sum(given) / len(given)))


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _number(name: str, value: Number) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"the metric {name!r} is {what}; metrics are scalars: return values of each row as outputs, "
            "(loss, metrics, outputs)"
        ) from error
