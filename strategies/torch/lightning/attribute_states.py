"""The attributes that a module's steps assign: each replica has its own, as a process of its own would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import NoReturn, final

import numpy as np
import pytorch_lightning as pl
import torch
from torchmetrics import Metric

from strategies.errors import StrategyError
from strategies.typing import Tree

_MISSING = object()
_OTHERS = frozenset((*vars(torch.nn.Module()), *vars(pl.LightningModule()), "forward"))
"""Attributes of PyTorch and Lightning. Lightning assigns `forward` while it calls `training_step`."""


@final
class ReplicaNumbers:
    """The numbers that an attribute has in the replicas of an instance, where no replica runs.

    Calculations raise, and so does pickling: a checkpoint would have numbers that nobody can load.

    Args:
        name: The names of the module and the attribute.
        of: The number of each replica, by its global index.
    """

    def __init__(self, name: str, of: Mapping[int, Tree]) -> None:
        self._name, self._of = name, {replica: _float_of(one) for replica, one in of.items()}

    def _refuse(self, *others: object) -> NoReturn:
        numbers = ", ".join(f"{one:g} in replica {replica}" for replica, one in self._of.items())
        raise StrategyError(
            f"{self._name} was assigned in a step and is {numbers}, so outside of steps it has no value; log it in the "
            "step with self.log, use a metric of torchmetrics, or start one instance per replica"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __neg__ = __abs__ = __float__ = __int__ = __index__ = __bool__ = __round__ = __format__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __reduce__ = item = detach = cpu = _refuse
    __hash__ = object.__hash__

    def __deepcopy__(self, known: object) -> ReplicaNumbers:
        """Return the object itself: callbacks copy modules."""
        return self


@dataclass
class _Assigned:
    """The values of one attribute.

    Attributes:
        first: The value with which each replica begins; `_MISSING` if there was none.
        left: The value when the last replica ended.
        of: The values of the replicas.
    """

    first: Tree
    left: Tree
    of: dict[int, Tree] = field(default_factory=dict)


@final
class AttributeStates:
    """The attributes of a module and its submodules that steps assign, for each local replica.

        self.count += 1  # in training_step: the number of this replica's steps

    Between steps, attributes have the values of the last local replica. Numbers of the module itself that differ
    between local replicas are `ReplicaNumbers` then. A value that a hook assigns holds for all replicas. Objects that a
    step changes in place, such as lists, belong to the instance.

    Args:
        module: The module. Layers of PyTorch and metrics of torchmetrics in it are left alone.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._name = type(module).__name__
        self._attributes = [
            vars(one)
            for one in module.modules()
            if not (type(one).__module__.startswith("torch.") or isinstance(one, Metric))
        ]
        self._values: dict[tuple[int, str], _Assigned] = {}  # by the module's number and the attribute's name

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Give attributes the values of a replica, and keep those that it assigns."""
        self._begin(replica)
        before = [dict(one) for one in self._attributes]
        try:
            yield
        finally:
            self._end(replica, before)

    def _begin(self, replica: int) -> None:
        for (number, name), values in list(self._values.items()):
            attributes = self._attributes[number]
            if attributes.get(name, _MISSING) is not values.left:  # a hook has assigned it
                del self._values[number, name]
                continue
            own = values.of.get(replica, values.first)
            if own is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = own

    def _end(self, replica: int, before: Sequence[Mapping[str, Tree]]) -> None:
        for number, (attributes, earlier) in enumerate(zip(self._attributes, before, strict=True)):
            for name in (earlier.keys() | attributes.keys()) - _OTHERS:
                first, now = earlier.get(name, _MISSING), attributes.get(name, _MISSING)
                if now is not first:
                    self._values.setdefault((number, name), _Assigned(first, now))
        for (number, name), values in self._values.items():
            values.of[replica] = values.left = self._attributes[number].get(name, _MISSING)
            if number == 0 and _differ(values.of):
                self._attributes[number][name] = values.left = ReplicaNumbers(f"{self._name}.{name}", values.of)


def _differ(of: Mapping[int, Tree]) -> bool:
    """Return whether the values of replicas are numbers, or arrays of one element, and differ."""
    values = list(of.values())
    return all(map(_is_number, values)) and any(bool(one != values[0]) for one in values[1:])


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, Real | np.bool_)


def _float_of(number: Tree) -> float:
    if isinstance(number, torch.Tensor):
        number = number.detach()
    return float(number.item() if isinstance(number, torch.Tensor | np.ndarray) else number)
