"""Passes of a training loop of the program: their random numbers, the weights of losses, and the order of exchanges."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from collectives import Communicator
from strategies.core.options import travelling
from strategies.errors import StrategyError, WeightError
from strategies.torch.exchange.plan import TorchGradientPlan
from strategies.torch.replicas.buffers import ModelBuffers
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
from strategies.torch.replicas.guard import WriteMarks, is_due, raise_written
from strategies.torch.replicas.module_parts import ModuleWatch, Slot
from strategies.torch.tensors import have_same_bits

Named = Sequence[tuple[str, torch.nn.Parameter]]
"""Parameters with their names."""

Result = TypeVar("Result")

Complete = Callable[[torch.Tensor], None]
"""(parameter whose gradient is complete) -> None. Called by autograd."""


# ---- forward passes


class PassCounters:
    """Counters of steps and micro-batches, outside of the module, whose attributes are slow to set.

    A micro-batch ends with a backward pass. All its forward passes draw from one generator, one after another, as the
    passes in a loss function of `Trainer` do.

    Attributes:
        replica: The replica that makes its passes.
        step: The number of synchronised backward passes so far.
        syncs: Whether backward passes are synchronised.
        carried: The ids of parameters with gradients of backward passes that were not synchronised.
        weights: The weights of the losses of this step.
    """

    def __init__(self, seed: int, replica: int, begins: Callable[[int], None], watch: ModuleWatch) -> None:
        self.step = 0
        self.syncs = True
        self.carried: set[int] = set()
        self.weights = AccumulatedWeights(watch)
        self.replica = replica
        self._seed, self._begins = seed, begins
        self._has_announced = False
        self._states: AllStates | None = None  # of the generators, after the last forward pass of the micro-batch
        self._after: AllStates | None = None  # those after the last pass of all
        self._begin_passes()

    def _begin_micro_batch(self, number: int) -> None:
        self._micro_batch, self._has_ended = number, False
        self._forward_passes, self._states = 0, None  # the number of them in this micro-batch

    def _begin_passes(self) -> None:
        self._begin_micro_batch(0)
        self.carried.clear()
        self.weights.begin()

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

    def carry(self, parameter: torch.Tensor) -> None:
        """Record a gradient of a backward pass that is not synchronised."""
        self.carried.add(id(parameter))
        self._has_ended = True

    def next_step(self) -> None:
        """Count a synchronised backward pass that has ended."""
        self.step += 1
        self._has_announced = False
        self._begin_passes()

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
            with self._drawing(device):
                yield
            return
        if self._has_ended:
            self._begin_micro_batch(self._micro_batch + 1)
        if torch.is_grad_enabled() and not self._has_announced:
            self._has_announced = True
            self._begins(self.step)
        self._forward_passes += 1
        if has_baton():
            yield
            return
        with self._drawing(device, self._states):
            yield
        self._states = self._after

    @contextmanager
    def _drawing(self, device: torch.device, states: AllStates | None = None) -> Iterator[None]:
        """Let a forward pass draw from generators with these states, or seeded anew.

        In a turn, which has seeded the generators already, they go on afterwards as if the pass had drawn nothing.
        """
        with drawing_from(seed_of(self._seed, self.replica, self.step, self._micro_batch), device):
            if states is not None:
                lay_all(states)
            try:
                yield
            finally:
                self._after = lift_all(device)

    @contextmanager
    def _again(self, is_training: bool, device: torch.device) -> Iterator[None]:
        """Let a pass that is recomputed draw the same numbers. Refuse it if they would be those of another pass."""
        try:
            with self._drawing(device):
                yield
        finally:
            if is_training and self._forward_passes > 1:
                after = self._after
                with self._drawing(device):
                    pass  # the states of generators that have drawn nothing
                if after is not None and self._after is not None and not are_equal(after, self._after):
                    raise StrategyError(
                        f"a checkpoint recomputes one of {self._forward_passes} forward passes of a DistributedModel. "
                        "It would draw other random numbers, because they continue from one pass to the next; "
                        "checkpoint inside of the module, where random numbers are repeated"
                    )


# ---- weights of losses


@dataclass(frozen=True, eq=False)
class LossWeight:
    """The weight of the loss of one backward pass, in the dtype in which it is sent."""

    value: float


class AccumulatedWeights:
    """The weights of the losses of one replica in a step of the program's loop.

    Attributes:
        watch: The watch over the module.
        stated: The weights that the module has stated in training passes since the last backward pass.
    """

    def __init__(self, watch: ModuleWatch) -> None:
        self.watch = watch
        self.stated: list[object] = []
        self._refusal = ""
        self._begin_sum()

    @property
    def total(self) -> float | None:
        """The sum of the weights so far, as it travels; None if the losses have no weights."""
        return None if self._counted is None else float(travelling(self._sum))

    def begin(self) -> None:
        """Begin a step."""
        self.stated.clear()
        self._begin_sum()

    def _begin_sum(self) -> None:
        self._sum, self._has_passes = 0.0, False
        self._counted: LossWeight | None = None
        self._seen: Mapping[int, tuple[torch.Tensor, int]] = {}  # gradients, by their parameters' ids

    def count(self, given: LossWeight | None) -> None:
        """Count a backward pass that adds to a gradient; several calls for one pass count it once.

        Raises:
            StrategyError: If only some of the backward passes of a step have weights, a weight was stated for a pass
                without one, or `look_before` has found gradients that cannot be a part of the mean.
        """
        if self._has_passes and given is self._counted:
            return
        if given is not None and self._refusal:
            raise StrategyError(self._refusal)
        if self._has_passes and (given is None) != (self._counted is None):
            raise StrategyError(
                "some backward passes of a step have weights, by model.weighted_backward(loss, weight) or an Outcome, "
                "and others have none; give all micro-batches of a step weights, or none"
            )
        if given is None and self.stated:
            raise StrategyError(
                "the module has stated the weight of its loss; call model.weighted_backward(loss), not loss.backward()"
            )
        self._has_passes, self._counted = True, given
        if given is not None:
            self._sum += given.value

    def look_before(self) -> None:
        """Look at the gradients before a weighted pass, which `count` refuses if they cannot be a part of its mean.

        If the gradients of earlier passes of this step are gone, the step begins again.
        """
        self._refusal = ""
        named = self.watch.named
        if self._seen and all(self._is_as_seen(one) for _, one in named):
            return
        left = next((name for name, one in named if has_gradient(one)), None)
        if left is None:
            self._begin_sum()
        elif self._counted is not None:
            self._refusal = (
                f"the gradient of {left} was changed between weighted backward passes of a step, where it is a sum of "
                "weighted gradients, or a pass has failed half-way; change gradients after the last pass, or call "
                "optimizer.zero_grad() to begin the step again"
            )
        elif not self._has_passes:
            self._refusal = (
                f"gradients of an earlier step are left, as that of {left}, to which a weighted mean cannot be added; "
                "call optimizer.zero_grad() before model.weighted_backward (or model.zero_grad(), for parameters that "
                "the optimizer lacks), and use no_sync for all micro-batches but the last"
            )

    def look_after(self) -> None:
        """Remember the gradients with which a weighted pass has left the step, if the step goes on."""
        if self._counted is not None:
            grads = {id(one): one.grad for one in self.watch.parameters}
            self._seen = {number: (one, one._version) for number, one in grads.items() if one is not None}

    def _is_as_seen(self, parameter: torch.nn.Parameter) -> bool:
        now, (gradient, version) = parameter.grad, self._seen.get(id(parameter), (None, 0))
        return now is gradient and (now is None or now._version == version)


def has_gradient(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that is not all zeros."""
    gradient = parameter.grad
    return gradient is not None and bool((gradient._values() if gradient.is_sparse else gradient).any())


