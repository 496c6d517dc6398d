"""Caches of parametrized tensors, one for each thread that runs a replica.

`torch.nn.utils.parametrize.cached` has one cache for all threads, keyed by the module that was parametrized.
With it, copies of that module would share the cached tensors, although their inputs differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import parametrize

from strategies.errors import StrategyError
from strategies.torch.threads import ThreadValue

_cached_by_all = parametrize.cached
_cache = ThreadValue[dict[tuple[type[torch.nn.Module], str], torch.Tensor] | None](None)
"""The parametrized tensors of each thread. As in PyTorch, a class and a name are the key: copies share a class."""


@contextmanager
def _cached() -> Iterator[None]:
    """Cache parametrized tensors until the context ends, as `torch.nn.utils.parametrize.cached` does."""
    if threading.current_thread() is threading.main_thread():
        with _cached_by_all():
            yield
    else:
        with _cache.being({} if _cache.now is None else _cache.now):
            yield


def cache_by_thread(module: torch.nn.Module) -> None:
    """Give each thread of a replica a cache of its own for the parametrized tensors of a module and of its copies.

    PyTorch makes a class for each parametrized module, and copies share the class. This replaces its properties.

    Args:
        module: The user's module.
    """
    for each in module.modules():
        if parametrize.is_parametrized(each):
            parametrize.cached = _cached
            for name in _parametrizations_of(each):
                _replace_property(next(kind for kind in type(each).__mro__ if name in vars(kind)), name)


def _replace_property(kind: type[torch.nn.Module], name: str) -> None:
    of_pytorch = vars(kind)[name]
    if of_pytorch.fget.__module__ == __name__:
        return

    def get(module: torch.nn.Module) -> torch.Tensor:
        if _cache.now is None:
            _refuse_the_cache_of_all()
            value: torch.Tensor = of_pytorch.fget(module)
            return value
        key = kind, name
        if key not in _cache.now:
            _cache.now[key] = _parametrizations_of(module)[name]()
        return _cache.now[key]

    setattr(kind, name, property(get, of_pytorch.fset))


def _parametrizations_of(module: torch.nn.Module) -> torch.nn.ModuleDict:
    """Return the parametrizations, by the names of the tensors."""
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, torch.nn.ModuleDict)
    return parametrizations


def _refuse_the_cache_of_all() -> None:
    if parametrize._cache_enabled and threading.current_thread() is not threading.main_thread():
        raise StrategyError(
            "a replica computes inside of a parametrize.cached() that all threads share; enter it in loss_fn or in the "
            "module, and call it as `parametrize.cached()`, not by an imported name"
        )
