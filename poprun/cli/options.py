"""The declaration of options, from which parser, help, configuration files and documentation follow."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar

NO_SERVER = "there is no V-IPU server, partitions are simulated"
NO_SDK = "there is no Poplar SDK"
ALWAYS = (NO_SERVER, NO_SDK)
"""The reasons why options never have an effect."""

OFFLINE = "--offline-mode is on"
ONE_HOST = "the job stays on this machine"
STOPS = "--on-failure is stop"
NO_SPARES = "there are no spares"

WORDS_FOR_YES = ("yes", "on", "true", "1")
WORDS_FOR_NO = ("no", "off", "false", "0")

_DECLARATION = "option"
_Default = TypeVar("_Default")


class OptionKind(Enum):
    """A kind of value that follows an option.

    Attributes:
        needs: The description of the kind in error messages.
        placeholder: The value in `--help`.
        word: The value in the tables of poprun_options.md.
    """

    FLAG = ("nothing", "", "")
    BOOLEAN = ("yes or no", "yes|no", "boolean")
    NUMBER = ("a whole number", "N", "number")
    INSTANCES = ("a whole number, or N:M for N instances and M - N spares", "N[:M]", "number, or `N:M`")
    SECONDS = ("a number of seconds", "SECONDS", "seconds")
    TEXT = ("a word", "WORD", "word")
    PATH = ("a path", "PATH", "path")
    HOSTS = ("a list of hosts such as 'node[0-2],node7'", "HOSTS", "hosts")
    ARGUMENTS = ("one string that is split as a shell does", '"ARGS"', "one string")
    METRICS = ("a destination for metrics, such as csv:run.csv", "SINK", "destination")
    FAULT = ("a fault such as kill:instance=1,step=7", "FAULT", "`KIND:instance=I,...`")
    INSTANCE_ARGUMENTS = (
        "the index of an instance, a colon and one string that is split as a shell does",
        'N:"ARGS"',
        '`INDEX:"..."`',
    )

    def __init__(self, needs: str, placeholder: str, word: str) -> None:
        self.needs, self.placeholder, self.word = needs, placeholder, word


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        name: The long name, without dashes.
        kind: The kind of value that follows the name.
        help: The explanation in `--help`, one line.
        section: The heading in `--help`.
        spellings: Other spellings of the name, with dashes.
        choices: The allowed values; empty: any value.
        default: The default, as `--help` shows it.
        at_least: The smallest allowed number. None: any number.
        at_most: The largest allowed number.
        if_bare: The value if the next word cannot be a value. Empty: a value has to follow.
        rare: Whether only `--help-all` shows the option.
        once: Whether the option concerns one call of poprun, so that configuration files cannot contain it.
        without_effect: The reason why the option does nothing. Empty: it always has an effect.
        deprecated: The replacement of a deprecated option. Empty: the option is not deprecated.
        see: The place in docs/ with more information, such as `observability.md#metrics`.
    """

    name: str
    kind: OptionKind
    help: str
    section: str
    spellings: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: str = ""
    at_least: int | None = 1
    at_most: int = 2**31 - 1
    if_bare: str = ""
    rare: bool = False
    once: bool = False
    without_effect: str = ""
    deprecated: str = ""
    see: str = ""

    @property
    def is_repeatable(self) -> bool:
        """Whether a second occurrence adds to the first; otherwise, it replaces the first."""
        kinds = OptionKind.HOSTS, OptionKind.METRICS, OptionKind.FAULT
        return self.kind in (*kinds, OptionKind.ARGUMENTS, OptionKind.INSTANCE_ARGUMENTS)

    @property
    def is_rare(self) -> bool:
        """Whether only `--help-all` shows the option."""
        return self.rare or self.is_always_idle

    @property
    def is_always_idle(self) -> bool:
        """Whether the option has no effect in any job."""
        return bool(self.deprecated) or self.without_effect in ALWAYS


def option(
    default: _Default,
    kind: OptionKind,
    help: str,
    *spellings: str,
    section: str,
    shown: str | None = None,
    **details: Any,
) -> _Default:
    """Declare an option as a field of a frozen dataclass; the field's name is the option's.

    Args:
        default: The value of the field if the option is not given.
        kind: The kind of value.
        help: The explanation in `--help`.
        *spellings: Other spellings of the name, with dashes.
        section: The heading in `--help`.
        shown: The default as `--help` shows it. None: `default`, written out.
        **details: Further attributes of `Option`.
    """
    text = _written(default, kind) if shown is None else shown
    declared = Option("", kind, help, section, spellings, default=text, **details)
    made: _Default = field(default=default, metadata={_DECLARATION: declared})
    return made


def options_of(declaring: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in the order of its fields."""
    declared = ((each.name, each.metadata.get(_DECLARATION)) for each in fields(declaring))
    return tuple(replace(each, name=name.replace("_", "-")) for name, each in declared if each is not None)


def _written(default: object, kind: OptionKind) -> str:
    if default is None or default == () or kind is OptionKind.FLAG:
        return ""
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)
