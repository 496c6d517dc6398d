"""PopTorch's enumerations and errors, rows of tables that say what its methods do here, and the bases that read them.

strategies.StrategyError          `Error`
    RecoverableError              a device must be reset
    UnrecoverableError            a device is broken
    SmallDataError                data do not fill a batch; also a ValueError
ValueError
    ConfigFileError               a text is not JSON of options
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, IntEnum
from functools import cache, partial
from typing import Any, Self

from popdist.switches import require_switches
from strategies.errors import StrategyError

NO_IPU = "replicas run on the cores of this machine"
NO_COMPILER = "nothing is compiled"
ONE_MEMORY = "all tensors are in host memory"
RECORDED = "start the program with poprun --timeline FILE and popdist.poptorch.Options(), which records each step"

logger = logging.getLogger("strategies.torch.poptorch")


class RecoverableError(StrategyError):
    """A device must be reset. Never raised, because there is no IPU; programs may catch it by name."""


class UnrecoverableError(StrategyError):
    """A device is broken. Never raised, because there is no IPU; programs may catch it by name."""


class ConfigFileError(ValueError):
    """A text is not JSON of options."""


class SmallDataError(StrategyError, ValueError):
    """A data set has fewer elements than a batch of all replicas needs."""


# ---- enumerations


class OutputMode(IntEnum):
    """The outputs that a call returns: of the last micro-batch, of every n-th, of all, or their sum."""

    Final, EveryN, All, Sum, Default = range(5)


AnchorMode = OutputMode
"""The name of `OutputMode` before PopTorch 2.3."""


class ReductionType(IntEnum):
    """The reduction of gradients over micro-batches and replicas."""

    Sum, Mean, NoReduction = range(3)


class MeanReductionStrategy(IntEnum):
    """The computation of a mean: a running mean, or a sum of losses divided beforehand."""

    Running, Post, PostAndLoss = range(3)


class DataLoaderMode(IntEnum):
    """The time when batches are made: when they are asked for, or ahead in another thread."""

    Sync, Async, AsyncRebatched = range(3)


class SharingStrategy(IntEnum):
    """The transfer of a data set to the process that reads ahead; no effect, a thread reads here."""

    SharedMemory, FileSystem, Fork, ForkServer = range(4)


class HalfFloatCastingBehavior(IntEnum):
    """The dtype of a result of float16 and float32; with PyTorch it is float32."""

    FloatDowncastToHalf, HalfUpcastToFloat, Default = range(3)


class MatMulSerializationMode(Enum):
    """The axis along which to split a matrix product; no effect, it is computed at once."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class AutoStage(IntEnum):
    """The rule by which blocks make stages: one for each device, or a new one at each block."""

    SameAsIpu, AutoIncrement = range(2)


class Liveness(IntEnum):
    """The time that tensors of phases stay in device memory; no effect, all are in host memory."""

    AlwaysLive, OffChipAfterFwd, OffChipAfterFwdNoOverlap, OffChipAfterEachPhase = range(4)


class OverlapMode(IntEnum):
    """The time when tensors are copied to and from a device; no effect, they are not copied."""

    NoOverlap, OverlapAccumulationLoop, OverlapDeviceIterationLoop = range(3)


class ConnectionType(IntEnum):
    """The time when a device is attached; no effect, there is none to attach."""

    Always, OnDemand, Never = range(3)


class SyncPattern(IntEnum):
    """The way in which devices wait for each other; it has no effect on bits."""

    Full, SinglePipeline, ReplicaAndLadder = range(3)


class CommGroupType(IntEnum):
    """The replicas that share a parameter: all, consecutive ones, ones at equal distances, or none."""

    All, Consecutive, Orthogonal, NoGrouping = range(4)


class VariableRetrievalMode(IntEnum):
    """The value of a parameter that differs between groups of replicas in the module; only OnePerGroup works."""

    OnePerGroup, AllReduceReplicas, AllReplicas = range(3)


class MultiConvPlanType(IntEnum):
    """The plan of several convolutions; no effect, they run one after another."""

    Parallel, Serial = range(2)


