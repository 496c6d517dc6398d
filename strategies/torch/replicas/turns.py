"""The turns that local replicas take with one module: put its state back, compute, and compare a repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch

from strategies.errors import StrategyError
from strategies.torch.exchange.plan import Fact
from strategies.torch.replicas.attributes import Attributes, AttributeView
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.generators import Baton, ComeBack, Leave, kept_generators
from strategies.torch.replicas.guard import Compared, RepetitionGuard, WriteMarks, is_due, repeats_bits
from strategies.torch.replicas.module_parts import ModuleWatch, Slot, difference
from strategies.torch.tensors import return_unused_memory

Results = TypeVar("Results", bound=Compared)

Gradients = list[torch.Tensor | None]
"""The gradients of the trained parameters; None for a parameter without one."""

Turn: TypeAlias = Callable[[], tuple[Results, Gradients]]
"""() -> the results and the gradients of a replica that computes."""

Changes = Sequence[Fact]
"""For each slot, whether a replica has changed it: 0 or 1, and more if its shape has changed. A boolean on the device
if the host does not know."""


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
    """The turns of this instance's replicas with one module, whose state is put back before each of them.

    Args:
        module: The module.
        watch: The watch over its parts.
        buffers: The buffers and frozen parameters on which replicas agree after a step.
        attributes: The attributes of which each replica has its own.
        count: The number of all replicas.

    Attributes:
        guard: The comparison of a turn with its repetition.
    """

    def __init__(
        self, module: torch.nn.Module, watch: ModuleWatch, buffers: ModelBuffers, attributes: Attributes, count: int
    ) -> None:
        self._watch, self._buffers, self._attributes, self._count = watch, buffers, attributes, count
        self.guard = RepetitionGuard(module)
        self._slots: Sequence[Slot] = ()
        self._kept: dict[int, torch.Tensor] = {}  # the values at the beginning of the step, by the number of the slot
        self._own: Mapping[int, torch.Tensor] = {}
        self._have_own = False  # whether replicas have attributes of their own
        self._written: dict[int, set[str]] = {}  # by replica, the frozen parameters that it has written
        self._marks: dict[int, WriteMarks] = {}  # since it began or came back
        self._view: AttributeView | None = None  # at the beginning of the step
        self._after: AttributeView | None = None  # after its turns
        self._step: int | None = None
        self._is_fresh = True

    # ---- a step

    def repeats_in(self, step: TurnsOfStep) -> bool:
        """Return whether the first replica computes again in a step. One replica has no neighbours to disturb it."""
        return is_due(step.number) and self._count > 1 and repeats_bits(step.device)

    def run(
        self,
        step: TurnsOfStep,
        turns: Sequence[Turn[Results]],
        again: Turn[Results],
        take: Callable[[int, Results, Gradients], object],
        context: AbstractContextManager[object] | None = None,
    ) -> None:
        """Let the local replicas compute, one after another.

        Args:
            step: The step.
            turns: The turn of each local replica.
            again: Repeats the first turn.
            take: Takes the place of a replica among the local ones, its results and its gradients.
            context: A context around the repetition.

        Raises:
            StrategyError: If a replica has changed the parts of the module, or written a parameter that all share.
        """
        is_repeated = self.repeats_in(step)
        if is_due(step.number):
            return_unused_memory()
        with kept_generators(step.device), self._of_step(step) as view, self.guard.watching(is_repeated):
            names = [name for name, one in self._watch.named if one.requires_grad]
            kept = {self._slots[number].name for number in self._kept}
            shared = [pair for pair in self._watch.named if pair[0] not in kept]
            marks = WriteMarks(shared if self._count > 1 else [], is_repeated)
            are_trained = [one.requires_grad for one in self._watch.parameters]
            # Every other time at once: after all of them, a counter modulo their number would be the same again.
            repeated_after = len(turns) - 1 if step.number.bit_length() % 2 else 0
            for place, turn in enumerate(turns):
                results, gradients = turn()
                self._check_parts_unchanged()
                self._check_trained_unchanged(are_trained)
                if is_repeated and not place:
                    self.guard.keep(results, gradients, names)
                take(place, results, gradients)
                del gradients
                if is_repeated and place == repeated_after:
                    after = self._attributes.view()
                    self._attributes.put(view)
                    try:
                        with context or nullcontext():
                            self.guard.compare(step.replicas.start, again, names)
                    finally:
                        self._attributes.put(after)
            marks.check()

    @contextmanager
    def _of_step(self, step: TurnsOfStep) -> Iterator[AttributeView]:
        """Keep the state for a step, and put buffers and frozen parameters back at its end. Yield the attributes.

        If the last step had the same number, this one is its repetition, and attributes begin as they did then.
        """
        self.undo(step.step)
        self._have_own = self._attributes.begin(step.replicas)  # before the view, with which the first one begins again
        self._step, self._view = step.step, self._attributes.view()
        if step.is_repetition:
            self._is_fresh = False
            self._put_back()
        else:
            self._keep()
        try:
            yield self._view
        except BaseException:
            self._attributes.put(self._view)
            self._view = None
            raise
        else:
            self._attributes.end()
            self._after = self._attributes.note(self._view)
        finally:
            self._put_back()

    def undo(self, step: int) -> None:
        """Take back what the turns of a step have assigned, if it was begun but interrupted."""
        if step == self._step and self._view is not None and self._after is not None:
            self._attributes.undo(self._view, self._after)

    def applied(self) -> None:
        """Drop what `undo` needs, which refers to values of the last step."""
        self._view = self._after = None

    def _keep(self) -> None:
        """Keep the buffers, and the frozen parameters that replicas may write: in a first step that is not known."""
        buffers = self._buffers
        buffers.follow_shown()
        if buffers.slots is not self._slots:
            self._slots, self._kept = buffers.slots, {}
        self._own, written = buffers.own, buffers.written
        for number, slot in enumerate(self._slots):
            if slot.is_parameter and buffers.are_known and slot.name not in written:
                self._kept.pop(number, None)
            else:
                self._kept[number] = slot.copied(self._kept.get(number))
        self._is_fresh = True

    def _put_back(self) -> None:
        if not self._is_fresh:
            with torch.no_grad():
                for number, value in self._kept.items():
                    self._slots[number].put(value)
            self._is_fresh = True

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

    # ---- a replica

    @contextmanager
    def of(self, replica: int, device: torch.device, leave: Leave = lambda: lambda: None) -> Iterator[None]:
        """Let this thread compute for a replica, whose module it is then.

        Args:
            replica: The replica.
            device: Its device.
            leave: As for `Baton`.
        """
        with Baton(device, leave), self.guard.of_turn():
            self._put_back()
            with torch.no_grad():
                for number, own in self._own.items():
                    self._slots[number].put(own[replica])
            self._is_fresh = False
            self._written[replica] = set()
            self._mark(replica)
            with self._attributes.of(replica) if self._have_own else nullcontext():
                yield

    def _mark(self, replica: int) -> None:
        slots = [self._slots[number] for number in self._kept]
        self._marks[replica] = WriteMarks([(slot.name, slot.tensor) for slot in slots if slot.is_parameter])

    def _written_by(self, replica: int) -> set[str]:
        return self._written[replica] | self._marks[replica].counted()

    def ended(self, replica: int, waits: bool = True) -> tuple[Changes, list[Slot]]:
        """Return which slots a replica has changed, and its slots, when its passes have ended.

        Frozen parameters need only be written to count as changed. Slots that may have changed are copies, and others
        have the values of the beginning.

        Args:
            replica: The replica.
            waits: Whether to wait for a device.
        """
        changes: list[Fact] = [0.0] * len(self._slots)
        slots, moving, written = list(self._slots), self._buffers.moving, self._written_by(replica)
        for number, kept in self._kept.items():
            slot, before = slots[number], self._own[number][replica] if number in self._own else kept
            change: Fact = 1.0
            if slot.tensor.shape != before.shape:
                change = 2.0 * self._count  # with this term, the mean over replicas is above 1
            elif number not in moving and slot.name not in written:
                change = difference(slot.tensor, before, waits)
            is_same = isinstance(change, float) and not change
            changes[number] = change
            slots[number] = slot.holding(before if is_same else slot.copied())
        return changes, slots

    def leave(self, replica: int) -> ComeBack:
        """Take the state of a replica away, which waits for others, and return the way back.

        The module has the attributes of the beginning meanwhile.
        """
        assert self._view is not None
        self._written[replica] = self._written_by(replica)
        slots = [(self._slots[number], self._slots[number].copied()) for number in self._kept]
        view = self._attributes.view()
        self._attributes.put(self._view, of_all=False)

        def come_back() -> None:
            with torch.no_grad():
                for slot, value in slots:
                    slot.put(value)
            self._mark(replica)
            self._attributes.put(view, of_all=False)

        return come_back
