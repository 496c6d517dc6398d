"""The engine for PyTorch: replicas that take turns, and one optimizer step per instance."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from typing_extensions import override

import strategies.trees as trees
from strategies.core.agreement import gather_arrays, insist_on_agreement, replicas_where
from strategies.core.engine import Buffers, Engine, EvaluationTask, ExchangeResult, PendingBatch
from strategies.core.metrics import Layers
from strategies.core.options import ERROR, is_weighted
from strategies.core.survival import lost_with_an_instance, warn_of_loss
from strategies.data.sources import Masked
from strategies.errors import NonFiniteGradientError, SpareError, StrategyError
from strategies.exchange.choice import DevicePath
from strategies.exchange.flat import not_made, private_memory
from strategies.exchange.means import Bucket
from strategies.jax.comparing.agreement import digest_of_programs, host_arrays, terms_of
from strategies.jax.memory.plan import DEVICE, MemoryBlock, MemoryPlan, data_blocks, mean_blocks
from strategies.jax.memory.plan import HOST as IN_HOST
from strategies.jax.replicas.replicas import Replicas
from strategies.loss_scaling import LossScale, LossScaling
from strategies.pipelines.timetable import Timed
from strategies.placeholders import fill, placeholders_like
from strategies.torch.agreement import (
    SETTINGS_CHANGED,
    StepSettings,
    compare_tensors,
    lines_of_function,
    lines_of_module,
    lines_of_optimizer,
    lines_of_tensors,
    members_of_groups,
    settings_differ,
    settings_in_words,
)
from strategies.torch.data import CollatedBatch, shape_of_rows, tensors_of
from strategies.torch.exchange.gradients import GradientExchange
from strategies.torch.exchange.paths import path_for
from strategies.torch.exchange.plan import Parameter, Tail, TorchGradientPlan, check_gradients_on_all
from strategies.torch.options import TorchOptions, are_weighted, check_weights_supported
from strategies.torch.replicas.evaluation import TorchRows
from strategies.torch.replicas.guard import check_repetition, is_due
from strategies.torch.replicas.module_parts import HiddenValues
from strategies.torch.replicas.passes import LossFunction, ReplicaResults
from strategies.torch.replicas.steps import LocalReplicas, StepInputs
from strategies.torch.replicas.turns import TurnsOfStep
from strategies.torch.tensors import complex_view, host_array, intra_op_threads
from strategies.torch.training import TorchTraining
from strategies.torch.updates import STATE, check_groups_supported, layers_of, learning_rates_of, numbers_of_groups
from strategies.typing import Batch, Tree
from strategies.values import TrainState


@dataclass
class TorchPending:
    """A PyTorch step that has begun, a `PendingStep`.

    Attributes:
        local: The replicas that compute.
        inputs: The inputs of the step.
        buckets: Each bucket of gradients, as soon as it is ready.
        means: The mean gradients; None for a parameter without one.
        values: The agreed values of buffers and frozen parameters, by their numbers.
        moving: The numbers of the buffers and frozen parameters that are known to change in steps.
        is_applied: Whether the step may be applied: gradients are finite, and losses have weight.
    """

    local: LocalReplicas
    inputs: StepInputs
    buckets: Iterator[tuple[Bucket, Buffers]]
    means: Sequence[torch.Tensor | None] = ()
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    moving: frozenset[int] = frozenset()
    is_applied: bool = True

    @property
    def exchange(self) -> GradientExchange:
        """The exchange of the gradients, known when the first bucket is ready."""
        assert self.local.exchange is not None
        return self.local.exchange


@final
class TorchEngine(Engine[TorchTraining, TorchPending]):
    """An engine that computes steps with PyTorch modules and changes them in place.

    Args:
        replicas: The replicas of all instances.
        training: The module, its optimizer, and their progress.
        loss_fn: The loss function of `Trainer`.
        options: The options of the step.
        is_recorded: Whether every step is recorded. Then instances may differ, so they are not compared.
    """

    def __init__(
        self,
        replicas: Replicas,
        training: TorchTraining,
        loss_fn: LossFunction,
        options: TorchOptions,
        is_recorded: bool,
    ) -> None:
        self._replicas = replicas
        self._training = training
        self._loss_fn = loss_fn
        self._options = options
        self._is_recorded = is_recorded
        self._settings = StepSettings(training.optimizer)
        self._rows = TorchRows(replicas, options.seed, is_recorded)
        self._local: LocalReplicas | None = None
        self._close_path: Callable[[], object] = lambda: None
        self._first_step: int | None = None  # the first step with these replicas and these parts of the module
        self._has_warned = False  # whether it has warned that a lost instance ends the job
        self._hidden_values = HiddenValues(training.module, training.optimizer)
        self._shapes: TrainState | None = None  # a snapshot whose shapes those of a spare have
        self._snapshot: TrainState | None = None  # the last one of a spare
        self._agreed: dict[str, str] = {}  # what an instance that joins has to agree with

    def close(self) -> None:
        """End the threads of the replicas. A later step or evaluation starts new ones."""
        self._training.attributes.show()
        self._close_local()
        self._close_path()

    def _close_local(self) -> None:
        if self._local is not None:
            self._local.close()
            self._local = None

    def scale_losses(self, training: TorchTraining, scale: float) -> LossScaling:
        """Set the scale of later losses, and return the new scaling. The scale's growth and backoff rules stay."""
        scaling = replace(self._options.scaling or LossScaling(factor=1.0), initial=scale)
        self._options = replace(self._options, loss_scaling=scaling)
        skipped = 0 if training.loss_scale is None else training.loss_scale.skipped
        training.loss_scale = replace(scaling.start(), skipped=np.int32(skipped))
        self._close_local()  # the replicas map gradients by the options
        return scaling

    @property
    def outputs(self) -> Sequence[Sequence[Tree]]:
        """The outputs of the last step, by local replica and micro-batch."""
        if self._hidden_values.is_hidden:
            self._hidden_values.wait_for_values()
            raise SpareError("this instance was a spare in the last step, so it has no outputs of it; use metrics")
        fetched = self._training.memory_of_replicas.fetched
        return [] if self._local is None else [fetched(list(one.outputs)) for one in self._local.results]

    @property
    def spans(self) -> dict[int, Sequence[Timed]]:
        """The timed actions of the simulated devices in the last step, by local replica; empty without a pipeline."""
        return {} if self._local is None or self._local.pipeline is None else self._local.pipeline.spans

    # ---- the replicas

    @property
    def _steps_made(self) -> int:
        """The number of steps made with these replicas, the same on all instances."""
        return 0 if self._first_step is None else self._training.step - self._first_step

    def _local_for(self, given: Batch, batch: Batch) -> LocalReplicas:
        """Return the replicas that compute gradients. Collective if batches of these shapes are new."""
        self._replicas.sharding.check_batch(given)
        if (training := self._training).follow():
            self._close_local()
        if (local := self._local) is None or not local.fits(self._replicas):
            if local is not None:
                self._announce_what_is_trained(local)
                local.turns.undo(training.step)
            self._close_local()
            self._first_step = training.step
            training.buffers.follow()
            check_groups_supported(training.module, training.optimizer)
            path = self._new_path()
            count = 0 if path is None else path.spread.size
            local = LocalReplicas(self._replicas, training, self._loss_fn, self._options, count)
            self._local = local
        key = tuple(
            (leaf.dtype, leaf.shape if isinstance(leaf, torch.Tensor) else None)  # parts have any shapes
            for leaf in trees.leaves(batch)
            if isinstance(leaf, torch.Tensor | CollatedBatch)
        )
        if key not in local.agreed:
            self._agree(given, batch)
            local.agreed.add(key)
        return local

    def _new_path(self) -> DevicePath | None:
        """Return the path of gradients among the present instances; None if the host exchanges them."""
        self._close_path()
        path = self._training.update.path = path_for(self._replicas, self._training.memory_of_replicas)
        if path is not None:
            # Windows are as large as all gradients: free them with the Trainer, even if it is not closed.
            closing = weakref.finalize(self, path.close)
            closing.atexit = False
            self._close_path = closing
        return path

    def _announce_what_is_trained(self, local: LocalReplicas) -> None:
        """Name newly frozen or thawed parameters in a collective call. If instances differ, the call raises."""
        if local.exchange is None or local.communicator is not self._replicas.communicator:
            return
        named = dict(self._training.module.named_parameters())
        before = {parameter.name for parameter in local.exchange.plan.parameters}
        frozen = [name for name in named if name in before and not named[name].requires_grad]
        thawed = [name for name in named if name not in before and named[name].requires_grad]
        if frozen or thawed:
            changes = f"frozen: {', '.join(frozen) or 'none'}; trained anew: {', '.join(thawed) or 'none'}"
            self._replicas.communicator.barrier(name=changes)

    def _agree(self, given: Batch, batch: Batch) -> None:
        """Compare everything that decides the result with the other instances. Collective."""
        training, replicas = self._training, self._replicas
        dataset = replicas.dataset_of(given)
        if (replicas.communicator.size > 1 or replicas.journal.is_kept) and not self._is_recorded:
            programs = {
                "the module": lines_of_module(training.module, training.attributes.of_all(replicas.communicator)),
                "the loss function": lines_of_function(self._loss_fn),
                "the update": lines_of_optimizer(training.optimizer),
                "map_gradient": lines_of_function(self._options.map_gradient),
                **members_of_groups(training.module, training.optimizer, training.update.wholes),
            }
            local = len(replicas.local_replicas)
            shapes = trees.map(lambda leaf: shape_of_rows(leaf, local), batch)
            options = {**self._options.terms, "step": training.step}
            terms = terms_of(options, dataset, shapes, programs, numbers_of_groups(training.optimizer))
            insist_on_agreement(replicas, terms)
            if replicas.journal.is_kept:
                # A spare knows the first ones only, from its rehearsal.
                self._agreed = digest_of_programs(self._options.terms, shapes, programs) | self._agreed
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(replicas, lost_with_an_instance(False, dataset))

    def planned(self, batch: Batch) -> MemoryPlan:
        """Return the memory plan of a step with this batch and the loss as the only metric. Not collective."""
        plan, replicas, training = self._gradient_plan(1), self._replicas, self._training
        memory, path = training.memory_of_replicas, training.update.path
        local, state = len(replicas.local_replicas), training.state()
        if path is None and replicas.num_instances == 1:  # several instances choose the path in the first step
            path = path_for(replicas, memory)
        size = sum(each.size * each.dtype.itemsize for layout in plan.layouts for each in layout.buffers)
        where, buckets = IN_HOST if memory.is_on_host else DEVICE, []
        gradients = MemoryBlock("gradients", local.bit_length() * size, where, f"sums of {local} replicas")
        if path is None:
            gradients = MemoryBlock("gradients", local * size, IN_HOST, f"of {local} replicas, as they travel")
            buckets = plan.buckets(not_made, self._writes_over)
        held = [
            MemoryBlock("variables", _nbytes(state.variables), where, "once for all local replicas"),
            MemoryBlock("optimizer state", _nbytes(state.optimizer_state[STATE]), where, "after the first step"),
            MemoryBlock("model state", _nbytes(state.model_state), where),
            MemoryBlock("buffers at the beginning", _nbytes(state.model_state), where, "put back before each replica"),
            gradients,
            *mean_blocks(replicas, buckets, is_private=memory.is_on_host),
            *data_blocks(replicas, batch, _nbytes(tensors_of(batch)), IN_HOST),
        ]
        return MemoryPlan(replicas.instance.index, local, [each for each in held if each.nbytes])

    def _make_exchange(self, names: tuple[str, ...]) -> GradientExchange:
        """Plan how gradients travel, and allocate the memory of their means. Collective."""
        if are_weighted(names):
            check_weights_supported(self._training.module, self._options)
        plan, memory = self._gradient_plan(len(names)), self._training.memory_of_replicas
        communicator, checks = self._replicas.communicator, self._options.check_numerics
        assert self._local is not None
        rows = [one.of_trained for one in self._local.rows]
        insist_on_agreement(self._replicas, [{"metrics": ", ".join(names)}])
        path = self._training.update.path
        # `grad` refers to means on the host, and programs write to it; a device gets copies.
        on_host = private_memory if memory.is_on_host else communicator.allocate
        allocate, over = on_host if path is None else not_made, self._writes_over
        return GradientExchange(plan, names, self._replicas, memory, rows, path, allocate, over, checks)

    def _gradient_plan(self, metrics: int) -> TorchGradientPlan:
        """Return the plan of the gradients, given the number of metrics, and of the weight if there is one."""
        training, options = self._training, self._options
        named = training.module.named_parameters()
        parameters = tuple(Parameter.of(name, one) for name, one in named if one.requires_grad)
        tail = Tail.size(metrics, len(parameters), len(training.buffers.slots))
        if (path := training.update.path) is not None:
            tail = metrics if path.spread.size == 1 else tail
            return TorchGradientPlan(parameters, options.transfer, tail=tail)
        streams = options.streams_over(self._replicas)
        return TorchGradientPlan(parameters, options.transfer, streams, training.update.shards, tail)

    @property
    def _writes_over(self) -> bool:
        """Whether means of large gradients are written over them.

        A check of gradients, and a GPU, needs both. The backward pass may still read a gradient that leaves during it.
        """
        needs_both = self._options.check_numerics or self._options.streams_over(self._replicas)
        return not needs_both and self._training.memory_of_replicas.gpu is None

    # ---- one step

    @override
    def begin(self, state: TorchTraining, batch: Batch, notice: bool) -> TorchPending:
        """Begin a step. After steps 1, 2, 4, 8 and so on instances compare bits."""
        if (made := self._steps_made) and is_due(made):
            compare_tensors(
                self._replicas, [*state.module.named_parameters(), *state.buffers.named().items()], state.step
            )
        tensors = tensors_of(batch)
        local = self._local_for(batch, tensors)
        if local.exchange is not None:
            local.exchange.let_go()
        scale = 1.0 if state.loss_scale is None else float(state.loss_scale.scale)
        settings = self._settings.settings_hash(state.step, state.parameters)
        turns = TurnsOfStep(state.step, self._steps_made + 1, local.replicas, state.memory_of_replicas.device)
        inputs = StepInputs(turns, scale, notice, settings)
        return TorchPending(local, inputs, local.collect(tensors, inputs, self._make_exchange))

    @override
    def finish_exchange(self, pending: TorchPending) -> ExchangeResult:
        training, exchange, local = self._training, pending.exchange, pending.local
        if local.turns.repeats_in(pending.inputs.turns):
            settings = self._settings.settings_hash(pending.inputs.turns.step, training.parameters)
            found = local.turns.guard.found or (SETTINGS_CHANGED if settings != pending.inputs.settings else "")
            check_repetition(self._replicas, found, training.step)
        plan, results = exchange.plan, local.results
        checks = training.loss_scale is not None or self._options.check_numerics
        weight = exchange.weight
        has_weight = weight is None or self._is_weighted(weight, results)
        means = exchange.means(pending.inputs.scale, weight or 1.0)
        tail, are_bad = exchange.tail_and_flags(means, checks)
        means = training.memory_of_replicas.put_means(means)
        if settings_differ(*tail.settings):
            words = settings_in_words(training.module, training.optimizer, training.update.wholes)
            insist_on_agreement(self._replicas, words)
        if not tail.has_gradient.any():
            raise StrategyError(
                "no parameter of the module has a gradient, so the step would train nothing; compute the loss with the "
                "module that loss_fn gets as its first argument"
            )
        if self._options.missing_gradients == ERROR:
            check_gradients_on_all(
                plan, tail.has_gradient, lambda number: [one.seen[number] for one in results], self._replicas
            )
        slots = [one.slots for one in results]
        if exchange.is_of_one:
            read = None if self._steps_made else training.memory_of_replicas.read
            changes = [one.changes for one in results]
            pending.values, pending.moving = training.buffers.agreed_here(changes, slots, self._replicas, read)
        else:
            pending.values = training.buffers.agreed(tail.has_changed, slots, self._replicas)
            pending.moving = frozenset(pending.values)
        pending.means = [mean if has else None for mean, has in zip(means, tail.has_gradient, strict=True)]
        is_finite = are_bad is None or self._are_finite(plan, are_bad, local)
        pending.is_applied = has_weight and is_finite
        exchange.give_back()

        def gradients() -> tuple[Tree, Tree]:
            return self._named(plan, means), plan.shards

        names = exchange.names if tail.weight is None else exchange.names[:-1]
        return ExchangeResult(names, tail.metrics, tail.notice, is_finite, gradients, has_weight)

    def _is_weighted(self, weight: float, results: Sequence[ReplicaResults]) -> bool:
        """Return whether any loss has a weight above 0, given the mean weight.

        Raises:
            WeightError: On all instances, if weights have no mean.
        """

        def of_replicas() -> list[float]:
            local = [[np.array(one.weight or 0.0)] for one in results]
            return [float(one) for [one] in gather_arrays(self._replicas, local, "weights of the replicas")]

        return is_weighted(weight, self._training.step, self._options.zero_weight, of_replicas)

    @override
    def update(self, pending: TorchPending, scale: LossScale | None) -> TorchTraining:
        training = self._training
        training.loss_scale = scale
        if pending.is_applied:
            self._apply(pending.means)
            training.buffers.keep(pending.values, pending.moving)
        pending.local.turns.applied()
        training.step += 1
        training.replaced()
        return training

    def _apply(self, means: Sequence[torch.Tensor | None]) -> None:
        training, options = self._training, self._options
        pairs = list(zip(training.trained, means, strict=True))
        with intra_op_threads(options.intra_op_threads):
            are_whole = training.update.shards is None
            pairs = [(one, complex_view(mean) if one.is_complex() else mean) for one, mean in pairs]
            for parameter, mean in pairs:
                is_whole = are_whole or (mean is not None and mean.shape == parameter.shape)
                parameter.grad = mean if is_whole else None
            if options.before_update is not None:
                options.before_update(training.module)
                pairs = [(parameter, parameter.grad) for parameter in training.trained]
            training.update.apply(pairs)

    def _named(self, plan: TorchGradientPlan, means: Sequence[torch.Tensor | None]) -> dict[str, np.ndarray]:
        """Return the mean gradients by name, with arrays without elements for parameters that are not trained."""
        pairs = zip(plan.parameters, means, strict=True)
        own = {one.name: np.zeros(one.shape, one.dtype) if mean is None else host_array(mean) for one, mean in pairs}
        return {name: own.get(name, np.zeros(0, np.float32)) for name, _ in self._training.module.named_parameters()}

    def _are_finite(self, plan: TorchGradientPlan, flags: np.ndarray, local: LocalReplicas) -> bool:
        """Return whether all mean gradients are finite. Collective if the means are sharded.

        Args:
            plan: The plan of the gradients.
            flags: For each gradient, whether it is not finite.
            local: The replicas that have computed.

        Raises:
            NonFiniteGradientError: If a gradient is not finite, with `check_numerics`.
        """
        if plan.shards is not None:
            flags = self._replicas.communicator.all_reduce(flags.astype(np.uint8), "max", name="finite gradients") > 0
        if not flags.any() or not self._options.check_numerics:
            return not flags.any()
        number = int(np.flatnonzero(flags)[0])
        exchange, places = local.exchange, range(len(local.replicas))
        assert exchange is not None
        are_bad = [not exchange.is_finite(place, number) for place in places]
        replicas = replicas_where(self._replicas, are_bad, "who has a gradient that is not finite")
        raise NonFiniteGradientError(
            f"the gradient of {plan.parameters[number].name} is not finite at step {self._training.step} on the "
            f"replicas {replicas}; the step was not applied: lower the learning rate, clip the gradients, or inspect "
            "the batches of these replicas"
        )

    # ---- without training

    @override
    def begin_task(self, task: EvaluationTask, state: TorchTraining, batch: Masked) -> PendingBatch:
        return self._rows.begin_task(task, state, batch)

    # ---- the state

    @override
    def share(self, state: TorchTraining, root: int) -> TorchTraining:
        """Give all instances the state of rank `root`, except hyperparameters, which stay as they are."""
        state.share(root)
        return state

    @override
    def digest(self, state: TorchTraining) -> dict[str, np.ndarray]:
        return host_arrays(state.recorded())

    # ---- for sinks of metrics

    @override
    def layers(self, state: TorchTraining, pending: TorchPending, result: ExchangeResult) -> Layers:
        plan = pending.exchange.plan
        names = [parameter.name for parameter in plan.parameters]
        return layers_of([*zip(names, state.trained, strict=True)], pending.means, self._replicas, plan.shards)

    @override
    def learning_rates(self, state: TorchTraining, steps: int) -> Callable[[int], Mapping[str, float]] | None:
        rates = learning_rates_of(state.optimizer)
        return lambda later: rates

    # ---- spares

    @override
    def placeholder_state(self, state: TorchTraining, step: int, wait: Callable[[], None]) -> TorchTraining:
        """Hide the values of the module and of its optimizer, and count the step; return the same state."""
        if not self._hidden_values.is_hidden:
            self.close()
            if self._first_step is not None:  # this instance was active
                self._hidden_values.forget()
            self._hidden_values.hide(wait)
        state.step = step
        state.replaced()
        return state

    @override
    def fill(self, state: TorchTraining, values: TorchTraining) -> None:
        """Give the snapshot that a spare has taken last the values of the module and of its optimizer."""
        if self._snapshot is not None and self._snapshot.step == values.step:
            fill(self._snapshot, values.state())
        self._snapshot = None

    @override
    def hand_over(self, state: TorchTraining, root: int, joins: bool) -> TorchTraining:
        if self._local is not None:
            self._local.turns.undo(state.step)
        first = np.array(-1 if self._first_step is None else self._first_step)
        self._replicas.communicator.broadcast(first, root, name="first step with these replicas")
        if joins:
            self._hidden_values.show()
            self._first_step = None if first < 0 else int(first)
        state.hand_over(root, joins)
        return state

    @override
    def rehearse(self, state: TorchTraining, batch: Batch) -> None:
        """Compute the gradients of a step, without an update. Then forget the values that the spare began with."""
        state.attributes.follow()
        attributes = state.attributes.view()
        with self._hidden_values.shown():
            try:
                for _ in self.begin(state, batch, False).buckets:
                    pass
            finally:
                state.attributes.put(attributes)
                self.close()
                self._first_step = None
                self._hidden_values.forget()

    @property
    @override
    def facts(self) -> Mapping[str, object]:
        lines = "\n".join(lines_of_tensors(self._training.module))
        return self._agreed | {"digest of the module's shapes": hashlib.sha256(lines.encode()).hexdigest()}

    # ---- checkpoints

    @override
    def snapshot(self, state: TorchTraining) -> TrainState:
        """Return the state as arrays that are views of the tensors' memory; on a spare as placeholders."""
        if not self._hidden_values.is_hidden:
            return state.state()
        if self._shapes is None:
            with self._hidden_values.shown():
                self._shapes = state.state()
        self._snapshot = replace(placeholders_like(self._shapes, self._hidden_values.wait), step=state.step)
        return self._snapshot

    @override
    def restore(self, snapshot: TrainState) -> TorchTraining:
        """Copy the arrays of a snapshot into the module and its optimizer, and return their training."""
        training = self._training
        if self._hidden_values.is_hidden:
            training.step = snapshot.step
        else:
            training.load(snapshot)
            self._first_step = None if self._first_step is None else training.step
        return training


def flipped(state: TorchTraining) -> TorchTraining:
    """Flip a bit in the middle of the first parameter's first number, to inject a fault; return the same state."""
    octets = state.parameters[0].detach().view(-1)[:1].view(torch.uint8)
    octets[len(octets) // 2] ^= 1
    return state


def _nbytes(tree: object) -> int:
    return sum(int(leaf.nbytes) for leaf in trees.leaves(tree) if hasattr(leaf, "nbytes"))
