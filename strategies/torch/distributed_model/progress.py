"""The state of the program's own training loop: steps, random numbers, and the losses that its optimizers get."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.distributed_model.backward_passes import GradientHooks
from strategies.torch.distributed_model.weights import PassWeights, has_gradient
from strategies.torch.optimizer_arrays import parameters_of
from strategies.torch.outcomes import weighted_value
from strategies.torch.replicas.generators import (
    AllStates,
    are_equal,
    drawing_from,
    has_baton,
    lay_all,
    lift_all,
    seed_generators,
    seed_of,
)

Averages = Callable[[torch.Tensor], bool]
"""(parameter) -> whether its gradients are averaged over all instances."""

Closure = Callable[[], torch.Tensor | float]
"""A function given to an optimizer's `step`, which computes loss and gradients anew."""


class LoopState:
    """The counters of steps and micro-batches. They are not in the module, whose attributes are slow to set.

    A micro-batch ends with a backward pass. All its forward passes draw from one generator, one after another, as the
    passes in a loss function of `Trainer` do.

    Attributes:
        replica: The replica that makes its passes.
        step: The number of synchronised backward passes so far.
        syncs: Whether backward passes are synchronised.
        carried: The ids of parameters with gradients of backward passes that were not synchronised.
        weights: The weights of the losses of this step.
    """

    def __init__(self, seed: int, replica: int, begins: Callable[[int], None]) -> None:
        self.step = 0
        self.syncs = True
        self.carried: set[int] = set()
        self.weights = PassWeights()
        self.replica = replica
        self._seed, self._begins = seed, begins
        self._micro_batch = 0
        self._forward_passes = 0  # the number of them in this micro-batch
        self._has_ended = False
        self._is_told = False
        self._states: AllStates | None = None  # of the generators, after the last forward pass of the micro-batch

    def copied(self) -> LoopState:
        """Return a new state with the same number of steps."""
        found = LoopState(self._seed, self.replica, self._begins)
        found.step = self.step
        return found

    @contextmanager
    def turn(self, replica: int) -> Iterator[None]:
        """Let a local replica make its passes, which draw its random numbers and exchange nothing.

        The caller keeps the generators of the process, and has the baton.
        """
        own, self.replica, self.syncs = self.replica, replica, False
        self._begin_passes()
        try:
            yield
        finally:
            self.replica, self.syncs = own, True
            self._begin_passes()

    def seed_micro_batch(self, number: int, device: torch.device) -> None:
        """Seed the generators for a micro-batch of a turn."""
        seed_generators(seed_of(self._seed, self.replica, self.step, number), device)

    def _begin_passes(self) -> None:
        self._micro_batch, self._has_ended = 0, False
        self.carried.clear()
        self.weights.begin()
        self._begin_micro_batch()

    def carry(self, parameter: torch.Tensor) -> None:
        """Record a gradient of a backward pass that is not synchronised."""
        self.carried.add(id(parameter))
        self._has_ended = True

    def next_step(self) -> None:
        """Count a synchronised backward pass that has ended."""
        self.step += 1
        self._is_told = False
        self._begin_passes()

    def _begin_micro_batch(self) -> None:
        self._forward_passes = 0
        self._states = None

    @contextmanager
    def forward_pass(self, is_training: bool, device: torch.device) -> Iterator[None]:
        """Let a forward pass draw its random numbers.

        Args:
            is_training: Whether the pass belongs to a micro-batch; other passes draw from a generator of their own.
            device: The device of the module.

        Raises:
            StrategyError: If a backward pass recomputes one of several forward passes of a micro-batch, and the
                recomputation draws random numbers.
        """
        if torch._C._current_graph_task_id() >= 0:
            with nullcontext() if has_baton() else self._again(is_training, device):
                yield
            return
        if not is_training:
            with self._drawing(device, None):
                yield
            return
        if self._has_ended:
            self._micro_batch += 1
            self._has_ended = False
            self._begin_micro_batch()
        if torch.is_grad_enabled() and not self._is_told:
            self._is_told = True
            self._begins(self.step)
        self._forward_passes += 1
        if has_baton():
            yield
            return
        with self._drawing(device, self._states) as after:
            yield
        [self._states] = after

    @contextmanager
    def _drawing(self, device: torch.device, states: AllStates | None) -> Iterator[list[AllStates]]:
        """Let a forward pass draw from generators with these states, or seeded anew; yield a list for the new states.

        In a turn, which has seeded the generators already, they go on afterwards as if the pass had drawn nothing.
        """
        after: list[AllStates] = []
        with drawing_from(seed_of(self._seed, self.replica, self.step, self._micro_batch), device):
            if states is not None:
                lay_all(states)
            try:
                yield after
            finally:
                after.append(lift_all(device))

    @contextmanager
    def _again(self, is_training: bool, device: torch.device) -> Iterator[None]:
        after: list[AllStates] = []
        try:
            with self._drawing(device, None) as after:
                yield
        finally:
            if is_training and self._forward_passes > 1 and after and not self._are_unused(after[0], device):
                self._refuse_to_go_on()

    def _are_unused(self, states: AllStates, device: torch.device) -> bool:
        """Return whether generators with these states have drawn nothing in this micro-batch."""
        with self._drawing(device, None) as seeded:
            pass
        return are_equal(states, seeded[0])

    def _refuse_to_go_on(self) -> NoReturn:
        raise StrategyError(
            f"a checkpoint recomputes one of {self._forward_passes} forward passes of a DistributedModel. It would "
            "draw other random numbers, because they continue from one pass to the next; checkpoint inside of the "
            "module, where random numbers are repeated"
        )


