"""Marks of the contents of attributes: of lists, dictionaries, objects, arrays and tensors."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from strategies.programs.remembering import SCALARS, digest
from strategies.programs.users_code import is_users_module

MOST_VALUES = 500
"""Most values that are looked at in one attribute of a module."""
_SAMPLED = 1 << 16
"""Elements of a tensor that are compared, all over it; versions do not tell, as a write that is undone counts."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_COMPARED = (torch.Tensor, np.ndarray, dict, *_CONTAINERS)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_NAME_SPACES = (argparse.Namespace, SimpleNamespace, torch.nn.Module)


def may_change(value: Any) -> bool:
    """Return whether the contents of an attribute may be changed in place, and can be compared."""
    return isinstance(value, _COMPARED) or _is_open(value)


def marks_of(value: Any, known: Collection[int]) -> Iterator[Any]:
    """Yield marks that tell a value and its contents from others.

    Args:
        value: not changed.
        known: the identities of modules, parameters and buffers that are followed by other means.
    """
    waiting, passed = [value], set[int]()
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        one = waiting.pop()
        if isinstance(one, SCALARS):
            yield one
            continue
        yield id(one)
        if id(one) in passed or id(one) in known:
            continue
        passed.add(id(one))
        if isinstance(one, torch.Tensor):
            yield from _of_tensor(one)
        elif isinstance(one, np.ndarray):
            yield digest(one)
        elif isinstance(one, (dict, *_CONTAINERS)):
            yield len(one)
            inner = chain(one.values(), one) if isinstance(one, dict) else iter(one)
            waiting += islice(inner, MOST_VALUES)
        elif _is_open(one):
            waiting += islice(vars(one).values(), MOST_VALUES)


def _is_open(value: Any) -> bool:
    """Return whether a value is an object whose attributes are the user's."""
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, _NAME_SPACES) or is_users_module(sys.modules.get(type(value).__module__))


def _of_tensor(tensor: torch.Tensor) -> Iterator[Any]:
    if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel():
        flat = tensor.detach().reshape(-1)[:: -(-tensor.numel() // _SAMPLED)]
        yield digest(flat.contiguous().view(torch.uint8).numpy(), most_bytes=None)
