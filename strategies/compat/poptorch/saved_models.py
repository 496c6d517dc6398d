"""Files of models, read as data with the classes that the program has imported; no code of a file runs."""

from __future__ import annotations

import builtins
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from strategies.compat.poptorch.blocks import ExecutionStrategy, Phase, Stage, _Begin
from strategies.compat.poptorch.optimizer_base import VariableAttributes
from strategies.compat.poptorch.option_groups import OptionGroup
from strategies.compat.poptorch.outputs import Anchor
from strategies.errors import StrategyError
from strategies.torch.replicas.groups import ReplicaGroups

Content: TypeAlias = Mapping[str, Any]
"""The contents of a file, by name."""
_KINDS = (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer, OptionGroup, ExecutionStrategy, Stage, Phase)
_CLASSES = (
    *(Anchor, VariableAttributes, ReplicaGroups, _Begin),
    *(dict, list, tuple, set, frozenset, slice, range, complex, bytearray, defaultdict, OrderedDict),
)
_FUNCTIONS = ("torch.nn.functional", "torch._C._nn")
"""Modules whose functions only compute."""


def read_model(filename: str | Path, is_trusted: bool) -> Content:
    """Return the content that `PoplarExecutor.save` has written.

    Args:
        filename: Path of the file.
        is_trusted: Whether the file may run code, as Python's pickle does.

    Raises:
        StrategyError: If the file is damaged, was not written by `save`, or needs `is_trusted`.
    """
    try:
        if is_trusted:
            content = torch.load(filename, weights_only=False)
        else:
            names = get_unsafe_globals_in_checkpoint(filename)
            with safe_globals([(_found(name, filename), name) for name in names]):
                content = torch.load(filename, weights_only=True)
    except (StrategyError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:
        raise StrategyError(
            f"{filename} is not a file of PoplarExecutor.save, or it is damaged: {_said(error)}; save the model again"
        ) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("options"), OptionGroup):
        raise StrategyError(f"{filename} is not a file of PoplarExecutor.save; load it with torch.load")
    return content


def packed(optimizer: torch.optim.Optimizer) -> Content:
    """Return the class and state of an optimizer, with a dict in place of a defaultdict, which untrusted files lack."""
    made_of = optimizer.__getstate__()
    return {"class": type(optimizer), "made_of": {**made_of, "state": dict(made_of["state"])}}


def unpacked(found: Content | torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that `packed` has taken apart; return optimizers of older files as they are."""
    if found is None or isinstance(found, torch.optim.Optimizer):
        return found
    kind = found["class"]
    optimizer: torch.optim.Optimizer = kind.__new__(kind)
    made_of = found["made_of"]
    optimizer.__setstate__({**made_of, "state": defaultdict(dict, made_of["state"])})
    return optimizer


def _said(error: Exception) -> str:
    """Return the sentence of an error that names the fault of a file."""
    lines = [line.strip() for line in str(error).split("WeightsUnpickler error:")[-1].splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _found(name: str, filename: str | Path) -> Any:
    """Return the object that a file names, if it is harmless. Nothing is imported because of a file."""
    module, _, attribute = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        attribute = f"{outer}.{attribute}"
    value: Any = sys.modules.get(module, builtins)
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not _is_harmless(value):
        raise StrategyError(
            f"{filename} names {name}, and reading it could run code of the file. A file can be read if the program "
            "has imported the classes in it, and they have no functions of their own as attributes; make the model and "
            "load its state_dict, or, if you trust the file as a program, poptorch.load(filename, is_trusted=True)"
        )
    return value


def _is_harmless(value: object) -> bool:
    if isinstance(value, type):
        return value in _CLASSES or issubclass(value, (*_KINDS, Enum))
    is_function = isinstance(value, FunctionType | BuiltinFunctionType)
    return is_function and getattr(value, "__module__", None) in _FUNCTIONS
