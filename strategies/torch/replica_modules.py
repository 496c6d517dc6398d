"""Copies of a module, one for each local replica: they share parameters and have their own buffers and attributes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import TypeVar

import torch

from strategies.errors import StrategyError
from strategies.torch.module_parts import (
    IN_PLACE,
    ModuleParts,
    Slot,
    compile_like,
    difference,
    differs,
    is_compiled_in_place,
    kept_contexts,
    slots_of,
)
from strategies.torch.parametrizations import cache_by_thread
from strategies.torch.replica_groups import part_of, row_of
from strategies.torch.replica_memory import ReplicaMemory

_Any = TypeVar("_Any")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_Hooks = dict[int, object]
_OF_PYTORCH = ("_parameters", "_buffers", "_modules", *_HOOKS)


class ReplicaModule:
    """A replica's copy of a module. Its parameters share memory with other replicas, but have gradients of their own.

    Changes that the program makes to the original between steps are made here too: to parameters and buffers, modes,
    hooks and attributes. Changes that the copy itself makes to attributes stay in the copy.

    Args:
        memory: The memory of the module, which is not changed, and of its replicas.
        replica: The global index of the replica.
        replicas: The number of all replicas.
        own: The names of the frozen parameters that the replica copies for itself; None for all of them, until `share`
            is called.

    Attributes:
        module: The copy.
        parameters: The copy's parameters, in the order of `original.named_parameters()`.
        rows: For each parameter, the replica's row; None if the replica has the whole parameter.
        slots: The copy's buffers and frozen parameters, in the order of `slots_of(original)`.

    Raises:
        TypeError: If the module cannot be copied.
        StrategyError: If a parameter does not have one row for each group of replicas.
    """

    def __init__(
        self, memory: ReplicaMemory, replica: int = 0, replicas: int = 1, own: frozenset[str] | None = None
    ) -> None:
        original, device = memory.module, memory.device
        named = list(original.named_parameters())
        self.rows = [row_of(name, parameter, replica, replicas) for name, parameter in named]
        frozen = frozenset(slot.name for slot in slots_of(original) if slot.is_parameter)
        self._own = frozen if own is None else own & frozen
        self._are_own = [name in self._own for name, _ in named]
        shared = {
            id(parameter): _parameter(part_of(mine, row), parameter.requires_grad, is_own)
            for (_, parameter), mine, row, is_own in zip(
                named, memory.parameters, self.rows, self._are_own, strict=True
            )
        }
        buffers = {id(one): one.detach().to(device, copy=True) for one in original.buffers()}
        self._memory = memory
        self._replicas = replicas
        self._shared = shared
        self.parameters = list(shared.values())
        cache_by_thread(original)
        self.module = _copied(original, {**shared, **buffers, **_recomputed(original), **kept_contexts(original)})
        self._pairs = _pairs(original, self.module)
        self._put_parameters()
        self.slots = slots_of(self.module)
        if [slot.name for slot in self.slots] != [slot.name for slot in slots_of(original)]:
            raise TypeError(_cannot_copy("its copy has other buffers"))
        for one, mine in self._pairs:
            if is_compiled_in_place(one):
                compile_like(mine, one)
        self._last = [dict(_plain_attributes(one)) for one, _ in self._pairs]
        self._seen = [dict(vars(one)) for one, _ in self._pairs]
        self._are_scripted = [isinstance(one, torch.jit.ScriptModule) for one, _ in self._pairs]
        self._version = memory.contents.version
        self._hooks = [[*_hooks_of(original, mine)] for original, mine in self._pairs]
        self._follow_hooks()
        self._parts = ModuleParts(self.module)

    def _put_parameters(self) -> None:
        """Put the shared parameters into the copy. A scripted module has copied its parameters."""
        for original, mine in self._pairs:
            if mine is original:
                raise TypeError(_cannot_copy(f"{type(original).__qualname__} is its own copy"))
            for key, parameter in original._parameters.items():
                meant = None if parameter is None else self._shared[id(parameter)]
                if mine._parameters[key] is not meant:
                    mine._parameters[key] = meant
        if list(map(id, self.module.parameters())) != list(map(id, self.parameters)):
            raise TypeError(_cannot_copy("its copy has other parameters"))

    def _is_own(self, slot: Slot) -> bool:
        return not slot.is_parameter or slot.name in self._own

    def share(self, all_but: frozenset[str]) -> None:
        """Share frozen parameters with the other replicas again, except those with these names."""
        if self._own - all_but:
            self._own &= all_but
            own = {id(slot.tensor) for slot in self.slots if self._is_own(slot)}
            self._are_own = [id(parameter) in own for parameter in self.parameters]
            self._follow_parameters()

    def begin_with(self, masters: Sequence[torch.Tensor]) -> None:
        """Take over buffers, and the frozen parameters that the replica has copied for itself."""
        with torch.no_grad():
            for slot, master in zip(self.slots, masters, strict=True):
                tensor = slot.tensor
                if not self._is_own(slot):
                    continue
                if tensor.shape == master.shape and not tensor.requires_grad:
                    tensor.copy_(master)
                elif slot.is_parameter:
                    tensor.data = master.detach().to(self._memory.device, copy=True)
                else:
                    slot.holder[slot.key] = master.detach().to(self._memory.device, copy=True)

    def changed(self, masters: Sequence[torch.Tensor], moving: frozenset[int]) -> list[float]:
        """Return, for each slot, whether its tensor has changed: 0 or 1, and more if its shape has changed.

        Args:
            masters: The tensors with which the replica began.
            moving: The numbers of the slots that are known to change.
        """
        return [float(one) for one in self._changes(masters, moving, differs)]

    def changes(self, masters: Sequence[torch.Tensor], moving: frozenset[int]) -> list[float | torch.Tensor]:
        """Return the result of `changed` without waiting for the device: an unknown value is a boolean there.

        Args:
            masters: The tensors with which the replica began.
            moving: The numbers of the slots that are known to change.
        """
        return list(self._changes(masters, moving, difference))

    def _changes(
        self,
        masters: Sequence[torch.Tensor],
        moving: frozenset[int],
        compare: Callable[[torch.Tensor, torch.Tensor], bool | torch.Tensor],
    ) -> Iterator[float | torch.Tensor]:
        for number, (slot, master) in enumerate(zip(self.slots, masters, strict=True)):
            if not self._is_own(slot):
                yield 0.0
            elif slot.tensor.shape != master.shape:
                yield 2.0 * self._replicas  # with this term, the mean over replicas is above 1
            else:
                yield 1.0 if number in moving else compare(slot.tensor, master)

    def refuse_other_parts(self) -> None:
        """Raise if the forward pass has replaced, added or removed parts of the replica's module."""
        if name := self._parts.changed():
            raise StrategyError(
                f"the forward pass of a replica has replaced, added or removed {name}, in its copy of the module only; "
                "make all modules, parameters and buffers before the Trainer, and change them in place"
            )

    def refuse_writes(self, numbers: Sequence[int]) -> None:
        """Raise if shared parameters were written while the replica computed. Its own copies may be written."""
        self._memory.refuse_writes([number for number in numbers if not self._are_own[number]])

    def follow(self) -> None:
        """Take over the program's changes to the original, except to its buffers."""
        self._follow_parameters()
        self._follow_attributes()
        self._follow_hooks()

    def _follow_parameters(self) -> None:
        memory = self._memory
        for mine, source, original, row, is_own in zip(
            self.parameters, memory.parameters, memory.originals, self.rows, self._are_own, strict=True
        ):
            part = source if row is None else part_of(source, row)
            if not is_own and (mine.data_ptr() != part.data_ptr() or mine.stride() != part.stride()):
                mine.data = part.detach()
            if mine.requires_grad is not original.requires_grad:
                mine.requires_grad_(original.requires_grad)

    def _follow_attributes(self) -> None:
        if self._memory.contents.version != self._version:
            self._follow_contents()
        followed = zip(self._pairs, self._last, self._seen, self._are_scripted, strict=True)
        for number, ((original, mine), last, seen, is_scripted) in enumerate(followed):
            now = vars(original)
            if not is_scripted and now.keys() == seen.keys() and all(map(is_, now.values(), seen.values())):
                continue  # this check takes 1 us, and comparing each attribute 10 us
            for name, value in _plain_attributes(original):
                if last.get(name, _Unknown) != value:
                    last[name] = value
                    setattr(mine, name, value)
            if not is_scripted:
                self._follow_others(original, mine, seen)
                known = self._hooks[number]
                self._hooks[number] = [*_hooks_of(original, mine, (keys for _, _, keys in known))]
                self._memory.contents.search()

    def _follow_contents(self) -> None:
        """Take over lists, dictionaries and objects whose contents have changed."""
        contents, memo = self._memory.contents, self._memo()
        for original, mine in self._pairs:
            for name, value in vars(original).items():
                if contents.changed_at.get(id(value), 0) > self._version:
                    vars(mine)[name] = _copied(value, memo)
        self._version = contents.version

    def _follow_others(self, original: torch.nn.Module, mine: torch.nn.Module, seen: dict[str, object]) -> None:
        """Copy new values of attributes other than numbers, strings and None."""
        now = vars(original)
        for name, value in now.items():
            if name == IN_PLACE:
                if value is not seen.get(name):
                    compile_like(mine, original)
            elif value is not seen.get(name, _Unknown) and not isinstance(value, _PLAIN) and name not in _OF_PYTORCH:
                vars(mine)[name] = _copied(value, self._memo(), name)
        for name in seen.keys() - now.keys():
            vars(mine).pop(name, None)
        seen.clear()
        seen.update(now)

    def _follow_hooks(self) -> None:
        """Add the hooks to the copy that the program has added to modules, and remove the hooks that it has removed."""
        for of_module in self._hooks:
            for now, own, known in of_module:
                if not now and not known:
                    continue
                for key in now.keys() - known:
                    own[key] = copy.deepcopy(now[key], self._memo())
                for key in known - now.keys():
                    del own[key]
                known.clear()
                known.update(now)

    def _memo(self) -> dict[int, object]:
        """Return a memo that makes `copy.deepcopy` replace the original's parts by the copy's."""
        return {**{id(original): mine for original, mine in self._pairs}, **self._shared}


