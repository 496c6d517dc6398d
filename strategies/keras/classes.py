"""The classes of models of a strategy: each like the one that the user knows, whose name files say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from keras.src import api_export
from keras.src.saving import object_registration

NAME, EXTENSIONS = "_replicated", "_extensions"
"""Under which a model has what it does instead of Keras, and what it does besides."""

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def class_of(stock: type, forwarded: Mapping[str, Sequence[str]]) -> type:
    """A class like a stock one, some of whose methods are those of what its models have.

    It has the name and the module of the stock one and is serialized as that, so that files are those of stock models.

    Args:
        stock: a class of models of Keras or of the user's; it stays what it is.
        forwarded: the names of the methods, by that under which models have what they are of.
    """
    if stock not in _classes:
        pairs = [(owner, name) for owner, names in forwarded.items() for name in names]
        namespace: dict[str, Any] = {name: _forwarding(stock, owner, name) for owner, name in pairs}
        namespace |= {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        made = type(stock)(stock.__name__, (stock,), namespace)
        made.__reduce__ = functools.partialmethod(_reduced, stock)  # type: ignore[assignment,method-assign]
        _register(stock, made)
        _classes[stock] = made
    return _classes[stock]


def _reduced(model: Any, stock: Any) -> Any:
    """What is pickled: as of a stock model, whose class can be found by its name."""
    return stock._unpickle_model, stock.__reduce__(model)[1]


def _register(stock: type, made: type) -> None:
    """Have Keras write the name of the stock class, under which it finds only that one."""
    public = api_export.get_name_from_symbol(stock)
    if public is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[made] = public
    own = object_registration.GLOBAL_CUSTOM_NAMES.get(stock)
    if own is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[made] = own


def _forwarding(stock: Any, owner: str, name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self.__dict__[owner], name)(*arguments, **named)

    original = getattr(stock, name, None)
    return method if original is None else functools.wraps(original)(method)
