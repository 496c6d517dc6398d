"""Averaging of one module's gradients over all instances at the end of each backward pass of autograd."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strategies.core.agreement import broadcast_bytes, insist_on_agreement, replicas_where
from strategies.core.journal import Recorded
from strategies.core.metrics import layer_statistics, report_layer_statistics
from strategies.core.options import ERROR, SKIP, is_weighted, weighted_means
from strategies.core.survival import collectively, warn_of_loss
from strategies.errors import SpareError, StrategyError, ZeroWeightError
from strategies.jax.comparing.agreement import digest_of
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.agreement import (
    broadcast_order,
    compare_tensors,
    hash_at_step,
    order_of,
    put_in_order,
    settings_differ,
)
from strategies.torch.distributed_model.passes import (
    GradientHooks,
    LossWeight,
    MeanPassResult,
    ModelPass,
    Named,
    PassCounters,
    PassResult,
    WrittenBuffers,
    call_if_there,
    has_gradient,
    is_returned,
    passes_over,
)
from strategies.torch.exchange.gradients import GradientExchange, raise_gradient_came_twice
from strategies.torch.exchange.paths import path_of_loops
from strategies.torch.exchange.plan import Parameter, Tail, TailValues, TorchGradientPlan, check_gradients_on_all
from strategies.torch.options import (
    TorchOptions,
    check_weight_with_sync_layers,
    check_weights_supported,
    weighted_loss,
    weighted_value,
)
from strategies.torch.replicas.attributes import pack_tree, unpack_tree
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.generators import has_baton
from strategies.torch.replicas.gradient_map import GradientMap, GroupRow
from strategies.torch.replicas.guard import is_due
from strategies.torch.replicas.module_parts import ModuleWatch, Slot
from strategies.torch.replicas.sync_batch_norm import SyncLayers, sync_layers_of
from strategies.torch.tensors import ReplicaMemory, divide, host_array, real_views, tensors_in
from strategies.torch.training import check_module, receive_tensors
from strategies.torch.updates import layers_of_loop, parameters_of
from strategies.typing import Tree

Closure = Callable[[], torch.Tensor | float]
"""A function given to an optimizer's `step`, which computes loss and gradients anew."""

_GRAD, _CALL = "torch.autograd.grad", "torch.func.functional_call"  # functions that a warning is about
_MOST = 3  # parameters named in that warning


NAMES = ("active", "changed", "loss", "weight", "weighted")
"""The numbers that travel with gradients: whether the replica is still in its loop, whether it needs a new plan, its
loss if it is known, the weight of its losses, and whether they have weights."""


