"""Averaging of one module's gradients over all instances at the end of each backward pass of autograd."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from strategies.core.distributions import look, tell_look
from strategies.core.journal import Recorded
from strategies.core.survival import together, warn_of_loss
from strategies.core.weights import ERROR
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.distributed_model.backward_passes import GradientHooks, ModelPass, passes_over
from strategies.torch.distributed_model.means import LoopMeans, Turn, received_means, refuse_spares
from strategies.torch.distributed_model.parts import AveragedParts
from strategies.torch.distributed_model.progress import LoopState, agree_on_losses, refuse_open_sums
from strategies.torch.distributed_model.weights import divide_by_weight, has_mean, quotient, refuse_lacking
from strategies.torch.exchange.host import refuse_to_come_twice
from strategies.torch.exchange.plan import Tail, Told, refuse_gradients_of_some
from strategies.torch.layers import layers_of_loop
from strategies.torch.options import TorchOptions
from strategies.torch.outcomes import refuse_where_replicas_meet
from strategies.torch.replicas.generators import has_baton
from strategies.torch.replicas.module_parts import Slot
from strategies.torch.replicas.state import Changes
from strategies.torch.replicas.sync_batch_norm import seat_in_loop, sync_layers_of
from strategies.torch.tensors import tensors_in
from strategies.typing import Tree


class GradientAveraging:
    """The averaging of a module's gradients in backward passes.

    A backward pass of autograd is that of one replica, so the instance must drive one. `average` takes the gradients of
    several local replicas, which were computed one after another.

    `start` compares the instances and plans the exchange, before any gradient is exchanged. For a copy of a model, the
    first backward pass does this.

    Attributes:
        parts: The parameters and buffers of the module, and the plan of their exchange.
        is_alone: Whether there is one replica, whose gradients are the means.
        seat: The replica's place among all, for layers that wait for other replicas.
    """

    def __init__(self, module: torch.nn.Module, replicas: Replicas, options: TorchOptions, loop: LoopState) -> None:
        self.loop = loop
        self._module, self._replicas, self._options = module, replicas, options
        self.is_alone = replicas.num_replicas_in_sync == 1
        self._streams = options.streams_over(replicas)
        self._meet_the_others()
        self._hooks = GradientHooks(self.arrived)
        self.parts = AveragedParts(module, replicas, options, self._hooks)
        self._pass: ModelPass | None = None
        self._has_warned = False  # whether it has warned that a lost instance ends the job
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
            known: The value of `AveragedParts.known` before this step, the same on all instances.
        """
        if self._communicator is not self._replicas.communicator:
            self.parts.known = known
            if self.parts.exchange is not None:
                self.follow()
                self.parts.look_again()
            if self.parts.number:
                self.parts.plan_for_others()
            self._meet_the_others()

    def start(self) -> None:
        """Compare the instances, and take over parameters and buffers of instance 0. Collective."""
        self._entitle()

        def attempt() -> bool:
            self._meet_the_others()
            self.parts.take_order()
            self.parts.insist_on_agreement(())
            self.parts.begin_alike(0)
            self.parts.make_plan()
            return True

        def share(is_done: bool, root: int) -> bool:
            self.parts.begin_alike(root)  # `connect` makes the plan
            return is_done

        recorded = Recorded[bool]("start of a DistributedModel", lambda done: bool, refuse_spares)
        together(self._replicas, attempt, share, lambda: True, recorded)

    def _entitle(self) -> None:
        if not self.parts.number:
            self.passes.models += 1
            self.parts.number = self.passes.models

    def join_once(self) -> bool:
        """Take part in a backward pass of the other instances. Return True if no instance was in a backward pass."""
        tail = self._average(ModelPass(self, self.parts.plan, set()), is_active=False)
        return not tail.metrics[0]

    def _plan_anew(self) -> None:
        """Make a plan for the parameters that are trained now. Collective."""
        self._entitle()
        self.parts.plan_anew()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the module, as the last forward pass has found them."""
        return self.parts.parameters

    # ---- forward passes

    def follow(self) -> bool:
        """Find changes to the module before a forward pass; return False if tensors stand in for its parameters."""
        is_own = self.parts.follow()
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
        if parameter.grad is not None and parameter.grad.is_conj():  # means are written over its memory
            parameter.grad = parameter.grad.resolve_conj()
        self.loop.weights.count(self.passes.weighing.now)
        if not self.loop.syncs:
            self.loop.carry(parameter)
            return
        model_pass = self._pass
        if model_pass is None or torch._C._current_graph_task_id() not in model_pass.tasks:
            model_pass = self._enter()
        if not self.parts.leaves_early or self.parts.is_behind:
            model_pass.came.add(id(parameter))
            return
        number = self.parts.numbers[id(parameter)]
        if id(parameter) in model_pass.came:
            refuse_to_come_twice(self.parts.named[number][0])
        model_pass.came.add(id(parameter))
        if len(parameter._post_accumulate_grad_hooks) == 1:  # hooks of the program may still change the gradient
            self._take(model_pass, number, parameter.grad)
            self.passes.begin_ready()

    def look_before(self) -> None:
        """Look at the gradients before a weighted backward pass."""
        self.loop.weights.look_before(self.parts.watch.named)

    def look_after(self) -> None:
        """Look at the gradients after a weighted backward pass."""
        self.loop.weights.look_after(self.parts.watch.named)

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
        self._communicator.refuse_in_child()
        running = self.passes.enter()
        found = next((one for one in running.passes if one.model is self), None)
        if found is None:
            self.refuse_several()
            self.parts.look_again()
            found = ModelPass(self, self.parts.plan, running.tasks)
            running.passes.append(found)
        self._pass = found
        return found

    def refuse_several(self) -> None:
        """Raise if this instance drives several replicas. If it is one of several instances, warn once.

        Raises:
            StrategyError: If a backward pass of autograd would be that of one of several local replicas.
        """
        local = len(self._replicas.local_replicas)
        if local > 1 and has_baton():
            raise StrategyError(
                f"the loss of another model's backward(loss_fn, batch) goes through this {type(self._module).__name__},"
                " whose gradients that call cannot average; freeze it meanwhile: call requires_grad_(False) on its "
                "module before, and requires_grad_(True) afterwards"
            )
        if local > 1:
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

    def _take(self, model_pass: ModelPass, number: int, gradient: torch.Tensor | None) -> None:
        assert self.parts.exchange is not None
        self.parts.exchange.take(number, gradient)
        model_pass.take(number)

    def reduce(self, bucket: int) -> None:
        """Exchange one bucket."""
        assert self.parts.exchange is not None
        self.parts.exchange.reduce_early(bucket)

    def fill(self, model_pass: ModelPass) -> None:
        """Take the gradients that were not taken during the backward pass."""
        if self.is_alone:
            return
        self.parts.refuse_gradients_that_are_gone(model_pass.came)
        exchange = self.parts.exchange
        if exchange is None:
            return
        if self.loop.carried:
            model_pass.came |= {id(one) for _, one in self.parts.named if one.grad is not None} & self.loop.carried
        gradients = [None] * len(self.parts.named) if self.parts.is_behind else self._gradients(model_pass)
        if not exchange.plan.is_cut:
            exchange.take_all(gradients)
            return
        for number, gradient in enumerate(gradients):
            if number not in model_pass.taken:
                self._take(model_pass, number, gradient)

    def _gradients(self, model_pass: ModelPass) -> list[torch.Tensor | None]:
        return [one.grad if id(one) in model_pass.came else None for _, one in self.parts.named]

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
            layers = partial(layers_of_loop, self.parts.watch.named, self._replicas)
            tell_look(self._replicas, look(settings, step, layers, self._replicas), self._prefix)
        if not is_applied:
            for one in self.parameters:
                one.grad = None

    @property
    def _prefix(self) -> str:
        """The beginning of the names of this model's layers in sinks."""
        self._entitle()
        return "" if self.parts.number == 1 else f"model_{self.parts.number}/"

    def _average(self, model_pass: ModelPass, is_active: bool) -> Tail:
        """Run a whole exchange in one call: take the gradients, then exchange every bucket."""
        self.fill(model_pass)
        for bucket in model_pass.ready():
            self.reduce(bucket)
        return self._finish(model_pass, is_active)

    def _finish(self, model_pass: ModelPass, is_active: bool) -> Tail:
        if self.parts.exchange is not None:
            gradients = self._gradients(model_pass)
            weight = self.loop.weights.total if is_active else None
            slots = self.parts.buffers.slots
            changes = [float(self.parts.changes.has_changed(number, slot)) for number, slot in enumerate(slots)]
            tail = self.parts.exchange.finish([self._told(gradients, changes, is_active, weight=weight)])
            if not tail.metrics[1]:
                return self._apply(tail, [gradients], [slots], [weight])[0]
        self._plan_anew()
        again = ModelPass(self, self.parts.plan, model_pass.tasks)
        again.came = model_pass.came
        return self._average(again, is_active)

    def _told(
        self,
        gradients: Sequence[torch.Tensor | None],
        changes: Changes,
        is_active: bool = True,
        loss: float = 0,
        weight: float | None = None,
    ) -> Told:
        """Return the numbers that travel behind the gradients of a replica."""
        flags = tuple(gradient is not None for gradient in gradients)
        numbers = is_active, self.parts.is_behind, loss, weight or 0.0, weight is not None
        return Told(numbers, self.parts.agreement.word(self.loop.step), flags, changes)

    def _apply(
        self,
        tail: Tail,
        of_each: Sequence[list[torch.Tensor | None]],
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
        assert self.parts.exchange is not None
        active = float(tail.metrics[0])
        if self._options.missing_gradients == ERROR:
            refuse_gradients_of_some(
                self.parts.exchange.plan,
                tail.has_gradient,
                lambda number: [gradients[number] is not None for gradients in of_each],
                self._replicas,
                active,
                ", and freeze it on all of them or on none",
            )
        else:
            self._add_missing(tail.has_gradient, of_each[0])
        if tail.metrics[4]:
            if tail.metrics[4] != active:
                refuse_lacking(self._replicas, weights)
            self.parts.refuse_weights()
            tail = replace(tail, weight=float(tail.metrics[3]))
        self.parts.exchange.give(of_each[0])
        divide_by_weight(of_each[0], tail.weight)
        values = self.parts.buffers.agreed(tail.has_changed, slots, self._replicas)
        self.parts.changes.keep({number: value.to(self.parts.device) for number, value in values.items()})
        if active == 1:
            self.parts.agreement.compare_bits(self.loop.step, tail.settings)
        return tail, values

    def _add_missing(self, shares: np.ndarray, gradients: list[torch.Tensor | None]) -> None:
        """Add gradients of zeros, over which means are written, where other replicas have gradients."""
        for number, (share, (_, parameter)) in enumerate(zip(shares, self.parts.named, strict=True)):
            if share and gradients[number] is None:
                parameter.grad = gradients[number] = torch.zeros_like(parameter)

    def _divide_alone(self, gradients: Sequence[torch.Tensor | None], weight: float | None) -> None:
        """Divide the gradients of the only replica by the mean weight of its losses, if they have any."""
        if weight is not None:
            self.parts.refuse_weights()
            divide_by_weight(gradients, weight)

    # ---- several local replicas

    def average(self, turns: Sequence[Turn]) -> LoopMeans:
        """Average the results of all replicas, and put the means into the gradients of the first turn. Collective."""
        self.parts.look_again()
        weights = [turn.weight for turn in turns]
        if self.is_alone:
            [turn], [weight] = turns, weights
            self._divide_alone([turn.gradients[number] for number in turn.came], weight)
            return LoopMeans(quotient(turn.loss, weight), (), {}, weight)
        if self.parts.exchange is None:
            self._plan_anew()
        while (tail := self._exchanged(turns)).metrics[1]:
            self._plan_anew()
        of_each = [turn.of(self.parts.named) for turn in turns]
        slots = [[slot for slot, _ in turn.in_order(self.parts.buffers.slots)] for turn in turns]
        tail, values = self._apply(tail, of_each, slots, weights)
        return LoopMeans(quotient(float(tail.metrics[2]), tail.weight), of_each[0], values, tail.weight)

    def _exchanged(self, turns: Sequence[Turn]) -> Tail:
        exchange = self.parts.exchange
        assert exchange is not None
        none = [None] * len(self.parts.named)
        of_each = [none if self.parts.is_behind else turn.of(self.parts.named) for turn in turns]
        for place, gradients in enumerate(of_each):
            exchange.take_all(gradients, place)
        for bucket in range(len(exchange.plan.members) - 1):
            exchange.reduce_early(bucket)
        told = [
            self._told(
                turn.of(self.parts.named),
                [changed for _, changed in turn.in_order(self.parts.slots)],
                loss=turn.loss,
                weight=turn.weight,
            )
            for turn in turns
        ]
        return exchange.finish(told)

    def shared(self, means: LoopMeans | None, root: int) -> LoopMeans:
        """Return the means that the instance `root` has. Collective.

        Args:
            means: The means on instances that have them; None elsewhere.
            root: The rank of an instance that has them.
        """
        slots = {number: slot.tensor for number, slot in enumerate(self.parts.buffers.slots)}
        slots |= self.parts.buffers.own
        return received_means(means, self.parts.named, slots, self._replicas.communicator, root)

    # ---- gradients that are not accumulated

    def ended_without_gradients(self) -> None:
        """Warn, once, if the backward pass returned gradients of parameters instead of accumulating them."""
        if not self.is_alone:
            self.parts.local.warn_if_returned()


def _reached(averaging: GradientAveraging, gradients: object) -> None:
    averaging.reached()
