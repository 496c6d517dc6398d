"""A module and its optimizer on a spare: only the active instances know the values of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch

from strategies.errors import SpareError

Wait = Callable[[], None]
"""Waits until this spare has become active. If it does not, the function raises `SpareError` or `SystemExit`."""

_ATTRIBUTES = (
    *("device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse", "itemsize", "layout"),
    *("nbytes", "ndim", "requires_grad", "shape"),
)
_METHODS = (
    *("__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement"),
    *("numel", "requires_grad_", "size", "stride"),
)
_FACTS = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad",)),
        *(getattr(torch.Tensor, name) for name in _METHODS),
    }
)
"""The functions of PyTorch that need no values."""


class _HiddenTensor:
    """The part of the class of a tensor without values; `training` is set in the class of each trainer's tensors."""

    training: HiddenValues

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        named: Mapping[str, object] | None = None,
    ) -> object:
        if function not in _FACTS:
            cls.training.wait_for_values()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(named or {}))


class _HiddenOptimizer:
    """The part of the class of an optimizer whose state has no values; `training` is set as for tensors."""

    training: HiddenValues

    @property
    def state(self) -> object:
        """The state of the optimizer, after waiting for it."""
        self.training.wait_for_values()
        return vars(self)["state"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a spare has no gradients."""


@final
class HiddenValues:
    """The values of a module and its optimizer, which can be hidden and shown.

    While they are hidden, each use of a parameter, buffer, gradient or optimizer state waits for them. Shapes, dtypes,
    `requires_grad`, `zero_grad` and the hyperparameters of the optimizer can be used.

    Args:
        module: The module.
        optimizer: Its optimizer.

    Attributes:
        is_hidden: Whether the values are hidden.
        wait: The function that waits for them.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.is_hidden = False
        self.wait: Wait = lambda: None
        self._classes: dict[type, type] = {}
        self._hidden: list[tuple[object, type]] = []

    def wait_for_values(self) -> None:
        """Wait until the values are there.

        Raises:
            SpareError: If they do not come.
        """
        self.wait()
        if self.is_hidden:
            raise SpareError(
                "the program reads or writes a tensor of the Trainer's module or optimizer, which a spare does not "
                "have before it becomes active; read them in strategy.on_chief, or use metrics"
            )

    def hide(self, wait: Wait) -> None:
        """Hide the values. The state of the optimizer is dropped.

        Args:
            wait: Function that waits for the values.

        Raises:
            SpareError: If a tensor has a class of which no class can be derived.
        """
        if self.is_hidden:
            return
        self.wait = wait
        for parameter in self.module.parameters():
            parameter.grad = None
        self.optimizer.state.clear()
        vars(self.optimizer)["_opt_called"] = True  # schedulers look for it, and would warn
        parts = {id(one): one for one in (*self.module.parameters(), *self.module.buffers(), self.optimizer)}
        self._hidden = [(one, type(one)) for one in parts.values()]
        for one, kind in self._hidden:
            try:
                if kind not in self._classes:
                    part = _HiddenTensor if issubclass(kind, torch.Tensor) else _HiddenOptimizer
                    self._classes[kind] = type(f"Hidden{kind.__name__}", (part, kind), {"training": self})
                one.__class__ = self._classes[kind]  # as PyTorch's lazy modules do
            except TypeError as error:
                raise SpareError(
                    f"a spare cannot hide the values of a {kind.__name__}: {error}; use torch.nn.Parameter and tensors"
                ) from error
        vars(self.module)["zero_grad"] = lambda set_to_none=True: None  # a spare has no gradients
        self.is_hidden = True

    def show(self) -> None:
        """Show the tensors again, with the values that they had, or NaN after `forget`."""
        if not self.is_hidden:
            return
        self.is_hidden = False
        for one, kind in self._hidden:
            one.__class__ = kind
        self._hidden = []
        vars(self.module).pop("zero_grad", None)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the values in this block."""
        was_hidden = self.is_hidden
        self.show()
        try:
            yield
        finally:
            if was_hidden:
                self.hide(self.wait)

    def forget(self) -> None:
        """Write NaN over the values, so that no view of the program shows old ones. They must be shown."""
        with torch.no_grad():
            for one in (*self.module.parameters(), *self.module.buffers()):
                if one.is_floating_point() or one.is_complex():
                    one.fill_(math.nan)
