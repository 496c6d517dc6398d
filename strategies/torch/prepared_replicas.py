"""The local replicas of a module, made anew where they have changed, and how their gradients travel."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from collectives import Communicator
from strategies.comparing.agreement import terms_of
from strategies.core.agreement import insist_on_agreement
from strategies.core.survival import lost_with_an_instance, warn_of_loss
from strategies.exchange.flat import not_made
from strategies.memory.plan import MemoryPlan
from strategies.pipelines.timetable import Timed
from strategies.replicas.replicas import Replicas
from strategies.torch.agreement import StepSettings, lines_of_function, lines_of_module, lines_of_optimizer
from strategies.torch.gradient_exchange import GradientExchange, Parameter, Tail, TorchGradientPlan
from strategies.torch.local_replicas import LocalReplicas
from strategies.torch.memory import plan_memory
from strategies.torch.optimizer_arrays import numbers_of_groups
from strategies.torch.options import TorchOptions
from strategies.torch.replica_run import LossFunction
from strategies.torch.tensors import dtype_of
from strategies.torch.training import TorchTraining
from strategies.torch.updates import refuse_groups
from strategies.typing import Batch, Tree


class PreparedReplicas:
    """The local replicas that compute gradients, and their exchange with the others.

    Args:
        replicas: where the replicas are.
        training: see `TorchTraining`.
        loss_fn: see `Trainer`.
        options: of the step.
        is_recorded: whether every step is recorded, which lets instances differ.

    Attributes:
        training: see above.
        settings: what the program may change between steps.
    """

    def __init__(
        self,
        replicas: Replicas,
        training: TorchTraining,
        loss_fn: LossFunction,
        options: TorchOptions,
        is_recorded: bool,
    ) -> None:
        self.training = training
        self.settings = StepSettings(training.parameters, training.optimizer)
        self._replicas = replicas
        self._loss_fn = loss_fn
        self.options = options
        self._is_recorded = is_recorded
        self._local: LocalReplicas | None = None
        self._communicator: Communicator | None = None  # for which they were made
        self._exchange: GradientExchange | None = None
        self._has_warned = False  # of what is lost with an instance
        self._first_step: int | None = None  # with these copies of the module

    @property
    def steps_made(self) -> int:
        """The number of steps made with these copies of the module, the same on all instances."""
        return 0 if self._first_step is None else self.training.step - self._first_step

    @property
    def exchange(self) -> GradientExchange:
        """The exchange, once the first bucket of a step is ready."""
        assert self._exchange is not None
        return self._exchange

    def let_go(self) -> None:
        """Give the gradients of the last step back, before there are others."""
        for parameter in self.training.parameters:
            parameter.grad = None
        if self._exchange is not None:
            self._exchange.let_go()

    def local_for(self, given: Batch, batch: Batch) -> LocalReplicas:
        """Return the replicas that compute gradients; a collective call where batches of such shapes are new."""
        if self._local is not None:
            self._local.follow()
        if self._local is None or not self._local.fits(self._replicas):
            training = self.training
            self._announce_what_is_trained()
            self.close()
            self._communicator, self._exchange = self._replicas.communicator, None
            self._first_step = training.step
            training.buffers.follow()
            refuse_groups(training.module, training.optimizer, self.options)
            memory = training.memory_of_replicas
            self._local = LocalReplicas(
                self._replicas, memory, self._loss_fn, self.options, self.options.streams_over(self._replicas)
            )
        tensors = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, torch.Tensor)]
        key = tuple((leaf.dtype, leaf.shape) for leaf in tensors)
        if key not in self._local.agreed:
            self._agree(given, batch)
            self._local.agreed.add(key)
        return self._local

    def _announce_what_is_trained(self) -> None:
        """Name parameters that were frozen or thawed: instances that differ in them differ in this collective call."""
        if self._exchange is None or self._is_connected_anew:
            return
        named = dict(self.training.module.named_parameters())
        before = {parameter.name for parameter in self._exchange.plan.parameters}
        frozen = [name for name in named if name in before and not named[name].requires_grad]
        thawed = [name for name in named if name not in before and named[name].requires_grad]
        if frozen or thawed:
            changes = f"frozen: {', '.join(frozen) or 'none'}; trained anew: {', '.join(thawed) or 'none'}"
            self._replicas.communicator.barrier(name=changes)

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
        return plan_memory(self._replicas, self.training, plan, buckets, self._has_private_means, batch)

    def make_exchange(self, names: tuple[str, ...]) -> TorchGradientPlan:
        """Plan how gradients travel, and make the memory for their means; a collective call.

        Args:
            names: of the metrics.
        """
        plan, count = self._gradient_plan(names), self._replicas.num_replicas_in_sync
        communicator = self._replicas.communicator
        self._exchange = GradientExchange(plan, names, communicator, count, self._has_private_means)
        return plan

    @property
    def _has_private_means(self) -> bool:
        """Whether something may write to the mean gradients."""
        is_plain = type(self.training.optimizer).__module__.startswith("torch.optim")
        return not is_plain or self.options.before_update is not None

    def _gradient_plan(self, names: tuple[str, ...]) -> TorchGradientPlan:
        training, options = self.training, self.options
        named = training.module.named_parameters()
        parameters = tuple(Parameter.of(name, one) for name, one in named if one.requires_grad)
        tail = Tail.size(len(names), len(parameters), len(training.buffers.slots))
        return TorchGradientPlan(
            parameters, options.transfer, self.options.streams_over(self._replicas), training.update.shards, tail
        )

    def _agree(self, given: Batch, batch: Batch) -> None:
        """Compare what decides the result with the other instances; a collective call."""
        training, replicas = self.training, self._replicas
        dataset = replicas.dataset_of(given)
        if replicas.communicator.size > 1 and not self._is_recorded:
            programs = {
                "the module": lines_of_module(training.module),
                "the loss function": lines_of_function(self._loss_fn),
                "the update": lines_of_optimizer(training.optimizer),
                "map_gradient": lines_of_function(self.options.map_gradient),
            }
            local = len(replicas.local_replicas)
            shapes = jax.tree.map(lambda leaf: _shape_for_one(leaf, local), batch)
            options = {**self.options.terms, "step": training.step}
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