def _parameter(part: torch.Tensor, is_trained: bool, is_own: bool) -> torch.nn.Parameter:
    """Make a parameter, in shared memory or its own. Setting `data` would share the write counter."""
    return torch.nn.Parameter(part.clone() if is_own else part, is_trained)


class _Unknown:
    """A default for `get` that differs from the value of every attribute."""


def _cannot_copy(why: str) -> str:
    return (
        f"the module cannot be copied for a replica: {why}; keep objects that cannot be copied, such as open files and "
        "computed tensors, out of its attributes"
    )


def _copied(original: _Any, memo: dict[int, object], name: str = "") -> _Any:
    try:
        return copy.deepcopy(original, memo)
    except (TypeError, RuntimeError) as error:
        if isinstance(original, torch.nn.Module):
            name = next(filter(None, itertools.starmap(_that_fails, original.named_modules())), name)
        raise TypeError(_cannot_copy(f"{name}: {error}" if name else str(error))) from error


def _that_fails(prefix: str, module: torch.nn.Module) -> str | None:
    """Return the name of the first attribute of a module that cannot be copied, or None."""
    for name, value in vars(module).items():
        try:
            if name != "_modules":
                copy.deepcopy(value)
        except (TypeError, RuntimeError):
            return f"its attribute {prefix}{'.' * bool(prefix)}{name}"
    return None