def agree_on_losses(averages: Averages, replicas: Replicas, weights: PassWeights) -> Callable[[], None]:
    """Make optimizer closures return the mean loss from here on, if the optimizer's gradients are averaged.

    Of PyTorch's own optimizers only LBFGS computes with the loss. The others only return it, so they get the loss of
    this instance.

    Args:
        averages: A method that returns whether a parameter's gradient is averaged. Only a weak reference to it is kept.
        replicas: The replicas of all instances.
        weights: The weights of the losses; the mean loss is weighted if they have any.

    Returns:
        A function that ends this.
    """
    hook = partial(_before_step, weakref.WeakMethod(averages), partial(_mean_loss, replicas=replicas, weights=weights))
    end: Callable[[], None] = register_optimizer_step_pre_hook(hook).remove
    return end


def refuse_open_sums(hooks: GradientHooks, weights: PassWeights) -> Callable[[], None]:
    """Make optimizers refuse gradients of a step with weights that goes on: they are sums, and no means yet.

    Args:
        hooks: The hooks on the model's parameters. Only a weak reference to them is kept.
        weights: The weights of the losses.

    Returns:
        A function that ends this.
    """
    end: Callable[[], None] = register_optimizer_step_pre_hook(
        partial(_refuse_sums, weakref.ref(hooks), weights)
    ).remove
    return end


def _refuse_sums(
    reference: weakref.ref[GradientHooks], weights: PassWeights, optimizer: torch.optim.Optimizer, *step: object
) -> None:
    hooks = reference()
    if weights.total is None or hooks is None:
        return
    if any(one in hooks and has_gradient(one) for one in parameters_of(optimizer)):
        raise StrategyError(
            f"{type(optimizer).__name__} would use gradients that are sums of weighted gradients, and no means yet: "
            "the last model.weighted_backward was inside no_sync, or it has failed; make the last pass of a step "
            "outside of no_sync, or call optimizer.zero_grad() to begin the step again"
        )


def _before_step(
    reference: weakref.WeakMethod[Averages],
    mean_loss: Callable[[Closure], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    arguments: tuple[torch.optim.Optimizer, *tuple[Closure | None, ...]],
    named: dict[str, Closure | None],
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Replace the closure among the arguments of `step`."""
    if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS):
        return None
    averages = reference()
    if averages is None or not any(map(averages, parameters_of(optimizer))):
        return None
    if (closure := named.get("closure")) is not None:
        return arguments, {**named, "closure": partial(mean_loss, closure)}
    _, *given = arguments
    if given and given[0] is not None:
        return (optimizer, partial(mean_loss, given[0]), *given[1:]), {**named}
    return None


def _mean_loss(closure: Closure, replicas: Replicas, weights: PassWeights) -> torch.Tensor:
    weights.last = None
    given = closure()
    loss = given.detach() if isinstance(given, torch.Tensor) else given
    weight = 1.0 if weights.last is None else weights.last
    of_each = [np.array([weighted_value(float(loss), weight), weight])] * len(replicas.local_replicas)
    mean, of_weights = replicas.communicator.ordered_all_reduce(of_each, op="mean", name="loss of a closure")
    with np.errstate(invalid="ignore"):  # all weights may be 0
        return torch.tensor(float(mean / of_weights), dtype=loss.dtype if isinstance(loss, torch.Tensor) else None)
