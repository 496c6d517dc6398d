"""The backward passes of autograd in which models of a loop take part, and the order in which these exchange."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from collectives import Communicator
from strategies.errors import StrategyError
from strategies.torch.gradient_exchange import TorchGradientPlan

_STARTS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


class Model(Protocol):
    """A model whose gradients are exchanged."""

    def reduce(self, bucket: int) -> None:
        """Exchange one bucket; called in the thread of exchanges, or while that has nothing to do."""

    def fill(self, model_pass: ModelPass) -> None:
        """Take the gradients that have not been taken while the backward pass ran."""

    def conclude(self, model_pass: ModelPass) -> None:
        """Exchange the last bucket and what follows from it; the thread of exchanges has nothing to do."""

    def ended_without_gradients(self) -> None:
        """Take note of a backward pass through the model's outputs in which no gradient was accumulated."""


class ModelPass:
    """One model in one backward pass.

    Attributes:
        came: the ids of the parameters whose gradients have come.
        taken: the numbers of those whose gradients are on their way.
        begun: the exchanges that have begun.
    """

    def __init__(self, model: Model, plan: TorchGradientPlan | None, tasks: set[int]) -> None:
        self.model, self.tasks = model, tasks
        self.came: set[int] = set()
        self.taken: set[int] = set()
        self.begun: list[Future[None]] = []
        self._plan = plan
        self._missing = [len(numbers) for numbers in plan.members] if plan else [0]
        self._next = 0

    def take(self, number: int) -> None:
        """Note that the gradient of a parameter was taken, by its number in the plan."""
        assert self._plan is not None
        self.taken.add(number)
        self._missing[self._plan.places[number].bucket] -= 1

    def ready(self) -> Iterator[int]:
        """Yield the buckets to be exchanged now, each once; the last one waits for its tail."""
        while not self.has_left and not self._missing[self._next]:
            self._next += 1
            yield self._next - 1

    @property
    def has_left(self) -> bool:
        """Whether all buckets but the last one have begun."""
        return self._next == len(self._missing) - 1


class BackwardPass:
    """One call of `backward`, with all that are nested in it, as in reentrant checkpoints.

    Args:
        task: the number that autograd has given to the outermost call.

    Attributes:
        tasks: the numbers of all calls.
        passes: of the models that take part, in the order in which their first gradients have come.
        reached: the models through whose outputs it went.
    """

    def __init__(self, task: int) -> None:
        self.tasks = {task}
        self.passes: list[ModelPass] = []
        self.reached: list[Model] = []


class BackwardPasses:
    """A follower of the backward passes of all models that share a communicator.

    Gradients that leave while a backward pass runs do so model by model, in the order in which the first gradients have
    come. Where that order differs between instances, the names of the collectives do, and all raise.

    Attributes:
        models: how many have shared the communicator so far.
    """

    def __init__(self) -> None:
        self.models = 0
        self._exchanges = ThreadPoolExecutor(1, "gradients")  # one thread: collective calls keep their order
        self._running: BackwardPass | None = None

    def settle(self) -> None:
        """Forget a backward pass that has failed half-way; called where none runs."""
        self._running = None

    def enter(self) -> BackwardPass:
        """Return the backward pass that runs in this thread.

        Raises:
            StrategyError: if it is nested in one that has not been seen, whose end would not be noticed.
        """
        task, running = torch._C._current_graph_task_id(), self._running
        if running is not None and task in running.tasks:
            return running
        if is_nested():
            if running is None:
                raise StrategyError(
                    "a DistributedModel takes part in a backward pass inside of another one, as of a reentrant "
                    "checkpoint around the model, or in a module that is called by itself; use "
                    "checkpoint(..., use_reentrant=False), or call the DistributedModel and checkpoint inside of it"
                )
            running.tasks.add(task)
            return running
        self._running = running = BackwardPass(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, running))
        return running

    def begin_ready(self) -> None:
        """Begin the exchanges that are ready, in an order that all instances share."""
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
        """Exchange what is left when a backward pass has ended: the last buckets, tails and means of each model."""
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
        for model_pass in passes:
            model_pass.model.conclude(model_pass)


_passes: WeakKeyDictionary[Communicator, BackwardPasses] = WeakKeyDictionary()


def passes_over(communicator: Communicator) -> BackwardPasses:
    """Return the `BackwardPasses` of the models that share a communicator."""
    return _passes.setdefault(communicator, BackwardPasses())


def is_nested() -> bool:
    """Return whether the backward pass that runs in this thread was begun by another one.

    Autograd computes on an accelerator in a thread of its own, where the outermost call is not to be seen.
    """
    frame: FrameType | None = sys._getframe()
    found = int(_is_of_autograd())
    while frame is not None and found < 2:
        found += frame.f_code in _STARTS
        frame = frame.f_back
    return found > 1


def _is_of_autograd() -> bool:
    """Return whether this thread was not started by Python, as those of autograd."""
    return isinstance(threading.current_thread(), threading._DummyThread)