# ---- results of passes


@dataclass(frozen=True)
class PassResult:
    """The results of one replica's forward and backward pass.

    Attributes:
        loss: The loss; the sum of the weighted losses if they have weights.
        gradients: The gradients of the parameters to which this pass has added one, by name.
        slots: The buffers and frozen parameters after the pass, if the module has others by now.
        changes: Whether the pass has changed a buffer or frozen parameter, 0 or 1, by name; a new buffer has no entry.
        losses: The loss of each micro-batch, without its weight.
        weight: The sum of the weights of the losses; None if they have no weights.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    slots: Sequence[Slot]
    changes: Mapping[str, float]
    losses: Sequence[torch.Tensor]
    weight: float | None

    def of(self, named: Named) -> list[torch.Tensor | None]:
        """Return the gradients of these parameters, None for parameters without one."""
        return [self.gradients.get(name) for name, _ in named]

    def slots_of(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots after the pass in the order of the module's slots."""
        own = {slot.name: slot for slot in self.slots}
        return [own.get(slot.name, slot) for slot in slots]


@dataclass(frozen=True)
class MeanPassResult:
    """The results of a backward pass over all replicas, equal on all instances.

    Attributes:
        loss: The mean loss.
        gradients: The mean gradients, by the names of parameters.
        buffers: The agreed values of the buffers and frozen parameters that have changed, by number.
        weight: The mean weight of the losses; None if they have no weights.
        active: The share of the replicas that have made the pass.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[int, torch.Tensor]
    weight: float | None = None
    active: float = 1.0

    def kept(self) -> MeanPassResult:
        """Return copies, which the program cannot change."""
        gradients = {name: None if one is None else one.detach().clone() for name, one in self.gradients.items()}
        buffers = {number: one.clone() for number, one in self.buffers.items()}
        return MeanPassResult(self.loss, gradients, buffers, self.weight)


class WrittenBuffers:
    """The buffers and frozen parameters that forward passes have changed since replicas agreed on them.

    Args:
        model: The buffers on which replicas agree.
        watch: The watch over the module.

    Attributes:
        passes: The number of forward passes with the present parts of the module.
    """

    def __init__(self, model: ModelBuffers, watch: ModuleWatch) -> None:
        self._model, self._watch = model, watch
        self._frozen: set[str] = set()  # the names of frozen parameters that were written
        self._known: set[str] = set()  # those that are written through `data`
        self._masters: dict[str, torch.Tensor] = {}  # the buffers on which replicas have agreed
        self.passes = 0
        self.begin()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass. In passes 1, 2, 4, 8 and so on bits are compared, too.

        Raises:
            StrategyError: If the pass has written a trained parameter. Also if it has written an undeclared frozen
                parameter through `data`, and this was seen only after the first pass.
        """
        self.passes += 1
        named, names = self._watch.named, self._model.declared
        marks = WriteMarks(named, is_due(self.passes))
        declared = WriteMarks([pair for pair in named if pair[0] in names], True)
        yield
        counted, by_bits = marks.counted(), marks.by_bits()
        late = by_bits - counted - self._known if self.passes > 1 else set()
        for name, one in named:
            if (name in late and name not in names) or (one.requires_grad and name in counted | by_bits):
                raise_written(name, one)
        self._frozen |= declared.by_bits() | self._known | counted | by_bits
        self._known |= by_bits - counted

    def begin(self) -> None:
        """Copy the buffers, to find changes later."""
        self._copy(self._model.slots)

    def _copy(self, slots: Iterable[Slot]) -> None:
        self._masters |= {slot.name: slot.tensor.detach().clone() for slot in slots if not slot.is_parameter}

    def follow(self) -> None:
        """Find the buffers that the module has now. New ones count as changed."""
        self._model.follow()
        slots = enumerate(self._model.slots)
        new = {number: slot for number, slot in slots if not slot.is_parameter and slot.name not in self._masters}
        self._copy(new.values())
        self._model.moving |= new.keys()

    def changed(self) -> dict[str, float]:
        """Return for each buffer, and each frozen parameter that was written, whether passes have changed it."""
        found = dict.fromkeys(self._frozen, 1.0)
        for number, slot in enumerate(self._model.slots):
            if not slot.is_parameter:
                has_changed = number in self._model.moving or not have_same_bits(slot.tensor, self._masters[slot.name])
                found[slot.name] = float(has_changed)
        return found

    def keep(self, values: dict[int, torch.Tensor]) -> None:
        """Put the values on which all replicas have agreed into buffers and frozen parameters, by their numbers."""
        self._model.keep(values)
        self._copy(self._model.slots[number] for number in values)
        self._frozen.clear()