@dataclass(frozen=True)
class Anchor:
    """A tensor that the program has anchored: a parameter, its gradient, or its value after an update.

    Attributes:
        name: Name of a parameter, alone or after `Gradient___` or `UpdatedVar___`.
        mode: Updates of a call whose values are returned; None for the updates whose outputs are returned.
        every: n of `OutputMode.EveryN`, in updates.
    """

    name: str
    mode: OutputMode | None
    every: int = 1


# ---- rows and the objects that read them

_BY_METHODS = "set options by methods, such as options.deviceIterations(4)"
_CLOSE = 0.8
"""The similarity, from 0 to 1, from which a name counts as a misspelling of another."""


@cache
def log_once(what: str, why: str, level: int = logging.INFO) -> None:
    """Log once in this process that something has no effect here, with the reason."""
    logger.log(level, "%s has no effect here: %s", what, why)


def anything(name: str, value: object) -> object:
    """Return a value of any kind."""
    return value


def switch(name: str, value: object) -> object:
    """Return True or False; raise a TypeError that names the argument for any other value."""
    require_switches(**{name: value})
    return value


@dataclass(frozen=True)
class TableRow:
    """A method of PopTorch in the table of its class.

    Attributes:
        takes: The name of the only parameter, or a function with the method's parameters that returns the value; None
            if the class has the method, or if it is refused.
        why: The effect of a method with an `attribute`. Otherwise the reason why there is none, or the text of `error`.
        accepts: (name, value) -> the value to keep; raises an error for a value that is not accepted.
        attribute: The name by which this package reads the value; empty if the method has no effect.
        default: The value before the method is called.
        error: The class of the error if the method is refused.
        level: The level of the log of a method without an effect.
    """

    takes: str | Callable[..., object] | None
    why: str
    accepts: Callable[[str, Any], object] = anything
    attribute: str = ""
    default: object = None
    error: type[Exception] | None = None
    level: int = logging.INFO

    def value(self, owner: str, name: str, /, *arguments: object, **named: object) -> object:
        """Return the value to keep of the arguments of the method `owner.name`.

        Raises:
            TypeError: If arguments are missing or superfluous, or a switch is not True or False.
            Exception: The error of the row, if the method is refused.
        """
        if self.error is not None:
            raise self.error(self.why)
        if callable(self.takes):
            self.takes.__qualname__ = f"{owner}.{name}"  # for errors about arguments
            return self.accepts(name, self.takes(*arguments, **named))
        values = [*arguments, *named.values()]
        if len(values) != 1 or not named.keys() <= {self.takes}:
            given = ", ".join([*map(repr, arguments), *named]) or "missing"
            raise TypeError(f"{owner}.{name}() takes one argument, {self.takes!r}; it is {given}")
        return self.accepts(name, values[0])


Rows = Mapping[str, TableRow]
"""Methods by their names."""


def refused(why: str, error: type[Exception] = StrategyError) -> TableRow:
    """Return the row of a method that raises an error with the reason and the way out."""
    return TableRow(None, why, error=error)


class Accepting(ABC):
    """Base of objects some of whose methods are only in a table; each of these returns the object."""

    @property
    @abstractmethod
    def _rows(self) -> Rows:
        """The methods of the table."""

    def __getattr__(self, name: str) -> Any:
        """Return a method of the table, or refuse an unknown name."""
        if name not in self._rows:
            raise AttributeError(f"{type(self).__name__} has no {name}; it has {', '.join(self._rows)}")
        return partial(self._call, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._rows]

    def _call(self, name: str, /, *arguments: object, **named: object) -> Any:
        self._rows[name].value(type(self).__name__, name, *arguments, **named)
        return self


