"""The state of a module that a replica changes: buffers, frozen parameters and attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import torch

from strategies.torch.replicas.attributes import Attributes, AttributeView
from strategies.torch.replicas.buffers import ModelBuffers
from strategies.torch.replicas.module_parts import Slot, difference, differs

Changes = Sequence[float | torch.Tensor]
"""For each slot, whether a replica has changed it: 0 or 1, and more if its shape has changed. A boolean on the device
if the host does not know."""


class _KeptSlot:
    """A slot that replicas may change, and its value at the beginning of the step."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.value = slot.tensor.detach().clone()
        self.mark = self.now

    @property
    def now(self) -> tuple[int, int, int]:
        """A mark that another write or another tensor changes. Writes through `data` do not."""
        tensor = self.slot.tensor
        return id(tensor), tensor.data_ptr(), tensor._version

    def begin(self) -> None:
        """Take the present value as that of the beginning."""
        tensor = self.slot.tensor.detach()
        if self.value.shape == tensor.shape and self.value.dtype == tensor.dtype:
            self.value.copy_(tensor)
        else:
            self.value = tensor.clone()
        self.mark = self.now


@final
class ReplicaState:
    """The state that local replicas change, and that is put back before each of them.

    Args:
        buffers: The buffers and frozen parameters on which replicas agree after a step.
        attributes: The attributes of the module.
        may_repeat: Whether a step may be repeated, because the job goes on without a lost instance.

    Attributes:
        buffers: The given buffers.
        attributes: The given attributes.
        written: The names of the frozen parameters that replicas have written.
    """

    def __init__(self, buffers: ModelBuffers, attributes: Attributes, may_repeat: bool = False) -> None:
        self.buffers, self.attributes = buffers, attributes
        self._may_repeat = may_repeat
        self._kept: dict[int, _KeptSlot] = {}  # by the number of the slot
        self._slots: Sequence[Slot] = ()
        self._own: Mapping[int, torch.Tensor] = {}
        self._are_several = False
        self._view: AttributeView | None = None  # at the beginning of the step
        self._after: AttributeView | None = None  # after its turns
        self._step: int | None = None
        self.written: set[str] = set()
        self._is_fresh = True

    # ---- a step

    @contextmanager
    def of_step(self, step: int, replicas: range, keeps_frozen: bool, is_repetition: bool = False) -> Iterator[None]:
        """Keep the state for a step, and put buffers and frozen parameters back at its end.

        If the last step had the same number, this one is its repetition, and attributes begin as they did then.

        Args:
            step: The number of the step.
            replicas: The local replicas.
            keeps_frozen: Whether to keep the frozen parameters too that no replica is known to write.
            is_repetition: Whether to begin with the buffers and frozen parameters of the last beginning.
        """
        if step == self._step and self._view is not None and self._after is not None:
            self.attributes.undo(self._view, self._after)
        self.attributes.begin(replicas)  # before the view, with which the first replica begins again
        self._step, self._view = step, self.attributes.view()
        self._are_several = len(replicas) > 1
        if is_repetition:
            self._is_fresh = False
            self._put_back()
        else:
            self._keep(keeps_frozen)
        try:
            yield
        except BaseException:
            self.attributes.put(self._view)
            self._view = None
            raise
        else:
            self.attributes.note(self._view)
            self._after = self.attributes.view() if self._may_repeat else None
            self._view = self._view if self._may_repeat else None  # it refers to values of the last step
        finally:
            self._put_back()

    def _keep(self, keeps_frozen: bool) -> None:
        buffers = self.buffers
        buffers.follow_shown()
        if buffers.slots is not self._slots:
            self._slots, self._kept = buffers.slots, {}
        self._own = buffers.own
        written = self.written | buffers.written
        with torch.no_grad():
            for number, slot in enumerate(self._slots):
                if slot.is_parameter and not keeps_frozen and slot.name not in written:
                    self._kept.pop(number, None)
                elif number in self._kept:
                    self._kept[number].begin()
                else:
                    self._kept[number] = _KeptSlot(slot)
        self._is_fresh = True

    def _put_back(self) -> None:
        if not self._is_fresh:
            with torch.no_grad():
                for kept in self._kept.values():
                    kept.slot.put(kept.value)
            self._is_fresh = True

    # ---- a replica

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Let the module be that of a replica in a step."""
        self._put_back()
        for number, own in self._own.items():
            with torch.no_grad():
                self._kept[number].slot.put(own[replica])
        self._is_fresh = False
        for kept in self._kept.values():
            kept.mark = kept.now
        with ExitStack() as stack:
            if self._are_several:
                stack.enter_context(self.attributes.of(replica))
            yield
        for kept in self._kept.values():
            if kept.slot.is_parameter and kept.now != kept.mark:
                self.written.add(kept.slot.name)

    def changes(self, replica: int, moving: frozenset[int], replicas: int, waits: bool = True) -> Changes:
        """Return which slots a replica has changed, when its passes have ended.

        Args:
            replica: The replica.
            moving: The numbers of the slots that are known to change.
            replicas: The number of all replicas.
            waits: Whether to wait for a device.
        """
        found: list[float | torch.Tensor] = [0.0] * len(self._slots)
        for number, kept in self._kept.items():
            tensor, value = kept.slot.tensor, self._beginning(number, replica)
            if tensor.shape != value.shape:
                found[number] = 2.0 * replicas  # with this term, the mean over replicas is above 1
            elif number in moving:
                found[number] = 1.0
            else:
                found[number] = float(differs(tensor, value)) if waits else difference(tensor, value)
        return found

    def _beginning(self, number: int, replica: int) -> torch.Tensor:
        own = self._own.get(number)
        return self._kept[number].value if own is None else own[replica]

    def slots(self, changes: Changes) -> list[Slot]:
        """Return the slots of a replica, with copies of those that it may have changed."""
        pairs = zip(self._slots, changes, strict=True)
        return [slot if isinstance(one, float) and not one else slot.copied() for slot, one in pairs]

    @property
    def kept_names(self) -> frozenset[str]:
        """The names of the buffers and frozen parameters that replicas may write in this step."""
        return frozenset(kept.slot.name for kept in self._kept.values())

    @property
    def view_before(self) -> AttributeView:
        """The attributes at the beginning of the step."""
        assert self._view is not None
        return self._view

    # ---- while another replica computes

    def leave(self) -> tuple[list[tuple[Slot, torch.Tensor]], AttributeView]:
        """Take the state of a replica away, which waits for others. The module has the attributes of the beginning."""
        slots = [(kept.slot, kept.slot.tensor.detach().clone()) for kept in self._kept.values()]
        view = self.attributes.view()
        self.attributes.put(self.view_before, of_all=False)
        return slots, view

    def come_back(self, left: tuple[list[tuple[Slot, torch.Tensor]], AttributeView]) -> None:
        """Give the module the state that a replica has left."""
        with torch.no_grad():
            for slot, value in left[0]:
                slot.put(value)
        self.attributes.put(left[1], of_all=False)