def _pairs(original: torch.nn.Module, copied: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return the modules of the original, each with its copy."""
    own, others = list(original.named_modules()), list(copied.named_modules())
    if [name for name, _ in own] != [name for name, _ in others]:
        raise TypeError(_cannot_copy("its copy has other modules"))
    return [(one, mine) for (_, one), (_, mine) in zip(own, others, strict=True)]


def _recomputed(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of tensors that a hook recomputes before each call, as weight norm and pruning do, by id.

    These tensors have a history, so `copy.deepcopy` refuses them.
    """
    return {
        id(value): value.detach().clone()
        for one in module.modules()
        if one._forward_pre_hooks
        for value in vars(one).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }


def _hooks_of(
    original: torch.nn.Module, mine: torch.nn.Module, known: Iterable[set[int]] | None = None
) -> Iterator[tuple[_Hooks, _Hooks, set[int]]]:
    """Yield the hooks of the module and of its copy, by kind, with the keys of the copy's hooks."""
    of_copy = known or [set(getattr(mine, name)) for name in _HOOKS]
    for name, keys in zip(_HOOKS, of_copy, strict=True):
        yield getattr(original, name), getattr(mine, name), keys


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    attributes: dict[str, object] = vars(module)
    if isinstance(module, torch.jit.ScriptModule):  # its attributes are not in `vars`
        names = {"training", *module._concrete_type.get_attributes()}
        attributes = {name: getattr(module, name, None) for name in names}
    return ((name, value) for name, value in attributes.items() if isinstance(value, _PLAIN))