class Settable(Accepting):
    """Base of options by the rows of a table, which can be set until a model or a data loader is made with them.

    Args:
        title: Name of the group of options.
    """

    _title = "Options"
    _groups: Mapping[str, Settable] = {}
    """Inner groups of options, by the names of their attributes."""

    def __init__(self, title: str) -> None:
        vars(self).update(_title=title)
        read = {row.attribute: row.default for row in self._rows.values() if row.attribute}
        vars(self).update(_values={}, _is_frozen=False, **read)

    def _copied(self) -> Self:
        """Return a copy of the options that is not frozen."""
        copied = type(self).__new__(type(self))
        groups = {name: group._copied() for name, group in self._groups.items()}
        vars(copied).update(vars(self), _values=dict(self._values), _is_frozen=False, _groups=groups, **groups)
        return copied

    def _call(self, name: str, /, *arguments: object, **named: object) -> Self:
        return self._keep(name, self._rows[name].value(self._title, name, *arguments, **named))

    def _keep(self, name: str, value: object, **attributes: object) -> Self:
        """Keep the value given to a method, and the attributes that follow from it."""
        row = self._rows.get(name) or TableRow(None, NO_COMPILER)  # a name of the compiler has no row
        if not row.attribute:
            log_once(f"{self._title}.{name}", row.why, row.level)
        if self._is_frozen:
            raise StrategyError(
                f"{self._title}.{name} is set after a model or a data loader was made with these options; set it "
                "earlier, or change a copy: options.clone()"
            )
        self._values[name] = value
        if row.attribute:
            attributes = {row.attribute: value, **attributes}
        vars(self).update(attributes)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to overwrite options, because nothing would check the value; accept names of the program's own."""
        read = {*self._groups, *(row.attribute for row in self._rows.values())}
        if name in self._rows or callable(getattr(type(self), name, None)):
            problem = f"is a method, and assigning would overwrite it; write .{name}({value!r}) instead"
        elif name in read or (hasattr(type(self), name) and not name.startswith("_")):
            problem = f"follows from the options and cannot be assigned; {_BY_METHODS}"
        elif meant := self._meant(name):
            problem = f"is not an option; did you mean {meant}(...)? S{_BY_METHODS[1:]}"
        else:
            super().__setattr__(name, value)
            return
        raise AttributeError(f"{self._title}.{name} {problem}")

    def __getattr__(self, name: str) -> Any:
        """Return a method of the table, or refuse an unknown name with the most similar one."""
        if name in self._rows:
            return super().__getattr__(name)
        meant = self._meant(name)
        way_out = f"did you mean {meant}?" if meant else "the documentation (docs: torch) lists the options"
        raise AttributeError(f"{self._title}.{name} is not an option; {way_out}")

    def _meant(self, name: str) -> str | None:
        """Return the option with the most similar name, in this group or an inner one, or None."""
        if name.startswith("_"):
            return None
        known = {option.split(".")[-1].lower(): option for option in self._options_known()}
        close = get_close_matches(name.lower().replace("_", ""), known, 1, _CLOSE)
        return known[close[0]] if close else None

    def _options_known(self) -> Iterator[str]:
        """Yield the names of all options, with a dot for options of inner groups."""
        for name, group in self._groups.items():
            if not name.startswith("_"):
                yield from (name, *(f"{name}.{option}" for option in group._rows))
        yield from self._rows
        yield from (name for name in dir(type(self)) if not name.startswith("_"))

    def _freeze(self) -> None:
        for group in self._groups.values():
            group._freeze()
        vars(self).update(_is_frozen=True)

    def toDict(self) -> Mapping[str, object]:
        """Return the options that have been set, by name, with a dictionary for each group."""
        groups = {name: group.toDict() for name, group in self._groups.items()}
        return {**self._values, **{name: inner for name, inner in groups.items() if inner}}

    def __repr__(self) -> str:
        return f"{self._title}({', '.join(f'{name}={value!r}' for name, value in self.toDict().items())})"

    def __str__(self) -> str:
        """Return a line for every option: its value, and its effect or the reason for none."""
        lines = [f"{self._title}:"]
        for name, row in self._rows.items():
            if row.error is not None:
                lines.append(f"  {name} is refused: {row.why}")
            else:
                value = self._values.get(name, getattr(self, row.attribute) if row.attribute else None)
                lines.append(f"  {name} = {value!r}  # {'' if row.attribute else 'no effect: '}{row.why}")
        lines += [f"  {name} = {value!r}" for name, value in self._values.items() if name not in self._rows]
        return "\n".join([*lines, *map(str, self._groups.values())])
