"""One update of a module: gradients of the local replicas, their means over all of them, the optimizer's step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import torch

from collectives import Communicator
from collectives.instruments import EXCHANGE, FORWARD_BACKWARD, UPDATE
from strategies.comparing.agreement import terms_of
from strategies.comparing.digest import host_arrays
from strategies.core.agreement import broadcast_text, insist_on_agreement
from strategies.core.digest import insist_on_same_bits, majority_of
from strategies.core.metrics import Metrics, StepNotice, metrics_of, tell_end
from strategies.core.step import StepWatcher
from strategies.core.survival import lost_with_an_instance, meet, surviving, warn_of_loss
from strategies.errors import NonFiniteGradientError, StrategyError
from strategies.gradients.leaving import not_made
from strategies.loss_scaling import LossScaling
from strategies.memory.plan import MemoryPlan
from strategies.pipelines.timetable import Timed
from strategies.replicas.gathering import gather_replicas
from strategies.replicas.replicas import Replicas
from strategies.step.jax_engine import rows_of
from strategies.torch.agreement import (
    StepSettings,
    lines_of_function,
    lines_of_module,
    lines_of_optimizer,
    settings_differ,
    settings_in_words,
)
from strategies.torch.gradient_exchange import GradientExchange, Parameter, Tail, TorchGradientPlan
from strategies.torch.local_replicas import LocalReplicas
from strategies.torch.memory import plan_memory
from strategies.torch.optimizer_arrays import numbers_of_groups
from strategies.torch.options import TorchOptions
from strategies.torch.plain_pass import Comparison, expected_of
from strategies.torch.replica_run import LossFunction, ReplicaTurn
from strategies.torch.tensors import as_array, dtype_of, parts_of, tensors_of
from strategies.torch.threads import intra_op_threads
from strategies.torch.training import TorchTraining
from strategies.torch.updates import refuse_groups
from strategies.typing import Batch, Tree


class TorchStep:
    """The engine of a training: it makes one step at a time on all instances that are left."""

    def __init__(
        self,
        replicas: Replicas,
        training: TorchTraining,
        loss_fn: LossFunction,
        options: TorchOptions,
        notice: StepNotice,
        recorder: StepWatcher,
    ) -> None:
        self._replicas = replicas
        self._training = training
        self._loss_fn = loss_fn
        self._options = options
        self._notice = notice
        self._recorder = recorder
        self._local: LocalReplicas | None = None
        self._communicator: Communicator | None = None  # for which they were made
        self._exchange: GradientExchange | None = None
        self._agreed: set[object] = set()  # the shapes of batches
        self._settings = StepSettings(training.parameters, training.optimizer)
        self._has_warned = False  # of what is lost with an instance
        self._first_step: int | None = None  # with these copies of the module

    def scale_losses(self, scale: float) -> None:
        """See `Trainer.scale_losses`; how the scale moves on stays what it was."""
        scaling = replace(self._options.scaling or LossScaling(factor=1.0), initial=scale)
        self._options = replace(self._options, loss_scaling=scaling)
        skipped = 0 if self._training.scale is None else self._training.scale.skipped
        self._training.scale = replace(scaling.start(), skipped=np.int32(skipped))

    # ---- together with the others

    def start(self) -> None:
        """Have all instances begin with the state of instance 0; a collective call."""
        if part := self._training.own_part:
            warn_of_loss(self._replicas, f"every instance has a part of the state that no other has ({part})")
            self._share(0)
            return

        def begin() -> bool:
            self._share(0)
            return True

        def catch_up() -> bool | None:
            meeting = meet(self._replicas)
            if not meeting.is_late:
                return None
            self._share(meeting.newest)
            return True

        surviving(self._replicas, begin, catch_up, lambda _, root: self._share(root))

    def make(self, batch: Batch) -> Metrics:
        """Make one update; see `Trainer.step`."""
        training, replicas = self._training, self._replicas
        given, local = batch, len(replicas.local_replicas)
        replicas.instruments.step_begins(training.step)
        if replicas.faults.take_flip():
            training.flip_bit()

        def catch_up() -> Metrics | None:
            nonlocal batch
            meeting = meet(replicas)
            if not meeting.is_late:
                batch = replicas.replicas_batch(batch)
                return None
            self._share(meeting.newest)
            return training.metrics

        if training.own_part:
            metrics = self._make(batch)
        else:
            metrics = surviving(replicas, lambda: self._make(batch), catch_up, lambda _, root: self._share(root))
        tell_end(replicas, partial(rows_of, given), local, metrics, training.step)
        return metrics

    def _share(self, root: int) -> None:
        """Take over the state, and the metrics, of instance `root`; a collective call."""
        training = self._training
        training.share(root)
        own = training.metrics
        text = json.dumps(None if own is None else [own.names, own.means.tolist(), self._notice.is_agreed])
        told = json.loads(broadcast_text(self._replicas.communicator, text, root, "the metrics of the last step"))
        if told is not None:
            training.metrics = Metrics(tuple(told[0]), np.array(told[1], np.float32))
            self._notice.agree(float(told[2]))

    def _compare(self) -> None:
        """Compare bits between instances, in steps where that is asked for; take over what most instances have."""
        every, training = self._options.digest_every, self._training
        if every and training.step and training.step % every == 0:
            root = majority_of(self._replicas, host_arrays(training.recorded()), training.step)
            if root is not None:
                training.share(root)
        elif self._options.compares_bits(self._made_with_these):
            insist_on_same_bits(self._replicas, host_arrays(training.tensors()), training.step)

    # ---- one step

    def _make(self, batch: Batch) -> Metrics:
        training = self._training
        self._compare()
        given, batch = batch, tensors_of(batch)
        local = self._prepared(given, batch)
        self._let_go()
        scale = 1.0 if training.scale is None else float(training.scale.scale)
        buffers = training.buffers
        watch = self._expected(batch, scale) if self._is_to_be_verified else None
        turn = ReplicaTurn(
            training.step,
            scale,
            self._notice.is_given,
            local.planned,
            (),
            buffers.moving,
            (),
            self._settings.word(training.step),
            watch,
        )
        instruments = self._replicas.instruments
        with instruments.during[FORWARD_BACKWARD]:
            local.begin(batch, turn, [buffers.masters_of(each) for each in local.replicas], training.residuals)
        for number, contributions in instruments.each(FORWARD_BACKWARD, local.collect(self._plan)):
            assert self._exchange is not None
            with instruments.during[EXCHANGE]:
                self._exchange.reduce(number, contributions)
        assert self._exchange is not None
        training.memory_of_replicas.refuse_gradients_of_originals()
        if self._is_to_be_verified:
            self._refuse_difference(watch)
        return self._finish(batch, local, self._exchange, scale)

    # ---- the first steps

    @property
    def _made_with_these(self) -> int:
        """The number of steps made with these copies, the same on all instances."""
        return 0 if self._first_step is None else self._training.step - self._first_step

    @property
    def _is_to_be_verified(self) -> bool:
        return self._made_with_these < self._options.verify_steps

    def _expected(self, batch: Batch, scale: float) -> Comparison | None:
        """Compute replica 0's results by plain PyTorch, on the instance that has it; None elsewhere."""
        local = self._replicas.local_replicas
        if local.start:
            return None
        training, part = self._training, parts_of(batch, len(local))[0]
        expected = expected_of(training.module, self._loss_fn, part, training.step, scale, self._options)
        return None if expected is None else Comparison(expected)

    def _refuse_difference(self, watch: Comparison | None) -> None:
        """Have all instances raise what the one with replica 0 has found; a collective call."""
        found = "" if watch is None else watch.difference
        if told := broadcast_text(self._replicas.communicator, found, 0, "the comparison with plain PyTorch"):
            raise StrategyError(f"in step {self._training.step} {told}")

    # ---- the end of a step

    def _let_go(self) -> None:
        """Give the gradients of the last step back, before there are others."""
        for parameter in self._training.parameters:
            parameter.grad = None
        if self._exchange is not None:
            self._exchange.let_go()

    def _finish(self, batch: Batch, local: LocalReplicas, exchange: GradientExchange, scale: float) -> Metrics:
        """Apply what the exchange has brought."""
        training, options = self._training, self._options
        tail = exchange.tail
        self._notice.agree(tail.notice)
        if settings_differ(*tail.settings):
            insist_on_agreement(self._replicas, [settings_in_words(training.module, training.optimizer)])
        self._refuse_gradients_of_some(exchange.plan, tail, local)
        values = self._new_buffers(tail.has_changed, local)
        means = exchange.means(1.0 if exchange.plan.quantised else scale)
        is_finite = self._is_finite(exchange.plan, means, local)
        local.give_back()
        if training.scale is not None:
            assert options.scaling is not None
            training.scale = options.scaling.after(training.scale, is_finite)
        if self._recorder.is_on:
            self._recorder.reduced(training.recorded(), batch, self._named(exchange.plan, means), exchange.plan.shards)
        if is_finite:
            self._update(means, tail)
            training.buffers.keep(values)
            local.share_frozen(training.buffers.written)
            if exchange.plan.quantised:
                training.residuals = [run.residuals for run in local.runs]
        training.step += 1
        training.replaced()
        training.metrics = metrics_of(exchange.names, tail.metrics, training.scale)
        if self._recorder.is_on:
            self._recorder.updated(training.recorded(), training.metrics)
        return training.metrics

    def _new_buffers(self, shares: np.ndarray, local: LocalReplicas) -> dict[int, torch.Tensor]:
        """Return the agreed values of buffers and frozen parameters, from the share of replicas that changed each."""
        if not shares.any():
            return {}
        slots = [run.copy.slots for run in local.runs]
        changed, resized = np.flatnonzero(shares).tolist(), np.flatnonzero(shares > 1).tolist()
        return self._training.buffers.agreed(changed, slots, self._replicas, resized)

    def _named(self, plan: TorchGradientPlan, means: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
        """Return the mean gradients by their names; of parameters that are not trained arrays without elements."""
        own = {one.name: as_array(mean) for one, mean in zip(plan.parameters, means, strict=True)}
        return {name: own.get(name, np.zeros(0, np.float32)) for name, _ in self._training.module.named_parameters()}

    def _update(self, means: Sequence[torch.Tensor], tail: Tail) -> None:
        training, options = self._training, self._options
        pairs = list(zip(training.trained, means, tail.has_gradient, strict=True))
        with self._replicas.instruments.during[UPDATE], intra_op_threads(options.intra_op_threads):
            for parameter, mean, has_gradient in pairs:
                is_whole = parameter.shape == mean.shape
                parameter.grad = mean if has_gradient and is_whole else None
            if options.before_update is not None:
                options.before_update(training.module)
                training.update.apply([(parameter, parameter.grad) for parameter in training.trained])
                return
            training.update.apply([(parameter, mean if has else None) for parameter, mean, has in pairs])

    def _refuse_gradients_of_some(self, plan: TorchGradientPlan, tail: Tail, local: LocalReplicas) -> None:
        """Refuse gradients that are None on some replicas only; a collective call where there are any."""
        some = np.flatnonzero((tail.has_gradient > 0) & (tail.has_gradient < 1))
        if not tail.has_gradient.any():
            raise StrategyError(
                "no parameter of the module has a gradient, so the step would train nothing; compute the loss with the "
                "module that loss_fn is given as its first argument"
            )
        if not some.size:
            return
        lacking = self._of_all_replicas([[not seen for seen in run.seen] for run in local.runs])
        number = int(some[0])
        replicas = np.flatnonzero(lacking[:, number]).tolist()
        raise StrategyError(
            f"{plan.parameters[number].name} has no gradient on the replicas {replicas}, and one on the others; let "
            "the loss of every replica depend on it, if only by 0 * parameter.sum()"
        )

    def _is_finite(self, plan: TorchGradientPlan, means: Sequence[torch.Tensor], local: LocalReplicas) -> bool:
        """Whether all mean gradients are, where somebody wants to know; a collective call where they are scattered.

        Raises:
            NonFiniteGradientError: with `check_numerics`.
        """
        if self._options.scaling is None and not self._options.check_numerics:
            return True
        flags = np.array([not bool(torch.isfinite(mean).all()) for mean in means])
        if plan.shards is not None:
            flags = self._replicas.communicator.all_reduce(flags.astype(np.uint8), "max", name="finite gradients") > 0
        if not flags.any() or not self._options.check_numerics:
            return not flags.any()
        own = [[not run.is_finite(number) for number in range(len(means))] for run in local.runs]
        number = int(np.flatnonzero(flags)[0])
        replicas = np.flatnonzero(self._of_all_replicas(own)[:, number]).tolist()
        raise NonFiniteGradientError(
            f"the gradient of {plan.parameters[number].name} is not finite at step {self._training.step} on the "
            f"replicas {replicas}; the step was not applied: lower the learning rate, clip the gradients, or look at "
            "the batches of these replicas"
        )

    def _of_all_replicas(self, rows: Sequence[Sequence[bool]]) -> np.ndarray:
        """A row for each replica of all instances; a collective call."""
        own = [np.array(row, bool) for row in rows]
        return np.stack(gather_replicas(self._replicas, own, "what replicas have found"))

    # ---- preparing

    def _prepared(self, given: Batch, batch: Batch) -> LocalReplicas:
        """Return the replicas that compute gradients; a collective call where batches of such shapes are new."""
        if self._local is not None:
            self._local.follow()
        is_for_these = self._local is not None and self._local.replicas == self._replicas.local_replicas
        if self._local is None or not is_for_these or not self._local.is_of_these or self._is_connected_anew:
            self._announce_what_is_trained()
            self.close()
            self._communicator = self._replicas.communicator
            self._exchange = None
            self._agreed.clear()
            self._first_step = self._training.step
            local, count = self._replicas.local_replicas, self._replicas.num_replicas_in_sync
            self._training.buffers.follow()
            refuse_groups(self._training.module, self._training.optimizer, self._options)
            self._local = LocalReplicas(
                local,
                self._training.memory_of_replicas,
                self._loss_fn,
                self._options,
                count,
                self._streams,
                self._replicas.instruments,
                self._communicator,
            )
        tensors = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, torch.Tensor)]
        key = tuple((leaf.dtype, leaf.shape) for leaf in tensors)
        if key not in self._agreed:
            self._agree(given, batch)
            self._agreed.add(key)
        return self._local

    def _announce_what_is_trained(self) -> None:
        """Name parameters that were frozen or thawed: instances that differ in them differ in this collective call."""
        if self._exchange is None or self._is_connected_anew:
            return
        named = dict(self._training.module.named_parameters())
        before = {parameter.name for parameter in self._exchange.plan.parameters}
        frozen = [name for name in named if name in before and not named[name].requires_grad]
        thawed = [name for name in named if name not in before and named[name].requires_grad]
        if frozen or thawed:
            changes = f"frozen: {', '.join(frozen) or 'none'}; trained anew: {', '.join(thawed) or 'none'}"
            self._replicas.communicator.barrier(name=changes)

    @property
    def _streams(self) -> bool:
        """Whether gradients travel while the backward pass runs."""
        streams = self._options.stream_gradients
        return self._replicas.streams_gradients if streams is None else streams

    @property
    def _is_connected_anew(self) -> bool:
        return self._communicator is not self._replicas.communicator

    @property
    def outputs(self) -> Sequence[Sequence[Tree]]:
        """The outputs of the last step, for each local replica and micro-batch."""
        return [] if self._local is None else [run.outputs for run in self._local.runs]

    @property
    def spans(self) -> dict[int, Sequence[Timed]]:
        """For each local replica when its simulated devices did what in the last step; empty without a pipeline."""
        runs = [] if self._local is None else self._local.runs
        return {run.replica: run.pipeline.spans for run in runs if run.pipeline is not None and run.pipeline.spans}

    def close(self) -> None:
        """End the threads of the replicas."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def planned(self, batch: Batch) -> MemoryPlan:
        """Return the memory of a step with such a batch, whose only metric is the loss; no collective call."""
        plan = self._gradient_plan(("loss",))
        buckets = plan.buckets(not_made)
        return plan_memory(self._replicas, self._training, plan, buckets, self._has_private_means, batch)

    def _plan(self, names: tuple[str, ...]) -> TorchGradientPlan:
        """Plan how gradients travel, and make the memory for the means; a collective call."""
        plan, count = self._gradient_plan(names), self._replicas.num_replicas_in_sync
        communicator = self._replicas.communicator
        self._exchange = GradientExchange(plan, names, communicator, count, self._has_private_means)
        return plan

    @property
    def _has_private_means(self) -> bool:
        """Whether something may write to the mean gradients."""
        is_plain = type(self._training.optimizer).__module__.startswith("torch.optim")
        return not is_plain or self._options.before_update is not None

    def _gradient_plan(self, names: tuple[str, ...]) -> TorchGradientPlan:
        training, options = self._training, self._options
        named = [(name, one) for name, one in training.module.named_parameters() if one.requires_grad]
        parameters = tuple(Parameter(name, tuple(one.shape), dtype_of(one)) for name, one in named)
        tail = Tail.size(len(names), len(parameters), len(training.buffers.slots))
        return TorchGradientPlan(parameters, options.transfer, self._streams, training.update.shards, tail)

    def _agree(self, given: Batch, batch: Batch) -> None:
        """Compare what decides the result with the other instances; a collective call."""
        training, replicas = self._training, self._replicas
        dataset = replicas.dataset_of(given)
        if replicas.communicator.size > 1 and not self._recorder.is_on:
            programs = {
                "the module": lines_of_module(training.module),
                "the loss function": lines_of_function(self._loss_fn),
                "the update": lines_of_optimizer(training.optimizer),
                "map_gradient": lines_of_function(self._options.map_gradient),
            }
            local = len(replicas.local_replicas)
            shapes = jax.tree.map(lambda leaf: _shape_for_one(leaf, local), batch)
            options = {**self._options.terms, "step": training.step}
            insist_on_agreement(
                replicas, terms_of(options, dataset, shapes, programs, numbers_of_groups(training.optimizer))
            )
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(replicas, lost_with_an_instance(False, dataset))


def _shape_for_one(leaf: object, local: int) -> object:
    """Return the shape and dtype that one local replica gets of a leaf; None if the leaf is no tensor."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return jax.ShapeDtypeStruct((len(leaf) // local, *leaf.shape[1:]), dtype_of(leaf))