# ---- backward passes


class GradientHooks:
    """The hooks on a module's parameters. They end with this object.

    Args:
        completed: A method that gets each parameter. Only a weak reference to it is kept, so its object can be freed.
    """

    def __init__(self, completed: Complete) -> None:
        self._callback = partial(call_if_there, weakref.WeakMethod(completed))
        self._hooks: dict[int, tuple[torch.Tensor, weakref.finalize[..., GradientHooks]]] = {}  # and how they end

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._hooks

    def follow(self, named: Named) -> None:
        """Add hooks to new parameters, and remove those of parameters that are gone."""
        for gone in self._hooks.keys() - {id(one) for _, one in named}:
            self._hooks.pop(gone)[1]()
        for _, one in named:
            if one in self or not one.is_leaf or not (one.is_floating_point() or one.is_complex()):
                continue
            is_trained = one.requires_grad
            one.requires_grad_(True)  # PyTorch refuses hooks on frozen parameters, which may be thawed later
            hook = one.register_post_accumulate_grad_hook(self._callback)
            self._hooks[id(one)] = one, weakref.finalize(self, hook.remove)
            one.requires_grad_(is_trained)


def call_if_there(reference: weakref.WeakMethod[Callable[..., Result]], *arguments: object) -> Result | None:
    """Call a method if its object is still there."""
    method = reference()
    return None if method is None else method(*arguments)