class GradientAveraging:
    """The averaging of a module's gradients in backward passes.

    A backward pass of autograd is that of one replica, so the instance must drive one. `average` takes the gradients of
    several local replicas, which were computed one after another.

    `start` compares the instances and plans the exchange, before any gradient is exchanged. For a copy of a model, the
    first backward pass does this.

    Attributes:
        module: The module.
        replicas: The replicas of all instances.
        loop: The state of the loop.
        watch: The watch over the module, whose parts the program may change between two steps.
        buffers: The buffers on which replicas agree.
        changes: The changes of these buffers, and of frozen parameters.
        named: The parameters of the plan, with their names.
        numbers: The places in the plan, by the ids of parameters.
        slots: The buffers and frozen parameters of the plan.
        exchange: The exchange of the gradients; None if the next backward pass plans it.
        is_behind: Whether the module has changed, so that a new plan is needed.
        leaves_early: Whether gradients are exchanged while backward passes run.
        is_alone: Whether there is one replica, whose gradients are the means.
        layers: The layers that wait for other replicas.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas, options: TorchOptions) -> None:
        self.module, self.replicas, self._options = module, replicas, options
        self.watch = ModuleWatch(module)
        first, count = replicas.local_replicas.start, replicas.num_replicas_in_sync
        self.loop = PassCounters(options.seed, first, replicas.instruments.step_begins, self.watch)
        self.is_alone = count == 1
        self.buffers = ModelBuffers(module, options.model_state_aggregation, count, first)
        self.changes = WrittenBuffers(self.buffers, self.watch)
        self.named: Named = ()
        self.numbers: dict[int, int] = {}
        self.slots: Sequence[Slot] = ()
        self.exchange: GradientExchange | None = None
        self.is_behind = self.leaves_early = False
        self._known: Set[int] = frozenset()  # ids of the parameters of the last plan, which passes may write since
        self._writes_before = 0  # the number of writes to parameters when instances last had the same bits
        self._meet_the_others()
        self._hooks = GradientHooks(self.gradient_is_complete)
        self._hooks.follow(self.watch.named)
        self._pass: ModelPass | None = None
        self._ended: PassResult | None = None  # the results of the pass, when it has ended
        self._has_warned = False  # whether it has warned that a lost instance ends the job
        self._warned: set[str] = set()  # functions of PyTorch about which it has warned
        self._last_weight: float | None = None  # of the losses of the last `loss.backward()`
        before_step = partial(call_if_there, weakref.WeakMethod(self.before_step))
        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def _meet_the_others(self) -> None:
        self._communicator = self.replicas.communicator
        self.layers = SyncLayers(self.module, self.replicas, True, self._options.streams_over(self.replicas))
        self.passes = passes_over(self._communicator)
        self.passes.members.add(self.loop.weights)

    @cached_property
    def number(self) -> int:
        """The number of the model among those that share a communicator, in the order of their first plans."""
        self.passes.models += 1
        return self.passes.models

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self.watch.named[0][1].device

    # ---- agreement with the other instances

    def connect(self) -> None:
        """Connect with the instances that are left, if some were lost since the last call."""
        if self._communicator is not self.replicas.communicator:
            self.exchange, self._known = None, frozenset()
            self._meet_the_others()

    def start(self) -> None:
        """Compare the instances, and take over parameters and buffers of instance 0. Collective."""

        def attempt() -> bool:
            self._meet_the_others()
            self._make_plan(begins=True)
            return True

        def share(is_done: bool, root: int) -> bool:
            self.begin_alike(root)
            return is_done

        recorded = Recorded[bool]("start of a DistributedModel", lambda done: bool, raise_on_spare)
        collectively(self.replicas, attempt, share, lambda: True, recorded)

    def begin_alike(self, root: int) -> None:
        """Take over the parameters and buffers of the instance `root`. Collective."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        receive_tensors(named, self.replicas.communicator, root)()
        self.changes.begin()
        self._writes_before = self.watch.writes

    # ---- the plan

    def _make_plan(self, begins: bool = False) -> None:
        """Compare the instances, and plan the exchange for the parameters that are trained now. Collective.

        The parts of the module get the order that they have on the first instance.

        Args:
            begins: Whether all instances take over the parameters and buffers of instance 0. If not, parameters are
                compared, except frozen ones of the last plan.

        Raises:
            DisagreementError: On all instances, if options, parameters or buffers differ.
        """
        title = "gradients" if self.number == 1 else f"gradients of model {self.number}"
        check_module(self.module)
        put_in_order(self.module, broadcast_order(self.replicas, order_of(self.module)))
        self._look()
        self.changes.follow()
        compared = {name for name, one in self.watch.named if one.requires_grad or id(one) not in self._known}
        terms = {name: _described(one, name in compared and not begins) for name, one in self.watch.named}
        buffers = {slot.name: f"buffer {slot.tensor.dtype}" for slot in self.buffers.slots}
        options = {name: str(value) for name, value in self._options.terms.items()}
        insist_on_agreement(self.replicas, [options, terms, buffers])
        if begins:
            self.begin_alike(0)
        # A layer may be frozen for a while, so the plan keeps those that it has.
        self.named = [(name, one) for name, one in self.watch.named if one.requires_grad or id(one) in self.numbers]
        self.numbers = {id(one): number for number, (_, one) in enumerate(self.named)}
        self.is_behind, self._known = False, set(map(id, self.watch.parameters))
        self._writes_before = self.watch.writes
        self.slots = self.buffers.slots
        self.exchange = self._new_exchange(title)
        self.leaves_early = self.exchange.plan.streams and not self.is_alone

    def _new_exchange(self, title: str) -> GradientExchange:
        """Return the exchange for the parameters of the plan, given the name of its collectives. Collective."""
        replicas, memory = self.replicas, ReplicaMemory(self.device)
        parameters = tuple(Parameter.of(*one) for one in self.named)
        plan = TorchGradientPlan(parameters, self._options.transfer, title=title)
        rows = [dict[int, GroupRow]() for _ in replicas.local_replicas]
        if 1 < replicas.num_replicas_in_sync == replicas.communicator.size:
            late = "gradients on a device are exchanged when the backward pass has ended; leave stream_gradients out"
            path = path_of_loops(replicas, self.device, late if self._options.stream_gradients else "")
            if path is not None:
                return GradientExchange(plan, NAMES, replicas, memory, rows, path)
        tail = Tail.size(len(NAMES), len(parameters), len(self.slots))
        whole = replace(plan, streams=self._options.streams_over(replicas), tail=tail)
        allocate = replicas.communicator.allocate
        return GradientExchange(whole, NAMES, replicas, memory, rows, None, allocate, not whole.streams)

    def shared(self, means: MeanPassResult | None, root: int) -> MeanPassResult:
        """Return the means that the instance `root` has. Collective.

        Args:
            means: The means on instances that have them; None elsewhere.
            root: The rank of an instance that has them.
        """
        communicator, packed = self.replicas.communicator, b""
        if means is not None:
            packed = pack_tree((means.loss, means.weight, [*means.gradients], dict(means.buffers)))
        packed = broadcast_bytes(communicator, packed, root, "which means there are")
        loss, weight, names, buffers = unpack_tree(packed, self.device)
        given = {name: torch.empty_like(one) for name, one in self.watch.named} if means is None else means.gradients
        gradients = [(name, one) for name in names if (one := given[name]) is not None]
        receive_tensors(gradients, communicator, root)()
        return MeanPassResult(loss, dict(gradients), buffers, weight)

    # ---- changes of the module

    def _look(self) -> None:
        self.watch.look()
        self._hooks.follow(self.watch.named)

    def _follow_parts(self) -> None:
        """Find the parts that the module has now, of which some are new."""
        self._look()
        self.is_behind = True
        self.changes.passes = 0

    def look_again(self) -> None:
        """Compare the module with the plan, and record whether a new plan is needed.

        Raises:
            StrategyError: If a parameter is new, and its gradient was missed.
        """
        watch = self.watch
        if watch.has_other_parts:
            named = self.module.named_parameters()
            if unknown := [name for name, one in named if one not in self._hooks and one.requires_grad]:
                raise StrategyError(
                    f"{unknown[0]} is new in the module, and its gradient was missed in a backward pass that "
                    "does not come from the DistributedModel; call the DistributedModel, not the module in it"
                )
            self._follow_parts()
        are_new = any(one.requires_grad and id(one) not in self.numbers for one in watch.parameters)
        self.is_behind = self.is_behind or are_new or watch.has_other_kinds

    def gradients_of(self, came: Set[int], earlier: Set[int] = frozenset()) -> dict[str, torch.Tensor | None]:
        """Return the gradients that a step has, by the names of parameters.

        Args:
            came: The ids of the parameters whose gradients came in the last pass.
            earlier: The ids of those whose gradients came in earlier passes.

        Raises:
            StrategyError: If a gradient that came is gone at the end of the pass.
        """
        gone = [name for name, one in self.watch.named if one.grad is None and id(one) in came]
        if gone and not self.is_alone:
            raise StrategyError(
                f"the gradient of {gone[0]} is gone at the end of the backward pass, as if a hook had applied it "
                "before it was averaged; leave it in grad, and apply it after backward() has returned"
            )
        of_step = came | earlier if earlier else came
        return {name: one.grad for name, one in self.watch.named if id(one) in of_step}

    # ---- forward passes

    def follow(self) -> bool:
        """Find changes to the module before a forward pass; return False if tensors stand in for its parameters."""
        is_own = True
        if self.watch.has_other_parts:
            is_own = not self.watch.is_swapped
            if is_own:
                self._follow_parts()
            elif not self.is_alone:
                self._warn(
                    _CALL,
                    f"other tensors replace the parameters of a DistributedModel, as in {_CALL}; their gradients are "
                    "not averaged: they are the gradients of this instance alone",
                )
        if torch._C._current_graph_task_id() < 0:
            self.passes.settle()  # an earlier backward pass may have failed half-way
        return is_own

    def watch_outputs(self, outputs: Tree) -> None:
        """Register hooks that report backward passes through the module's outputs."""
        for node in {tensor.grad_fn for tensor in tensors_in(outputs)}:
            if node is not None:
                node.register_prehook(self.reached)

    # ---- a backward pass

    def reached(self, gradients: object) -> None:
        """Handle a backward pass that reaches the outputs of the module. Called by autograd."""
        if self.loop.syncs:
            self.passes.enter()
            if all(one is not self for one in self.passes.reached):
                self.passes.reached.append(self)

    def gradient_is_complete(self, parameter: torch.Tensor) -> None:
        """Handle a complete gradient. Called by autograd."""
        if parameter.grad is not None and parameter.grad.is_conj():  # means are written over its memory
            parameter.grad = parameter.grad.resolve_conj()
        self.loop.weights.count(self.passes.weight)
        if not self.loop.syncs:
            self.loop.carry(parameter)
            return
        if (model_pass := self._pass) is None or torch._C._current_graph_task_id() not in model_pass.tasks:
            model_pass = self._enter()
        if not self.leaves_early or self.is_behind:
            model_pass.came.add(id(parameter))
            return
        number = self.numbers[id(parameter)]
        if id(parameter) in model_pass.came:
            raise_gradient_came_twice(self.named[number][0])
        model_pass.came.add(id(parameter))
        if len(parameter._post_accumulate_grad_hooks) == 1:  # hooks of the program may still change the gradient
            self._take(model_pass, number, parameter.grad)
            self.passes.begin_ready(self.passes.running)

    def _enter(self) -> ModelPass:
        self._communicator.refuse_in_child()
        self.passes.enter()
        found = next((one for one in self.passes.running if one.model is self), None)
        if found is None:
            self.check_one_replica()
            self.look_again()
            exchange = self.exchange
            found = ModelPass(self, None if exchange is None else exchange.plan, self.passes.tasks)
            self.passes.running.append(found)
        self._pass = found
        return found

    def check_one_replica(self) -> None:
        """Raise if this instance drives several replicas. If it is one of several instances, warn once.

        Raises:
            StrategyError: If a backward pass of autograd would be that of one of several local replicas.
        """
        local = len(self.replicas.local_replicas)
        if local > 1:
            raise StrategyError(
                f"the loss of another model's backward(loss_fn, batch) goes through this {type(self.module).__name__},"
                " whose gradients that call cannot average; freeze it meanwhile: call requires_grad_(False) on its "
                "module before, and requires_grad_(True) afterwards"
                if has_baton()
                else f"this instance drives {local} replicas, but loss.backward() is the backward pass of one; call "
                "model.backward(loss_fn, batch), which lets each replica compute, or use strategies.torch.Trainer"
            )
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(
                self.replicas,
                "loss.backward() of a DistributedModel is the backward pass of one replica, so no other instance can "
                "make that of a lost one (model.backward(loss_fn, batch) can)",
            )

    def weighted_backward(self, loss: torch.Tensor, weight: float, keeps_graph: bool = False) -> None:
        """Run the backward pass of a loss with a weight, given as it travels, through all models.

        Raises:
            StrategyError: If the weight is 0, the loss is not finite, and the module has a SyncBatchNorm.
        """
        meets = not self.is_alone and bool(sync_layers_of(self.module))
        if meets:
            check_weight_with_sync_layers(loss, weight, False)
        of_models = list(self.passes.members)
        for weights in of_models:
            weights.look_before()
        is_zeroed = weight == 0 and not meets  # 0 times NaN is NaN
        parameters = [one for weights in of_models for one in weights.watch.parameters] if is_zeroed else []
        zeros = GradientMap(None)
        zeros.begin(0, 1, 1, weight)
        self.passes.weight = LossWeight(weight)
        try:
            with zeros.attached([one for one in parameters if one.requires_grad]):
                weighted_loss(loss, weight).backward(retain_graph=keeps_graph)
        finally:
            self.passes.weight = None
        for weights in of_models:
            weights.look_after()

    def _take(self, model_pass: ModelPass, number: int, gradient: torch.Tensor | None) -> None:
        assert self.exchange is not None
        self.exchange.take([gradient], 0, number)
        model_pass.take(number)

    def reduce(self, bucket: int) -> None:
        """Exchange one bucket. Called in the exchange thread, or while that thread is idle. Collective."""
        exchange = self.exchange
        assert exchange is not None
        exchange.reduce(exchange.buckets[bucket], exchange.buffers(bucket))

    def fill(self, model_pass: ModelPass) -> None:
        """Take the gradients that were not taken during the backward pass. Called once, when the pass has ended."""
        self._ended = result = self._result_of_pass(model_pass.came, self.loop.weights.total)
        exchange = self.exchange
        if self.is_alone or exchange is None:
            return
        gradients = self._leaving(result.of(self.named))
        if not exchange.plan.streams:
            exchange.take(gradients)
            return
        for number, gradient in enumerate(gradients):
            if number not in model_pass.taken:
                self._take(model_pass, number, gradient)

    def _result_of_pass(self, came: set[int], weight: float | None) -> PassResult:
        """Return the results of the only local replica, given the ids of the parameters whose gradients came."""
        changes = {} if self.is_alone else self.changes.changed()
        return PassResult(0.0, self.gradients_of(came, self.loop.carried), (), changes, (), weight)

    def _leaving(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return the gradients; None for all of them if the module needs a new plan."""
        return [None] * len(gradients) if self.is_behind else gradients

    def conclude(self) -> None:
        """Exchange the last bucket, put the means into the gradients, and count the step. Called last.

        The exchange thread is idle meanwhile. If this raises another error than a `WeightError`, no further model is
        concluded.
        """
        assert self._ended is not None
        result, self._pass, self._ended = self._ended, None, None
        step, self._last_weight = self.loop.step, result.weight
        means = self.average([result], is_taken=True)
        self.loop.next_step()
        self.end_step(means.weight, step)

    def ended_without_gradients(self) -> None:
        """Warn, once, if the backward pass returned gradients of parameters instead of accumulating them."""
        if self.is_alone or _GRAD in self._warned:
            return
        if names := [name for name, one in self.named if one.requires_grad and is_returned(one)]:
            self._warn(
                _GRAD,
                f"{_GRAD} has returned gradients of {', '.join(names[:_MOST])} of a DistributedModel, which are "
                "those of this instance alone; backward() averages the gradients that it adds to parameters",
            )

    def _warn(self, function: str, message: str) -> None:
        """Warn the caller of a function of PyTorch, once."""
        if function not in self._warned:
            self._warned.add(function)
            warnings.warn(message, UserWarning, stacklevel=6)

    # ---- means

    def average(self, results: Sequence[PassResult], is_taken: bool = False, is_active: bool = True) -> MeanPassResult:
        """Average the results of all replicas, in place of the first replica's gradients. Collective.

        Args:
            results: The results of the local replicas.
            is_taken: Whether the exchange has their gradients already.
            is_active: Whether this instance makes the step.
        """
        if self.is_alone:
            [result] = results
            if result.weight is not None:
                check_weights_supported(self.module, self._options)
                _divide(result.gradients.values(), result.weight)
            return MeanPassResult(_quotient(result.loss, result.weight), result.gradients, {}, result.weight)
        while True:
            if (exchange := self.exchange) is not None:
                of_each = [result.of(self.named) for result in results]
                if not is_taken:
                    for place, gradients in enumerate(of_each):
                        exchange.take(self._leaving(gradients), place)
                    for bucket in range(len(exchange.plan.members) - 1):
                        exchange.reduce(exchange.buckets[bucket], exchange.buffers(bucket))
                pairs = zip(results, of_each, strict=True)
                tail = exchange.finish([self._tail_values(*pair, is_active) for pair in pairs])
                if not tail.metrics[1]:
                    return self._applied(tail, results, of_each)
            self._make_plan()
            is_taken = False

    def _tail_values(self, result: PassResult, gradients: Sequence[torch.Tensor | None], is_active: bool) -> TailValues:
        """Return the numbers that travel behind the gradients of a replica."""
        flags = [gradient is not None for gradient in gradients]
        changes = [result.changes.get(slot.name, float(not slot.is_parameter)) for slot in self.slots]
        settings = hash_at_step(self.loop.step, self.watch.writes - self._writes_before)
        numbers = is_active, self.is_behind, result.loss, result.weight or 0.0, result.weight is not None
        return TailValues(numbers, settings, flags, changes)

    def _applied(
        self, tail: Tail, results: Sequence[PassResult], of_each: Sequence[list[torch.Tensor | None]]
    ) -> MeanPassResult:
        """Write the means into the first replica's gradients and into the buffers, and return them.

        Args:
            tail: The numbers that have arrived.
            results: The results of the local replicas.
            of_each: Their gradients, in the order of the plan.
        """
        active, weight = float(tail.metrics[0]), None
        assert self.exchange is not None
        if self._options.missing_gradients == ERROR:
            check_gradients_on_all(
                self.exchange.plan,
                tail.has_gradient,
                lambda number: [gradients[number] is not None for gradients in of_each],
                self.replicas,
                active,
                ", and freeze it on all of them or on none",
            )
        else:  # means are written over zeros where only other replicas have gradients
            for number, (share, (_, parameter)) in enumerate(zip(tail.has_gradient, self.named, strict=True)):
                if share and of_each[0][number] is None:
                    parameter.grad = of_each[0][number] = torch.zeros_like(parameter)
        if tail.metrics[4]:
            if tail.metrics[4] != active:
                lacks = [result.weight is None for result in results]
                lacking = replicas_where(self.replicas, lacks, "who gives no weight")
                raise StrategyError(
                    f"the losses of the replicas {lacking} have no weight, and those of the others have one; call "
                    "model.weighted_backward on all of them, or return an Outcome with a weight"
                )
            check_weights_supported(self.module, self._options)
            weight = float(tail.metrics[3])
        self.exchange.give(of_each[0])
        _divide(of_each[0], weight)
        slots = [result.slots_of(self.slots) for result in results]
        values = self.buffers.agreed(tail.has_changed, slots, self.replicas)
        self.changes.keep({number: value.to(self.device) for number, value in values.items()})
        step = self.loop.step
        if active == 1 and (settings_differ(*tail.settings) or (step and is_due(step))):
            made = torch.tensor(step, device=self.device)
            compare_tensors(self.replicas, [*self.module.named_parameters(), ("steps_made", made)], step)
            self._writes_before = self.watch.writes
        means = {name: mean for (name, _), mean in zip(self.named, of_each[0], strict=True) if mean is not None}
        return MeanPassResult(_quotient(float(tail.metrics[2]), weight), means, values, weight, active)

    def join_once(self) -> bool:
        """Take part in a backward pass of the other instances. Return True if no instance was in a backward pass."""
        return not self.average([self._result_of_pass(set(), None)], is_active=False).active

    def end_step(self, weight: float | None, step: int) -> None:
        """Show the layers of a step to sinks of metrics if they are due; remove the gradients of a step without a mean.

        Args:
            weight: The mean weight of the losses; None if they have no weights.
            step: The number of steps before this one.

        Raises:
            WeightError: On all instances, if a weight is negative or not finite.
            ZeroWeightError: On all instances, if all weights are 0, and `zero_weight` is "error".
        """
        is_applied = weight is None or is_weighted(weight, step, SKIP)
        if not is_applied and self._options.zero_weight == ERROR:
            raise ZeroWeightError(
                f"all replicas and micro-batches have weight 0 at step {step}, so gradients have no mean and are 0; "
                "leave such batches out, catch this error and leave optimizer.step() out, or use zero_weight='skip'"
            )
        if (settings := self.replicas.distributions) is not None:
            prefix = "" if self.number == 1 else f"model_{self.number}/"
            layers = partial(layers_of_loop, self.watch.named, self.replicas)
            report_layer_statistics(self.replicas, layer_statistics(settings, step, layers, self.replicas), prefix)
        if not is_applied:
            for one in self.watch.parameters:
                one.grad = None

    # ---- optimizers

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        arguments: tuple[torch.optim.Optimizer, *tuple[Closure | None, ...]],
        named: dict[str, Closure | None],
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Refuse gradients of a step with weights that goes on, and let closures return the mean loss.

        Of PyTorch's own optimizers only LBFGS computes with the loss. The others only return it, so they get the loss
        of this instance.

        Args:
            optimizer: An optimizer that is about to step, with gradients of this model or without.
            arguments: The arguments of its `step`.
            named: Those given by name.

        Returns:
            Other arguments, or None to keep them.

        Raises:
            StrategyError: If the optimizer would use sums of weighted gradients, which are no means yet.
        """
        if self.loop.weights.total is not None and any(
            one in self._hooks and has_gradient(one) for one in parameters_of(optimizer)
        ):
            raise StrategyError(
                f"{type(optimizer).__name__} would use gradients that are sums of weighted gradients, and no means "
                "yet: the last model.weighted_backward was inside no_sync, or it has failed; make the last pass of a "
                "step outside of no_sync, or call optimizer.zero_grad() to begin the step again"
            )
        is_of_pytorch = type(optimizer).__module__.startswith("torch.optim")
        if self.is_alone or not self.loop.syncs or (is_of_pytorch and not isinstance(optimizer, torch.optim.LBFGS)):
            return None
        if not any(one in self._hooks for one in parameters_of(optimizer)):
            return None
        if (closure := named.get("closure")) is not None:
            return arguments, {**named, "closure": partial(self._mean_loss, closure)}
        _, *given = arguments
        if given and given[0] is not None:
            return (optimizer, partial(self._mean_loss, given[0]), *given[1:]), {**named}
        return None

    def _mean_loss(self, closure: Closure) -> torch.Tensor:
        """Return the mean of a closure's loss over all replicas, weighted if it has a weight. Collective."""
        self._last_weight = None
        given = closure()
        loss = given.detach() if isinstance(given, torch.Tensor) else given
        weight = 1.0 if self._last_weight is None else self._last_weight
        of_each = [np.array([weighted_value(float(loss), weight), weight])] * len(self.replicas.local_replicas)
        mean, of_weights = self.replicas.communicator.ordered_all_reduce(of_each, op="mean", name="loss of a closure")
        with np.errstate(invalid="ignore"):  # all weights may be 0
            return torch.tensor(float(mean / of_weights), dtype=loss.dtype if isinstance(loss, torch.Tensor) else None)


def raise_on_spare(recorded: object) -> NoReturn:
    """Raise on a spare, given the result of an operation that it cannot replay."""
    raise SpareError(
        "a spare cannot follow the loop of a DistributedModel, because it would not get the optimizer and other state "
        "of the loop; use strategies.torch.Trainer, or start the job without spares. The job goes on without this spare"
    )


def _quotient(mean: float, weight: float | None) -> float:
    """Return the weighted mean of a loss, float32; the mean itself without weights, NaN for the weight 0."""
    return mean if weight is None else float(weighted_means(np.array(mean, np.float32), weight))


def _divide(gradients: Iterable[torch.Tensor | None], weight: float | None) -> None:
    """Divide the means of weighted gradients by the mean weight, in place; not by a weight that has no quotient."""
    if weight is None or not weight > 0:
        return
    with torch.no_grad():
        own = [one for one in real_views([*gradients]) if one is not None]
        wide = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in own]
        divide(wide, weight)
        for one, exact in zip(own, wide, strict=True):
            if one is not exact:
                one.copy_(exact)


def _described(parameter: torch.Tensor, has_digest: bool) -> str:
    where = "" if parameter.device.type == "cpu" else f" on {parameter.device.type}"
    digest = f", digest {digest_of(host_array(parameter))[0]:x}" if has_digest else ""
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"{parameter.dtype}{list(parameter.shape)} {trained}{where}{digest}"
