"""The turns that local replicas take with one module: put its state back, compute, and compare a repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from strategies.errors import StrategyError
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.generators import Baton, Leave, kept_generators
from strategies.torch.replicas.guard import Compared, RepetitionGuard, WriteMarks, is_due, repeats_bits
from strategies.torch.replicas.module_parts import ModuleWatch
from strategies.torch.replicas.state import Attributes, ReplicaState

Results = TypeVar("Results", bound=Compared)

Gradients = list[torch.Tensor | None]
"""The gradients of the trained parameters; None for a parameter without one."""


@dataclass(frozen=True)
class TurnsOfStep:
    """The step in which replicas take turns.

    Attributes:
        step: The number of the step.
        number: One more than the number of steps that these replicas have made.
        replicas: The local replicas.
        device: The device on which they compute.
        is_repetition: Whether the step begins with the buffers of the last beginning, because an instance was lost.
    """

    step: int
    number: int
    replicas: range
    device: torch.device
    is_repetition: bool = False


class ReplicaTurns(Generic[Results]):
    """The turns of this instance's replicas with one module.

    Args:
        module: The module.
        watch: The watch over its parts.
        buffers: The buffers and frozen parameters on which replicas agree after a step.
        attributes: The attributes of which each replica has its own.
        count: The number of all replicas.

    Attributes:
        state: The state that is put back before each replica.
        guard: The comparison of a turn with its repetition.
    """

    def __init__(
        self, module: torch.nn.Module, watch: ModuleWatch, buffers: ModelBuffers, attributes: Attributes, count: int
    ) -> None:
        self._watch, self._count = watch, count
        self.state, self.guard = ReplicaState(buffers, attributes), RepetitionGuard(module)

    def repeats_in(self, step: TurnsOfStep) -> bool:
        """Return whether the first replica computes again in a step. One replica has no neighbours to disturb it."""
        return is_due(step.number) and self._count > 1 and repeats_bits(step.device)

    @contextmanager
    def of(self, replica: int, device: torch.device, leave: Leave = lambda: lambda: None) -> Iterator[None]:
        """Let this thread compute for a replica.

        Args:
            replica: The replica.
            device: Its device.
            leave: As for `Baton`.
        """
        with Baton(device, leave), self.guard.of_turn(), self.state.of(replica):
            yield

    def run(
        self,
        step: TurnsOfStep,
        turns: Sequence[Callable[[], tuple[Results, Gradients]]],
        again: Callable[[], tuple[Results, Gradients]],
        take: Callable[[int, Results, Gradients], object],
        context: AbstractContextManager[object] | None = None,
    ) -> None:
        """Let the local replicas compute, one after another.

        Args:
            step: The step.
            turns: The turn of each local replica, which returns its results and its gradients.
            again: Repeats the first turn.
            take: Takes the place of a replica among the local ones, its results and its gradients.
            context: A context around the repetition.

        Raises:
            StrategyError: If a replica has changed the parts of the module, or written a parameter that all share.
        """
        is_repeated, state, names = self.repeats_in(step), self.state, self._names
        of_step = state.of_step(step.step, step.replicas, step.is_repetition)
        with kept_generators(step.device), of_step, self.guard.watching(is_repeated):
            marks = WriteMarks(state.shared(self._watch.named) if self._count > 1 else [], is_repeated)
            are_trained = [one.requires_grad for one in self._watch.parameters]
            for place, turn in enumerate(turns):
                results, gradients = turn()
                self._check_parts_unchanged()
                self._check_trained_unchanged(are_trained)
                if is_repeated and not place:
                    self.guard.keep(results, gradients, names)
                take(place, results, gradients)
                del gradients
            if is_repeated:
                after = state.attributes.view()
                state.attributes.put(state.view_before)
                try:
                    with context or nullcontext():
                        self.guard.compare(step.replicas.start, again, names)
                finally:
                    state.attributes.put(after)
            marks.check()

    def _check_parts_unchanged(self) -> None:
        if self._watch.has_other_parts:
            raise StrategyError(
                "a forward pass has added, removed or replaced a part of the module, so other replicas would begin "
                "with another module; call the module once before the training, or change it between steps"
            )

    def _check_trained_unchanged(self, are_trained: Sequence[bool]) -> None:
        """Raise if a turn has frozen or thawed a parameter, and undo it."""
        named = [(name, one, was) for (name, one), was in zip(self._watch.named, are_trained, strict=True)]
        changed = [(name, one.requires_grad_(was)) for name, one, was in named if one.requires_grad != was]
        if changed:
            name, parameter = changed[0]
            raise StrategyError(
                f"a forward pass has {'frozen' if parameter.requires_grad else 'thawed'} {name}, but a step needs "
                "the same trained parameters from its beginning to its end; call requires_grad_ between steps"
            )

    @property
    def _names(self) -> list[str]:
        return [name for name, one in self._watch.named if one.requires_grad]
