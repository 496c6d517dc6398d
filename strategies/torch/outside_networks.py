"""Detection of writes to networks that a loss function uses besides the module of the trainer.

The replicas of an instance share the one network and use it at the same time. Each instance has its own network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import is_

import torch

from strategies.errors import StrategyError
from strategies.torch.left_gradients import LeftGradients
from strategies.torch.module_parts import Slot, all_slots_of
from strategies.torch.parameter_writes import WrittenBits
from strategies.torch.reached_networks import networks_outside
from strategies.torch.tensors import have_same_bits

_MOST_BYTES = 64 << 20
"""Limit for the buffers whose bits are compared."""
_WITH_BITS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class _Watched:
    """A tensor of a network.

    Attributes:
        slot: The place of the tensor.
        owner: The network in words.
        is_original: Whether the tensor belongs to the module that was given to the trainer.
    """

    slot: Slot
    owner: str
    is_original: bool


class OutsideNetworks:
    """A watcher of the tensors of networks that replicas share: of the original module, and of those outside of it.

    PyTorch counts most writes to a tensor, so its counters are compared in every step. Batch normalization does not
    count the writes to its moving statistics. In steps 1, 2, 4, 8 and so on, networks are searched anew, and the bits
    of their buffers are compared, too.

    Args:
        module: The module that was given to the trainer.
        copies: The copies of the local replicas, which may be written.
        functions: The program's functions that replicas call, each by the name of the argument.
    """

    def __init__(
        self, module: torch.nn.Module, copies: Sequence[torch.nn.Module], functions: Mapping[str, object]
    ) -> None:
        self._module = module
        self._copies = copies
        self._functions = functions
        self._steps = 0
        self._watched: list[_Watched] = []
        self._places: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        self._tensors: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._bits: list[tuple[list[int], WrittenBits]] = []
        self._parameters: list[tuple[torch.Tensor, str]] = []
        self._gradients = LeftGradients()

    def begin(self) -> None:
        """Record the tensors before the replicas compute."""
        self._steps += 1
        is_power_of_two = not self._steps & (self._steps - 1)
        if is_power_of_two:
            self._watched = list(_watched(self._module, self._copies, self._functions))
            self._places = [(one.slot.holder, one.slot.key) for one in self._watched]
            self._parameters = list(_outside_parameters(self._watched))
        self._gradients.begin(self._parameters)
        self._tensors = _tensors_at(self._places)
        self._versions = _versions_of(self._tensors)
        self._bits = list(self._new_bits()) if is_power_of_two else []
        for _, bits in self._bits:
            bits.begin()

    def _new_bits(self) -> Iterator[tuple[list[int], WrittenBits]]:
        """Yield the numbers of buffers outside of the module, up to a limit of bytes, and their bits, by device."""
        left, chosen = _MOST_BYTES, list[tuple[str, int]]()
        for number, (one, tensor) in enumerate(zip(self._watched, self._tensors, strict=True)):
            if tensor is not None and not (one.is_original or one.slot.is_parameter) and _has_bits(tensor):
                left -= tensor.nbytes
                if left >= 0:
                    chosen.append((str(tensor.device), number))
        for _, group in groupby(sorted(chosen), key=lambda each: each[0]):
            numbers = [number for _, number in group]
            yield numbers, WrittenBits([one for one in map(self._tensors.__getitem__, numbers) if one is not None])

    def refuse_writes(self) -> None:
        """Raise if a tensor was written or replaced since `begin`; remember gradients that were left.

        Raises:
            StrategyError: If that has happened. The message names the first tensor.
        """
        written = {numbers[place] for numbers, bits in self._bits for place in bits.written()}
        now = _tensors_at(self._places)
        if _versions_of(now) != self._versions or not all(map(is_, now, self._tensors)):
            written.update(self._changed(now))
        self._tensors, self._bits = [], []
        self._gradients.end()
        if written:
            _refuse(self._watched[min(written)])

    def _changed(self, now: Sequence[torch.Tensor | None]) -> Iterator[int]:
        """Yield the numbers of the tensors that were written, or replaced by others with other bits."""
        of_old = _versions_of(self._tensors)
        for number, (old, new) in enumerate(zip(self._tensors, now, strict=True)):
            is_written = of_old[number] != self._versions[number]
            if is_written or (old is not new and not _have_same_bits(old, new)):
                yield number


def _outside_parameters(watched: Sequence[_Watched]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the trainable parameters of networks outside of the module, with their names in words."""
    for one in watched:
        tensor = one.slot.tensor
        if one.slot.is_parameter and not one.is_original and tensor is not None and tensor.requires_grad:
            yield tensor, f"the parameter {one.slot.name} of {one.owner}"


def _refuse(one: _Watched) -> None:
    name = f"the {'parameter' if one.slot.is_parameter else 'buffer'} {one.slot.name}"
    if one.is_original:
        raise StrategyError(
            f"replicas have written {name} of the module that was given to the Trainer, and not of their copies. The "
            "loss function, a hook or an attribute of the module refers to that module; use the first argument of the "
            "loss function instead"
        )
    way_out = (
        "write it between steps, or put both networks into the Trainer's module"
        if one.slot.is_parameter
        else "put both networks into the Trainer's module, for example with torch.nn.ModuleDict, or call .eval() on "
        "the outside network"
    )
    raise StrategyError(
        f"replicas have written {name} of {one.owner}, which is outside of the Trainer's module. Local replicas share "
        "this network and write to it at the same time, and each instance has its own network. So the training depends "
        f"on timing and on the spread of the replicas; {way_out} (docs: torch_modules, Networks "
        "outside of the module)"
    )


def _tensors_at(places: Sequence[tuple[Mapping[str, torch.Tensor | None], str]]) -> list[torch.Tensor | None]:
    """Return the tensors at places; None if a tensor was deleted. The holders of scripted modules have no `get`."""
    try:
        return [holder[key] for holder, key in places]
    except KeyError:
        return [holder[key] if key in holder else None for holder, key in places]  # noqa: SIM401


def _versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return [one._version for one in tensors]  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # None, or a tensor of `torch.inference_mode`, which has no counter
        return [0 if one is None or one.is_inference() else one._version for one in tensors]


def _have_same_bits(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Return whether a tensor was replaced by another one with the same bits, as `self.table.to(device)` does."""
    return old is not None and new is not None and have_same_bits(old.cpu(), new.cpu())


def _has_bits(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.dtype in _WITH_BITS and tensor.device.type != "meta"


def _watched(
    module: torch.nn.Module, copies: Sequence[torch.nn.Module], functions: Mapping[str, object]
) -> Iterator[_Watched]:
    """Yield the buffers of a module, and all tensors of the networks that functions reach outside of it."""
    seen = {id(slot.tensor) for one in copies for slot in all_slots_of(one)}
    for slot in all_slots_of(module):
        seen.add(id(slot.tensor))
        if not slot.is_parameter:  # other checks see writes to its parameters
            yield _Watched(slot, "", True)
    for path, network in networks_outside([module, *copies], functions):
        owner = f"{path or 'a network'} ({type(network).__name__})"
        for slot in all_slots_of(network):
            if id(slot.tensor) not in seen:
                seen.add(id(slot.tensor))
                yield _Watched(slot, owner, False)