class ExchangingModel(Protocol):
    """A model whose gradients are exchanged. `BackwardPasses` calls its methods in the order below.

    `backward()` raises the first error of a method, and no further model is concluded, except after a `WeightError`.
    """

    def reduce(self, bucket: int) -> None:
        """Exchange one bucket. Called in the exchange thread, or while that thread is idle. Collective."""

    def ended_without_gradients(self) -> None:
        """Handle a backward pass through the model's outputs that has accumulated no gradient in its parameters."""

    def fill(self, model_pass: ModelPass) -> None:
        """Take the gradients that were not taken during the backward pass. Called once, when the pass has ended."""

    def conclude(self) -> None:
        """Exchange the last bucket and apply the results. Called last, while the exchange thread is idle."""


class ModelPass:
    """The part of one model in one backward pass.

    Attributes:
        came: The ids of the parameters whose gradients are complete.
        taken: The numbers in the plan of the parameters whose gradients were handed to the exchange.
        begun: The exchanges that have begun.
    """

    def __init__(self, model: ExchangingModel, plan: TorchGradientPlan | None, tasks: set[int]) -> None:
        self.model, self.tasks = model, tasks
        self.came: set[int] = set()
        self.taken: set[int] = set()
        self.begun: list[Future[None]] = []
        self._plan = plan
        self._missing = [len(numbers) for numbers in plan.members] if plan else [0]
        self._next = 0

    def take(self, number: int) -> None:
        """Record that the gradient of a parameter was taken; `number` is the parameter's place in the plan."""
        assert self._plan is not None
        self.taken.add(number)
        self._missing[self._plan.places[number].bucket] -= 1

    def ready(self) -> Iterator[int]:
        """Yield each bucket that is ready to be exchanged, once. The last bucket waits for its tail."""
        while not self.has_left and not self._missing[self._next]:
            self._next += 1
            yield self._next - 1

    @property
    def has_left(self) -> bool:
        """Whether the exchanges of all buckets but the last one have begun."""
        return self._next == len(self._missing) - 1


