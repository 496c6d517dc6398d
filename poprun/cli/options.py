"""The declaration of options: parser, help, configuration files and documentation follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar

NO_SERVER = "there is no V-IPU server, partitions are simulated"
NO_SDK = "there is no Poplar SDK"
ALWAYS = (NO_SERVER, NO_SDK)
"""Reasons for which an option never has an effect."""

NO_PARTITION = "there is no --vipu-partition"
OFFLINE = "--offline-mode is on"
ONE_HOST = "the job stays on this machine"
STOPS = "--on-failure is stop"

_DECLARATION = "option"
_Default = TypeVar("_Default")


class OptionKind(Enum):
    """The kind of value that follows an option.

    Attributes:
        needs: the kind in the words of an error message.
        placeholder: the value in `--help`.
        word: the value in the tables of poprun_options.md.
    """

    FLAG = ("nothing", "", "")
    BOOLEAN = ("yes or no", "yes|no", "boolean")
    NUMBER = ("a whole number", "N", "number")
    SECONDS = ("a number of seconds", "SECONDS", "seconds")
    TEXT = ("a word", "WORD", "word")
    PATH = ("a path", "PATH", "path")
    HOSTS = ("a list of hosts such as 'node[0-2],node7'", "HOSTS", "hosts")
    ARGUMENTS = ("one string that is split like a shell does", '"ARGS"', "one string")
    METRICS = ("where metrics go, such as csv:run.csv", "SINK", "where they go")
    FAULT = ("a fault such as kill:instance=1,step=7", "FAULT", "`KIND:instance=I,...`")
    INSTANCE_ARGUMENTS = (
        "the index of an instance, a colon and one string that is split like a shell does",
        'N:"ARGS"',
        '`INDEX:"..."`',
    )

    def __init__(self, needs: str, placeholder: str, word: str) -> None:
        self.needs, self.placeholder, self.word = needs, placeholder, word


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: the long name, without dashes.
        kind: the kind of value that follows the name.
        help: one line for `--help`.
        section: the heading in `--help`.
        spellings: other ways to write the name, with dashes.
        choices: the words that may follow; empty for any.
        default: as it is written in `--help`.
        at_least: the smallest number that may follow; None: any.
        at_most: the largest number that may follow.
        if_bare: the value if no word follows that can be one; empty: a word has to follow.
        rare: whether only `--help-all` shows the option.
        once: whether the option concerns one call of poprun, so that a configuration file cannot have it.
        without_effect: the reason why the option does nothing; empty if it always has an effect.
        deprecated: what to use instead; empty if the option is not deprecated.
        see: the place in docs/ that says more, such as `observability.md#metrics`.
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
        """Whether a second occurrence adds to the first; otherwise it replaces the first."""
        kinds = OptionKind.HOSTS, OptionKind.METRICS, OptionKind.FAULT
        return self.kind in (*kinds, OptionKind.ARGUMENTS, OptionKind.INSTANCE_ARGUMENTS)

    @property
    def is_rare(self) -> bool:
        """Whether `--help` leaves the option to `--help-all`."""
        return self.rare or self.is_always_idle

    @property
    def is_always_idle(self) -> bool:
        """Whether the option never has an effect, whatever the job is."""
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
    """Declare an option as a field of a frozen dataclass, of which the option has its name.

    `default` is the value of the field if the option is not given, `shown` its text in `--help` where it does not
    follow from the value. All other arguments are attributes of `Option`.
    """
    text = _written(default, kind) if shown is None else shown
    declared = Option("", kind, help, section, spellings, default=text, **details)
    made: _Default = field(default=default, metadata={_DECLARATION: declared})
    return made


def options_of(declaring: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in order."""
    declared = ((each.name, each.metadata.get(_DECLARATION)) for each in fields(declaring))
    return tuple(replace(each, name=name.replace("_", "-")) for name, each in declared if each is not None)


def _written(default: object, kind: OptionKind) -> str:
    if default is None or default == () or kind is OptionKind.FLAG:
        return ""
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)
