"""Backward passes of autograd through models in a training loop: hooks, warnings, and the order of exchanges."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from collectives import Communicator
from strategies.errors import StrategyError, WeightError
from strategies.torch.distributed_model.weights import Named, Weighing
from strategies.torch.exchange.plan import TorchGradientPlan
from strategies.torch.outcomes import weighted_loss

Complete = Callable[[torch.Tensor], None]
"""(parameter whose gradient is complete) -> None. Called by autograd."""


class GradientHooks:
    """The hooks on a module's parameters. They end with this object.

    Args:
        arrived: A method that gets each parameter. Only a weak reference to it is kept, so its object can be freed.
    """

    def __init__(self, arrived: Complete) -> None:
        self._told = partial(_tell, weakref.WeakMethod(arrived))
        self._hooks: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        weakref.finalize(self, _remove, self._hooks)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._hooks

    def follow(self, named: Named) -> None:
        """Add hooks to new parameters, and remove those of parameters that are gone."""
        for gone in self._hooks.keys() - {id(one) for _, one in named}:
            self._hooks.pop(gone)[1].remove()
        for _, one in named:
            if one in self or not one.is_leaf or not (one.is_floating_point() or one.is_complex()):
                continue
            is_trained = one.requires_grad
            one.requires_grad_(True)  # PyTorch refuses hooks on frozen parameters, which may be thawed later
            self._hooks[id(one)] = one, one.register_post_accumulate_grad_hook(self._told)
            one.requires_grad_(is_trained)


def _tell(method: weakref.WeakMethod[Complete], parameter: torch.Tensor) -> None:
    if (arrived := method()) is not None:
        arrived(parameter)


def _remove(hooks: Mapping[int, tuple[torch.Tensor, RemovableHandle]]) -> None:
    for _, hook in hooks.values():
        hook.remove()


_GRAD, _CALL = "torch.autograd.grad", "torch.func.functional_call"  # functions that a warning is about

_MOST = 3  # parameters named in that warning


class LocalGradients:
    """The warnings of one model, each given once, to the caller of a function of PyTorch."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._nodes: dict[str, Node] = {}  # autograd's nodes that add to gradients of parameters

    def follow(self, named: Named) -> None:
        """Know the parameters that the model has now."""
        self._nodes = {
            name: torch.autograd.graph.get_gradient_edge(one).node for name, one in named if one.requires_grad
        }

    def warn_if_returned(self) -> None:
        """Warn if the running backward pass returns gradients of parameters instead of accumulating them."""
        if _GRAD in self._warned:
            return
        names = [name for name, node in self._nodes.items() if _is_returned(node)]
        if names:
            self._warn(
                _GRAD,
                f"{_GRAD} has returned gradients of {', '.join(names[:_MOST])} of a DistributedModel, which are "
                "those of this instance alone; backward() averages the gradients that it adds to parameters",
            )

    def warn_of_others(self) -> None:
        """Warn that other tensors stand in for the parameters."""
        self._warn(
            _CALL,
            f"other tensors replace the parameters of a DistributedModel, as in {_CALL}; their gradients are not "
            "averaged: they are the gradients of this instance alone",
        )

    def _warn(self, function: str, message: str) -> None:
        if function not in self._warned:
            self._warned.add(function)
            warnings.warn(message, UserWarning, stacklevel=7)


def _is_returned(node: Node) -> bool:
    """Return whether the running backward pass returns the gradient of a node, as `autograd.grad` does.

    PyTorch has no query for this, but raises an error for such a node.
    """
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


_STARTS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


class ExchangingModel(Protocol):
    """A model whose gradients are exchanged. `BackwardPasses` calls its methods in the order below.

    `backward()` raises the first error of a method, and no further model is concluded, except after a `WeightError`.
    """

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters of the model."""

    def look_before(self) -> None:
        """Look at the gradients before a backward pass with a weight, which may go through the model or not."""

    def look_after(self) -> None:
        """Look at the gradients after a backward pass with a weight."""

    def reduce(self, bucket: int) -> None:
        """Exchange one bucket. Called in the exchange thread, or while that thread is idle. Collective."""

    def fill(self, model_pass: ModelPass) -> None:
        """Take the gradients that were not taken during the backward pass. Called once, when the pass has ended."""

    def conclude(self, model_pass: ModelPass) -> None:
        """Exchange the last bucket and apply the results. Called last, while the exchange thread is idle."""

    def ended_without_gradients(self) -> None:
        """Handle a backward pass through the model's outputs that has accumulated no gradient in its parameters."""


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


