"""Methods of PopTorch that change nothing here, or are refused: tables of them, and objects that look into a table."""

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
ONE_MEMORY = "all tensors lie in the memory of the host"

Self = TypeVar("Self", bound="Accepting")

logger = logging.getLogger("strategies.torch.poptorch")


@cache
def tell_once(what: str, why: str) -> None:
    """Log that something changes nothing here, the first time that this process meets it."""
    logger.info("%s changes nothing here: %s", what, why)


@dataclass(frozen=True)
class Accepted:
    """A method that changes nothing.

    Attributes:
        value: has the parameters of PopTorch's method, and returns what is kept of them.
        why: the reason that it changes nothing, for the log.
        is_switch: whether the value has to be True or False.
    """

    value: Callable[..., object]
    why: str
    is_switch: bool = False

    def called(self, name: str, /, *arguments: object, **named: object) -> object:
        """Return what is kept of the arguments.

        Raises:
            TypeError: if there are too many or too few of them, or a switch is neither True nor False.
        """
        value = self.value(*arguments, **named)
        if self.is_switch:
            require_switches(**{name: value})
        return value


@dataclass(frozen=True)
class Refused:
    """A method that cannot be heeded.

    Attributes:
        why: the text of the error: the reason, and what to use instead.
        error: the kind that a call raises.
    """

    why: str
    error: type[Exception] = StrategyError

    def called(self, name: str, /, *arguments: object, **named: object) -> NoReturn:
        """Raise the error."""
        raise self.error(self.why)


Methods = Mapping[str, Accepted | Refused]


def methods_of(owner: str, **methods: Accepted | Refused) -> Methods:
    """Return a table of methods by their names; errors of their arguments name the owner."""
    for name, method in methods.items():
        if isinstance(method, Accepted):
            method.value.__qualname__ = f"{owner}.{name}"
    return methods


class Accepting:
    """Base of objects that have some methods in a table only; each of these returns the object."""

    _methods: ClassVar[Methods] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the method of the table, or refuse a name that is not there."""
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
