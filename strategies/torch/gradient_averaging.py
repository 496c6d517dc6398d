"""Averaging of one module's gradients over all instances at the end of each backward pass of autograd."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial

import torch

from strategies.core.distributions import look, tell_look
from strategies.core.journal import Recorded
from strategies.core.survival import together, warn_of_loss
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.backward_passes import ModelPass, passes_over
from strategies.torch.contribution import refuse_to_come_twice
from strategies.torch.gradient_exchange import (
    Parameter,
    Tail,
    TorchGradientPlan,
    refuse_gradients_of_some,
)
from strategies.torch.gradient_hooks import GradientHooks
from strategies.torch.layers import layers_of_loop
from strategies.torch.local_gradients import LocalGradients
from strategies.torch.loop_agreement import LoopAgreement
from strategies.torch.loop_buffers import LoopBuffers
from strategies.torch.loop_exchange import HostLoopExchange, LoopExchange, Told
from strategies.torch.loop_means import LoopMeans, Turn, received_means, refuse_spares
from strategies.torch.loop_state import LoopState, agree_on_losses, refuse_open_sums
from strategies.torch.model_buffers import ModelBuffers
from strategies.torch.module_parts import ModuleWatch, Slot
from strategies.torch.on_device.device_loop_exchange import DeviceLoopExchange
from strategies.torch.on_device.paths import path_of_loops
from strategies.torch.options import TorchOptions
from strategies.torch.outcomes import refuse_where_replicas_meet
from strategies.torch.pass_weights import divide_by_weight, has_mean, quotient, refuse_lacking
from strategies.torch.sync_batch_norm import seat_in_loop, sync_layers_of
from strategies.torch.tensors import dtype_of, tensors_in
from strategies.torch.training import received_tensors, refuse_modules, take_over
from strategies.torch.updates import refuse_float16
from strategies.typing import Tree

_NAMES = ("active", "changed", "loss", "weight", "weighted")
"""The numbers that travel with gradients: whether the replica is still in its loop, whether it needs a new plan, its
loss if it is known, the weight of its losses, and whether they have weights."""


class GradientAveraging:
    """The averaging of a module's gradients in backward passes.

    A backward pass of autograd is that of one replica, so the instance must drive one. `average` takes the gradients of
    several local replicas, which were computed one after another.

    `start` compares the instances and plans the exchange, before any gradient is exchanged. For a copy of a model, the
    first backward pass does this.

    Attributes:
        buffers: The buffers on which replicas agree.
        is_alone: Whether there is one replica, whose gradients are the means.
        known: The ids of the parameters that have the same values on all instances.
        named: The parameters of the plan, with their names.
        seat: The replica's place among all, for layers that wait for other replicas.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas, options: TorchOptions, loop: LoopState) -> None:
        self.loop = loop
        self._module, self._replicas, self._options = module, replicas, options
        self.is_alone = replicas.num_replicas_in_sync == 1
        self._streams = options.streams_over(replicas)
        self._meet_the_others()
        self._watch = ModuleWatch(module)
        self._agreement = LoopAgreement(module, self._watch, replicas, options)
        self._hooks = GradientHooks(self.arrived)
        self._local = LocalGradients()
        self._pass: ModelPass | None = None
        self._is_behind = False  # whether the module has changed, so that a new plan is needed
        self._has_warned = False  # whether it has warned that a lost instance ends the job
        self._number = 0  # among the models that share a communicator; 0: not known yet
        self.named: list[tuple[str, torch.nn.Parameter]] = []
        self._numbers: dict[int, int] = {}
        self.known: set[int] = set()
        self._exchange: LoopExchange | None = None
        self._leaves_early = False  # whether gradients are exchanged while backward passes run
        own, count = replicas.local_replicas.start, replicas.num_replicas_in_sync
        self.buffers = ModelBuffers(module, options.model_state_aggregation, count, own)
        self._changes = LoopBuffers(module, self.buffers)
        self.writes = self._changes.writes
        self._hooks.follow(self._watch.named)
        weakref.finalize(self, refuse_open_sums(self._hooks, loop.weights))
        if not self.is_alone:
            weakref.finalize(self, agree_on_losses(self.averages, replicas, loop.weights))

    def _meet_the_others(self) -> None:
        self._communicator = self._replicas.communicator
        self.seat = seat_in_loop(self._module, self._replicas, self._streams)
        self.passes = passes_over(self._communicator)
        self.passes.members.add(self)

    # ---- collective calls outside of backward passes

    def connect(self, known: set[int]) -> None:
        """Connect with the instances that are left, if some were lost since the last call. Collective if so.

        Args:
            known: The value of `known` before this step, the same on all instances.
        """
        if self._communicator is not self._replicas.communicator:
            self.known = known
            if self._exchange is not None:
                self.follow()
                self._look_again()
            if self._number:
                is_behind = self._is_behind  # then new parts of the module are still to be compared
                self._follow_module()
                self._make_plan()
                self._is_behind = is_behind
            self._meet_the_others()

    def start(self) -> None:
        """Compare the instances, and take over parameters and buffers of instance 0. Collective."""
        self._entitle()

        def attempt() -> bool:
            self._meet_the_others()
            self._insist_on_agreement(())
            self.begin_alike(0)
            self._make_plan()
            return True

        def share(is_done: bool, root: int) -> bool:
            self.begin_alike(root)  # `connect` makes the plan
            return is_done

        recorded = Recorded[bool]("start of a DistributedModel", lambda done: bool, refuse_spares)
        together(self._replicas, attempt, share, lambda: True, recorded)

    def _entitle(self) -> None:
        if not self._number:
            self.passes.models += 1
            self._number = self.passes.models

    def begin_alike(self, root: int) -> None:
        """Take over the parameters and buffers of the instance `root`. Collective."""
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        take_over(named, received_tensors(named, self._replicas.communicator, root))
        self.known = {id(one) for _, one in self._watch.named}
        self._changes.begin_with({})
        self._agreement.have_same_bits()

    def join_once(self) -> bool:
        """Take part in a backward pass of the other instances. Return True if no instance was in a backward pass."""
        tail = self._average(ModelPass(self, self._plan, set()), is_active=False)
        return not tail.metrics[0]

    def _plan_anew(self) -> None:
        """Make a plan for the parameters that are trained now. Collective."""
        refuse_modules(self._module)
        self._follow_module()
        new = [one for _, one in self._trained if id(one) not in self._numbers]
        self._insist_on_agreement([*new, *(one for _, one in self._watch.named if id(one) not in self.known)])
        self._make_plan()

    def _follow_module(self) -> None:
        """Find the parameters and buffers that the module has now."""
        self._watch.look()
        self._hooks.follow(self._watch.named)
        self._changes.follow()

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self._watch.named[0][1].device

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the module, as the last forward pass has found them."""
        return [one for _, one in self._watch.named]

    @property
    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters that are trained now or that the plan has: a layer may be frozen for a while."""
        return [(name, one) for name, one in self._watch.named if one.requires_grad or id(one) in self._numbers]

    def _insist_on_agreement(self, new: Sequence[torch.Tensor]) -> None:
        """Compare the averaged parameters, and the values of new ones, with the other instances. Collective."""
        self._agreement.insist_on_same_parts(self.buffers.slots, new)
        self.known = {id(one) for _, one in self._watch.named}

    def _make_plan(self) -> None:
        self._entitle()
        self.named = self._trained
        self._numbers = {id(one): number for number, (_, one) in enumerate(self.named)}
        self._local.follow(self.named)
        self._is_behind = False
        self._agreement.have_same_bits()
        parameters = tuple(Parameter.of(*one) for one in self.named)
        self._exchange = self._exchange_of(parameters)
        self._leaves_early = self._exchange.plan.is_cut and not self.is_alone

    @property
    def _obstacle(self) -> str:
        """The reason why gradients cannot stay on a device; "" if they can."""
        if self._options.stream_gradients:
            return "gradients on a device are exchanged when the backward pass has ended; leave stream_gradients out"
        return ""

    def _exchange_of(self, parameters: tuple[Parameter, ...]) -> LoopExchange:
        """Return the exchange for these parameters. Collective."""
        communicator, count = self._replicas.communicator, self._replicas.num_replicas_in_sync
        title = "gradients" if self._number == 1 else f"gradients of model {self._number}"
        plan = TorchGradientPlan(parameters, self._options.transfer, title=title)
        is_one_each = 1 < count == communicator.size
        path = path_of_loops(self._replicas, self.device, self._obstacle) if is_one_each else None
        if path is not None:
            return DeviceLoopExchange(plan, communicator, path, self.device)
        tail, local = Tail.size(len(_NAMES), len(parameters), len(self.buffers.slots)), self._replicas.local_replicas
        whole = replace(plan, streams=self._streams, tail=tail)
        return HostLoopExchange(whole, _NAMES, communicator, count, len(local))

    @property
    def _plan(self) -> TorchGradientPlan | None:
        return None if self._exchange is None else self._exchange.plan

    # ---- forward passes

    def follow(self) -> bool:
        """Find changes to the module before a forward pass; return False if tensors stand in for its parameters."""
        if not self._watch.has_other_parts:
            is_own = True
        elif is_own := not self._watch.is_swapped:
            self._watch.look()
            self._is_behind = True
            self._hooks.follow(self._watch.named)
        elif not self.is_alone:
            self._local.warn_of_others()
        if torch._C._current_graph_task_id() < 0:
            self.passes.settle()  # an earlier backward pass may have failed half-way
        return is_own

    def watch(self, outputs: Tree) -> None:
        """Register hooks that report backward passes through the module's outputs."""
        reached = None
        for node in {tensor.grad_fn for tensor in tensors_in(outputs)}:
            if node is not None:
                reached = reached or partial(_reached, self)
                node.register_prehook(reached)

    # ---- a backward pass

    def arrived(self, parameter: torch.Tensor) -> None:
        """Handle a complete gradient. Called by autograd."""
        self.loop.weights.count(self.passes.weighing.now)
        if not self.loop.syncs:
            self.loop.carry(parameter)
            return
        model_pass = self._pass
        if model_pass is None or torch._C._current_graph_task_id() not in model_pass.tasks:
            model_pass = self._enter()
        if not self._leaves_early or self._is_behind:
            model_pass.came.add(id(parameter))
            return
        number = self._numbers[id(parameter)]
        if id(parameter) in model_pass.came:
            refuse_to_come_twice(self.named[number][0])
        model_pass.came.add(id(parameter))
        if len(parameter._post_accumulate_grad_hooks) == 1:  # hooks of the program may still change the gradient
            self._take(model_pass, number, parameter.grad)
            self.passes.begin_ready()

    def look_before(self) -> None:
        """Look at the gradients before a weighted backward pass."""
        self.loop.weights.look_before(self._watch.named)

    def look_after(self) -> None:
        """Look at the gradients after a weighted backward pass."""
        self.loop.weights.look_after(self._watch.named)

    def weighted_backward(self, loss: torch.Tensor, weight: float, keeps_graph: bool = False) -> None:
        """Run the backward pass of a loss with a weight, given as it travels.

        Raises:
            StrategyError: If the weight is 0, the loss is not finite, and the module has a SyncBatchNorm.
        """
        meets = not self.is_alone and bool(sync_layers_of(self._module))
        if meets:
            refuse_where_replicas_meet(loss, weight, False)
        self.passes.weighted_backward(loss, weight, keeps_graph, zeroes=weight == 0 and not meets)

    def reached(self) -> None:
        """Handle a backward pass that reaches the outputs of the module. Called by autograd."""
        if self.loop.syncs:
            running = self.passes.enter()
            if all(one is not self for one in running.reached):
                running.reached.append(self)

    def averages(self, parameter: torch.Tensor) -> bool:
        """Return whether gradients of a parameter are averaged."""
        return self.loop.syncs and parameter in self._hooks

    def _enter(self) -> ModelPass:
        running = self.passes.enter()
        found = next((one for one in running.passes if one.model is self), None)
        if found is None:
            self.refuse_several()
            self._look_again()
            found = ModelPass(self, self._plan, running.tasks)
            running.passes.append(found)
        self._pass = found
        return found

    def refuse_several(self) -> None:
        """Raise if this instance drives several replicas. If it is one of several instances, warn once.

        Raises:
            StrategyError: If a backward pass of autograd would be that of one of several local replicas.
        """
        if (local := len(self._replicas.local_replicas)) > 1:
            raise StrategyError(
                f"this instance drives {local} replicas, but loss.backward() is the backward pass of one; call "
                "model.backward(loss_fn, batch), which lets each replica compute, or use strategies.torch.Trainer"
            )
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(
                self._replicas,
                "loss.backward() of a DistributedModel is the backward pass of one replica, so no other instance can "
                "make that of a lost one (model.backward(loss_fn, batch) can)",
            )

    def refuse_new_parts(self) -> None:
        """Raise if the forward passes of one of several turns have changed the parts of the module."""
        if self._watch.has_other_parts:
            raise StrategyError(
                "a forward pass has added, removed or replaced a part of the module, so other replicas would begin "
                "with another module; call the module once before the training, or change it between steps"
            )

    def _look_again(self) -> None:
        """Compare the module with the plan, and record whether a new plan is needed."""
        if self._watch.has_other_parts:
            self._watch.look()
            unknown = [name for name, one in self._watch.named if one not in self._hooks and one.requires_grad]
            if unknown:
                raise StrategyError(
                    f"{unknown[0]} is new in the module, and its gradient was missed in a backward pass that "
                    "does not come from the DistributedModel; call the DistributedModel, not the module in it"
                )
            self._is_behind = True
        if self._watch.has_other_kinds:
            self._watch.look()
            self._is_behind = True
        numbers = self._numbers
        if any(one.requires_grad and id(one) not in numbers for _, one in self._watch.named):
            self._is_behind = True

    def _take(self, model_pass: ModelPass, number: int, gradient: torch.Tensor | None) -> None:
        assert self._exchange is not None
        self._exchange.take(number, gradient)
        model_pass.take(number)

    def reduce(self, bucket: int) -> None:
        """Exchange one bucket."""
        assert self._exchange is not None
        self._exchange.reduce(bucket)

    def fill(self, model_pass: ModelPass) -> None:
        """Take the gradients that were not taken during the backward pass."""
        if self.is_alone:
            return
        self.refuse_gradients_that_are_gone(model_pass.came)
        exchange = self._exchange
        if exchange is None:
            return
        if self.loop.carried:
            model_pass.came |= {id(one) for _, one in self.named if one.grad is not None} & self.loop.carried
        gradients = [None] * len(self.named) if self._is_behind else self._gradients(model_pass)
        if not exchange.plan.is_cut:
            exchange.take_all(gradients)
            return
        for number, gradient in enumerate(gradients):
            if number not in model_pass.taken:
                self._take(model_pass, number, gradient)

    def refuse_gradients_that_are_gone(self, came: Container[int]) -> None:
        """Raise if a parameter whose gradient came has none at the end of the backward pass.

        Args:
            came: The ids of the parameters whose gradients came.
        """
        for name, parameter in self._watch.named:
            if parameter.grad is None and id(parameter) in came:
                raise StrategyError(
                    f"the gradient of {name} is gone at the end of the backward pass, as if a hook had applied it "
                    "before it was averaged; leave it in grad, and apply it after backward() has returned"
                )

    def _gradients(self, model_pass: ModelPass) -> list[torch.Tensor | None]:
        return [parameter.grad if id(parameter) in model_pass.came else None for _, parameter in self.named]

    def conclude(self, model_pass: ModelPass) -> None:
        """Exchange the last bucket, put the means into the gradients, and count the step."""
        self._pass = None
        weight, step = self.loop.weights.total, self.loop.step
        if self.is_alone:
            came = model_pass.came | self.loop.carried
            self._divide_alone([one.grad for one in self.parameters if id(one) in came], weight)
        else:
            weight = self._finish(model_pass, is_active=True).weight
        last = self.loop.weights.total
        self.loop.next_step()
        self.loop.weights.last = last
        self.end_step(weight, step)

    def end_step(self, weight: float | None, step: int) -> None:
        """Show the layers of a step to sinks of metrics if they are due; remove the gradients of a step without a mean.

        Args:
            weight: The mean weight of the losses; None if they have no weights.
            step: The number of steps before this one.

        Raises:
            WeightError: On all instances, if weights have no mean; see `has_mean`.
        """
        is_applied = has_mean(weight, step, self._options.zero_weight)
        if (settings := self._replicas.distributions) is not None:
            layers = partial(layers_of_loop, self._watch.named, self._replicas)
            tell_look(self._replicas, look(settings, step, layers, self._replicas), self._prefix)
        if not is_applied:
            for one in self.parameters:
                one.grad = None

    @property
    def _prefix(self) -> str:
        """The beginning of the names of this model's layers in sinks."""
        self._entitle()
        return "" if self._number == 1 else f"model_{self._number}/"

    def _average(self, model_pass: ModelPass, is_active: bool) -> Tail:
        """Run a whole exchange in one call: take the gradients, then exchange every bucket."""
        self.fill(model_pass)
        for bucket in model_pass.ready():
            self.reduce(bucket)
        return self._finish(model_pass, is_active)

    def _finish(self, model_pass: ModelPass, is_active: bool) -> Tail:
        if self._exchange is not None:
            gradients = self._gradients(model_pass)
            weight = self.loop.weights.total if is_active else None
            tail = self._exchange.finish([self._told(gradients, self.buffers.slots, is_active, weight=weight)])
            if not tail.metrics[1]:
                return self._apply(tail, [gradients], [self.buffers.slots], [weight])[0]
        self._plan_anew()
        again = ModelPass(self, self._plan, model_pass.tasks)
        again.came = model_pass.came
        return self._average(again, is_active)

    def _told(
        self,
        gradients: Sequence[torch.Tensor | None],
        slots: Sequence[Slot],
        is_active: bool = True,
        loss: float = 0,
        weight: float | None = None,
    ) -> Told:
        """Return the numbers that travel behind the gradients of a replica."""
        changes = tuple(self._changes.has_changed(number, slot) for number, slot in enumerate(slots))
        flags = tuple(gradient is not None for gradient in gradients)
        numbers = is_active, self._is_behind, loss, weight or 0.0, weight is not None
        return Told(numbers, self._agreement.word(self.loop.step), flags, changes)

    def _apply(
        self,
        tail: Tail,
        of_each: Sequence[Sequence[torch.Tensor | None]],
        slots: Sequence[Sequence[Slot]],
        weights: Sequence[float | None],
    ) -> tuple[Tail, dict[int, torch.Tensor]]:
        """Put the means into the gradients of the first local replica and into the buffers.

        Args:
            tail: The numbers that have arrived.
            of_each: The gradients of each local replica.
            slots: The buffers and frozen parameters of each local replica.
            weights: The weight of the losses of each local replica.

        Returns:
            The tail with the mean weight, and the new values of buffers.
        """
        assert self._exchange is not None
        active = float(tail.metrics[0])
        refuse_gradients_of_some(
            self._exchange.plan,
            tail.has_gradient,
            lambda number: [gradients[number] is not None for gradients in of_each],
            self._replicas,
            active,
            ", and freeze it on all of them or on none",
        )
        if tail.metrics[4]:
            if tail.metrics[4] != active:
                refuse_lacking(self._replicas, weights)
            self._refuse_float16()
            tail = replace(tail, weight=float(tail.metrics[3]))
        self._exchange.give(of_each[0])
        divide_by_weight(of_each[0], tail.weight)
        values = self.buffers.agreed(tail.has_changed, slots, self._replicas)
        self.keep({number: value.to(self.device) for number, value in values.items()})
        if active == 1:
            self._agreement.compare_bits(self.loop.step, tail.settings)
        return tail, values

    def _divide_alone(self, gradients: Sequence[torch.Tensor | None], weight: float | None) -> None:
        """Divide the gradients of the only replica by the mean weight of its losses, if they have any."""
        if weight is not None:
            self._refuse_float16()
            divide_by_weight(gradients, weight)

    def _refuse_float16(self) -> None:
        for name, one in self._trained:
            refuse_float16(name, self._options.transfer.dtype_of(dtype_of(one)))

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Put the values on which all replicas have agreed into buffers and frozen parameters, by their numbers."""
        self._changes.keep(values)

    # ---- several local replicas

    def average(self, turns: Sequence[Turn]) -> LoopMeans:
        """Average the results of all replicas, and put the means into the gradients of the first turn. Collective."""
        self._look_again()
        weights = [turn.weight for turn in turns]
        if self.is_alone:
            [turn], [weight] = turns, weights
            self._divide_alone([turn.gradients[number] for number in turn.came], weight)
            return LoopMeans(quotient(turn.loss, weight), (), {}, weight)
        if self._exchange is None:
            self._plan_anew()
        while (tail := self._exchanged(turns)).metrics[1]:
            self._plan_anew()
        of_each = [turn.of(self.named) for turn in turns]
        slots = [turn.slots_in_order(self.buffers.slots) for turn in turns]
        tail, values = self._apply(tail, of_each, slots, weights)
        return LoopMeans(quotient(float(tail.metrics[2]), tail.weight), of_each[0], values, tail.weight)

    def _exchanged(self, turns: Sequence[Turn]) -> Tail:
        exchange = self._exchange
        assert exchange is not None
        none = [None] * len(self.named)
        of_each = [none if self._is_behind else turn.of(self.named) for turn in turns]
        for place, gradients in enumerate(of_each):
            exchange.take_all(gradients, place)
        for bucket in range(len(exchange.plan.members) - 1):
            exchange.reduce(bucket)
        slots = self.buffers.slots
        told = [
            self._told(turn.of(self.named), turn.slots_in_order(slots), loss=turn.loss, weight=turn.weight)
            for turn in turns
        ]
        return exchange.finish(told)

    def shared(self, means: LoopMeans | None, root: int) -> LoopMeans:
        """Return the means that the instance `root` has. Collective.

        Args:
            means: The means on instances that have them; None elsewhere.
            root: The rank of an instance that has them.
        """
        slots = {number: slot.tensor for number, slot in enumerate(self.buffers.slots)}
        slots |= self.buffers.own
        return received_means(means, self.named, slots, self._replicas.communicator, root)

    # ---- gradients that are not accumulated

    def ended_without_gradients(self) -> None:
        """Warn, once, if the backward pass returned gradients of parameters instead of accumulating them."""
        if not self.is_alone:
            self._local.warn_if_returned()


def _reached(averaging: GradientAveraging, gradients: object) -> None:
    averaging.reached()