class BackwardPass:
    """One call of `backward`, with the calls nested in it, as reentrant checkpoints make them.

    Args:
        task: The number that autograd has given to the outermost call.

    Attributes:
        tasks: The numbers of all these calls.
        passes: The models that take part, in the order in which their first gradients were complete.
        reached: The models through whose outputs the backward pass went.
    """

    def __init__(self, task: int) -> None:
        self.tasks = {task}
        self.passes: list[ModelPass] = []
        self.reached: list[ExchangingModel] = []


class BackwardPasses:
    """The backward passes of all models that share a communicator.

    While a backward pass runs, gradients leave model by model, in the order in which the models' first gradients were
    complete. If that order differs between instances, so do the names of the collectives, and all instances raise.

    Attributes:
        models: The number of models that have shared the communicator so far.
        members: The models that share it now.
        weighing: The weight of the backward pass that runs.
    """

    def __init__(self) -> None:
        self.models = 0
        self.members: WeakSet[ExchangingModel] = WeakSet()
        self.weighing = Weighing()
        self._exchanges = ThreadPoolExecutor(1, "gradients")  # one thread: collective calls keep their order
        self._running: BackwardPass | None = None

    def settle(self) -> None:
        """Forget a backward pass that failed half-way. Called while no backward pass runs."""
        self._running = None

    def enter(self) -> BackwardPass:
        """Return the backward pass that runs in this thread.

        Raises:
            StrategyError: If the pass is nested in an outer pass in which no model of this object takes part. No
                callback could be queued for the end of the outer pass.
        """
        task, running = torch._C._current_graph_task_id(), self._running
        if running is not None and task in running.tasks:
            return running
        if is_nested():
            if running is None:
                raise StrategyError(
                    "a DistributedModel takes part in a backward pass inside another one: a reentrant checkpoint "
                    "surrounds the model, or its module is called directly; use "
                    "checkpoint(..., use_reentrant=False), or call the DistributedModel and checkpoint inside of it"
                )
            running.tasks.add(task)
            return running
        self._running = running = BackwardPass(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, running))
        return running

    def weighted_backward(self, loss: torch.Tensor, weight: float, keeps_graph: bool, zeroes: bool) -> None:
        """Run the backward pass of a loss with a weight, through all models.

        Args:
            loss: A scalar.
            weight: The weight, as it travels.
            keeps_graph: Whether the graph stays for another pass.
            zeroes: Whether gradients become zeros, even those that are not finite.
        """
        models = list(self.members)
        for model in models:
            model.look_before()
        parameters = [one for model in models for one in model.parameters] if zeroes else []
        with self.weighing.of(weight, parameters):
            weighted_loss(loss, weight).backward(retain_graph=keeps_graph)
        for model in models:
            model.look_after()

    def begin_ready(self) -> None:
        """Begin the exchanges that are ready, in the same order on all instances."""
        assert self._running is not None
        self._begin_ready(self._running.passes)

    def _begin_ready(self, passes: Sequence[ModelPass]) -> None:
        for model_pass in passes:
            model_pass.begun += [
                self._exchanges.submit(model_pass.model.reduce, bucket) for bucket in model_pass.ready()
            ]
            if not model_pass.has_left:
                return

    def _end(self, ended: BackwardPass) -> None:
        """Exchange the rest after a backward pass: last buckets and tails. Then each model applies its means."""
        self._running = None
        passes = ended.passes
        for model in ended.reached:
            if all(model_pass.model is not model for model_pass in passes):
                model.ended_without_gradients()
        for model_pass in passes:
            model_pass.model.fill(model_pass)
        self._begin_ready(passes)
        for future in [future for model_pass in passes for future in model_pass.begun]:
            future.result()
        without_mean = None
        for model_pass in passes:
            try:
                model_pass.model.conclude(model_pass)
            except WeightError as error:  # on all instances: the other models are concluded as usual
                without_mean = error
        if without_mean is not None:
            raise without_mean


_passes: WeakKeyDictionary[Communicator, BackwardPasses] = WeakKeyDictionary()


def passes_over(communicator: Communicator) -> BackwardPasses:
    """Return the `BackwardPasses` of the models that share a communicator."""
    return _passes.setdefault(communicator, BackwardPasses())


def is_nested() -> bool:
    """Return whether the backward pass in this thread is nested in another one.

    For an accelerator, autograd computes in a thread of its own, whose stack does not show the outermost call.
    """
    frame: FrameType | None = sys._getframe()
    found = int(_is_of_autograd())
    while frame is not None and found < 2:
        found += frame.f_code in _STARTS
        frame = frame.f_back
    return found > 1


def _is_of_autograd() -> bool:
    """Return whether autograd, not Python, has started the current thread."""
    return isinstance(threading.current_thread(), threading._DummyThread)
