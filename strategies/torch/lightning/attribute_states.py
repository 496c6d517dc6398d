"""The attributes that a module's steps assign: each replica has its own, as a process of its own would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import pytorch_lightning as pl
import torch
from torchmetrics import Metric

from strategies.typing import Tree

_MISSING = object()
_OTHERS = frozenset((*vars(torch.nn.Module()), *vars(pl.LightningModule()), "forward"))
"""Attributes of PyTorch and Lightning. Lightning assigns `forward` while it calls `training_step`."""


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

    Between steps, attributes have the values of the last local replica. A value that a hook then assigns holds for all
    replicas. Objects that a step changes in place, such as lists, belong to the instance.

    Args:
        module: The module. Layers of PyTorch and metrics of torchmetrics in it are left alone.
    """

    def __init__(self, module: torch.nn.Module) -> None:
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