class BackwardPasses:
    """The backward passes of all models that share a communicator.

    While a backward pass runs, gradients leave model by model, in the order in which the models' first gradients were
    complete. If that order differs between instances, so do the names of the collectives, and all instances raise.

    Attributes:
        models: The number of models that have shared the communicator so far.
        members: The weights of the losses of the models that share it now.
        tasks: The numbers that autograd has given to the call of `backward` that runs, and to the calls nested in it,
            as reentrant checkpoints make them.
        running: The parts of the models that take part, in the order in which their first gradients were complete.
        reached: The models through whose outputs the backward pass went.
        weight: The weight of the backward pass that runs; None for a pass without one.
    """

    def __init__(self) -> None:
        self.models = 0
        self.members: WeakSet[AccumulatedWeights] = WeakSet()
        self.weight: LossWeight | None = None
        self._exchanges = ThreadPoolExecutor(1, "gradients")  # one thread: collective calls keep their order
        self.settle()

    def settle(self) -> None:
        """Forget a backward pass that failed half-way. Called while no backward pass runs."""
        self.tasks: set[int] = set()
        self.running: list[ModelPass] = []
        self.reached: list[ExchangingModel] = []

    def enter(self) -> None:
        """Join the backward pass that runs in this thread, or begin it.

        Raises:
            StrategyError: If the pass is nested in an outer pass in which no model of this object takes part. No
                callback could be queued for the end of the outer pass.
        """
        if (task := torch._C._current_graph_task_id()) in self.tasks:
            return
        if not is_nested():
            self.settle()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        elif not self.tasks:
            raise StrategyError(
                "a DistributedModel takes part in a backward pass inside another one: a reentrant checkpoint surrounds "
                "the model, or its module is called directly; use checkpoint(..., use_reentrant=False), or call the "
                "DistributedModel and checkpoint inside of it"
            )
        self.tasks.add(task)

    def begin_ready(self, passes: Sequence[ModelPass]) -> None:
        """Begin the exchanges that are ready, in the same order on all instances."""
        for model_pass in passes:
            model_pass.begun += [
                self._exchanges.submit(model_pass.model.reduce, bucket) for bucket in model_pass.ready()
            ]
            if not model_pass.has_left:
                return

    def _end(self) -> None:
        """Exchange the rest after a backward pass: last buckets and tails. Then each model applies its means."""
        passes, reached = self.running, self.reached
        self.settle()
        for model in reached:
            if all(model_pass.model is not model for model_pass in passes):
                model.ended_without_gradients()
        for model_pass in passes:
            model_pass.model.fill(model_pass)
        self.begin_ready(passes)
        for future in [future for model_pass in passes for future in model_pass.begun]:
            future.result()
        without_mean = None
        for model_pass in passes:
            try:
                model_pass.model.conclude()
            except WeightError as error:  # on all instances: the other models are concluded as usual
                without_mean = error
        if without_mean is not None:
            raise without_mean


_passes: WeakKeyDictionary[Communicator, BackwardPasses] = WeakKeyDictionary()


def passes_over(communicator: Communicator) -> BackwardPasses:
    """Return the `BackwardPasses` of the models that share a communicator."""
    return _passes.setdefault(communicator, BackwardPasses())


_STARTS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


def is_nested() -> bool:
    """Return whether the backward pass in this thread is nested in another one.

    For an accelerator, autograd computes in a thread of its own, which Python has not started, and whose stack does not
    show the outermost call.
    """
    frame: FrameType | None = sys._getframe()
    found = int(isinstance(threading.current_thread(), threading._DummyThread))
    while frame is not None and found < 2:
        found += frame.f_code in _STARTS
        frame = frame.f_back
    return found > 1


def is_returned(parameter: torch.Tensor) -> bool:
    """Return whether the running backward pass returns the gradient of a parameter, as `autograd.grad` does.

    PyTorch has no query for this, but raises an error for such a node.
    """
    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        return True
    return False
