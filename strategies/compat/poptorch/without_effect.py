"""Methods of PopTorch that have no effect here or are refused: tables of them, and a base class that uses a table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NoReturn, TypeVar

from popdist.switches import require_switches
from strategies.errors import StrategyError

NO_IPU = "replicas run on the cores of this machine"
NO_COMPILER = "nothing is compiled"
ONE_MEMORY = "all tensors are in host memory"

Self = TypeVar("Self", bound="Accepting")

logger = logging.getLogger("strategies.torch.poptorch")


@cache
def tell_once(what: str, why: str) -> None:
    """Log once in this process that something has no effect here, with the reason."""
    logger.info("%s has no effect here: %s", what, why)


@dataclass(frozen=True)
class Accepted:
    """A method without an effect.

    Attributes:
        value: Function with the parameters of PopTorch's method; returns the value to keep.
        why: Reason for the log.
        is_switch: Whether the value must be True or False.
    """

    value: Callable[..., object]
    why: str
    is_switch: bool = False

    def called(self, name: str, /, *arguments: object, **named: object) -> object:
        """Return the value to keep of the arguments.

        Raises:
            TypeError: If arguments are missing or superfluous, or a switch is not True or False.
        """
        value = self.value(*arguments, **named)
        if self.is_switch:
            require_switches(**{name: value})
        return value


@dataclass(frozen=True)
class Refused:
    """A method that is refused.

    Attributes:
        why: Text of the error: the reason and the way out.
        error: Class of the error.
    """

    why: str
    error: type[Exception] = StrategyError

    def called(self, name: str, /, *arguments: object, **named: object) -> NoReturn:
        """Raise the error."""
        raise self.error(self.why)


Methods = Mapping[str, Accepted | Refused]


def methods_of(owner: str, **methods: Accepted | Refused) -> Methods:
    """Return a table of methods by name; errors about their arguments name the owner."""
    for name, method in methods.items():
        if isinstance(method, Accepted):
            method.value.__qualname__ = f"{owner}.{name}"
    return methods


class Accepting:
    """Base of objects some of whose methods are only in a table; each of these returns the object."""

    _methods: ClassVar[Methods] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a method of the table, or refuse an unknown name."""
        if name not in self._methods:
            raise AttributeError(f"{type(self).__name__} has no {name}; it has {', '.join(self._methods)}")
        return partial(self._call, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def _call(self: Self, name: str, /, *arguments: object, **named: object) -> Self:
        method = self._methods[name]
        return self._accept(name, method.called(name, *arguments, **named), method.why)

    def _accept(self: Self, name: str, value: object, why: str) -> Self:
        return self
