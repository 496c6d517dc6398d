"""The table of poprun's options. A new option is one new entry here and one new field of `Settings`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What follows an option."""

    FLAG = "nothing"
    BOOLEAN = "yes or no"
    NUMBER = "a whole number"
    TEXT = "a word"
    ARGUMENTS = "one string that is split like a shell does"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: its long name, without dashes.
        kind: what follows it.
        help: one line for `--help`.
        section: the heading in `--help`.
        spellings: other ways to write it, with dashes.
        choices: the words that may follow; empty for any.
        default: as it is written in `--help`.
    """

    name: str
    kind: Kind
    help: str
    section: str
    spellings: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: str = ""

    @property
    def is_repeatable(self) -> bool:
        """Whether a second occurrence adds to the first; otherwise it replaces the first."""
        return self.kind is Kind.ARGUMENTS


GENERIC = "Generic"
TOPOLOGY = "Topology"
EXECUTION = "Execution"

OPTIONS: tuple[Option, ...] = (
    Option("help", Kind.FLAG, "print this text and stop", GENERIC, spellings=("-h",)),
    Option("version", Kind.FLAG, "print the version and stop", GENERIC),
    Option(
        "version-format",
        Kind.TEXT,
        "how --version prints; the full forms list every dependency",
        GENERIC,
        choices=("text", "json", "full-text", "full-json"),
        default="text",
    ),
    Option("verbose", Kind.FLAG, "say what happens", GENERIC, spellings=("-v",)),
    Option("vv", Kind.FLAG, "say how it happens, and show the topology", GENERIC, spellings=("-vv",)),
    Option("dry-run", Kind.FLAG, "print the mpirun command and run nothing", GENERIC),
    Option("num-replicas", Kind.NUMBER, "replicas of all instances together", TOPOLOGY, default="1"),
    Option("num-instances", Kind.NUMBER, "processes; replicas are divided evenly", TOPOLOGY, default="1"),
    Option("ipus-per-replica", Kind.NUMBER, "devices that one replica spans", TOPOLOGY, default="1"),
    Option("print-topology", Kind.BOOLEAN, "show which instance drives which replicas", TOPOLOGY, default="no"),
    Option("only-output-from-instance", Kind.NUMBER, "show the output of this instance only", EXECUTION),
    Option("mpi-global-args", Kind.ARGUMENTS, "options for mpirun, given once at the front; adds up", EXECUTION),
    Option("mpi-local-args", Kind.ARGUMENTS, "options for mpirun, given for each instance; adds up", EXECUTION),
    Option("allow-run-as-root", Kind.BOOLEAN, "let mpirun run as root", EXECUTION, default="no"),
    Option(
        "process-placement",
        Kind.TEXT,
        "spreadnuma: each instance on cores of its own; disabled: anywhere",
        EXECUTION,
        choices=("spreadnuma", "disabled"),
        default="spreadnuma",
    ),
    Option("offline-mode", Kind.BOOLEAN, "do not use accelerators, compute on the CPU", EXECUTION, default="no"),
)


def describe_options() -> str:
    """The text of `--help`."""
    sections = dict.fromkeys(option.section for option in OPTIONS)
    blocks = [_describe_section(section) for section in sections]
    usage = "usage: poprun [options] program [program arguments]\n\nOptions end at the first other word."
    return "\n\n".join([usage, *blocks])


def _describe_section(section: str) -> str:
    rows = [(_spell(option), _explain(option)) for option in OPTIONS if option.section == section]
    return "\n".join([f"{section} options:", *(f"  {left:<38} {right}" for left, right in rows)])


def _spell(option: Option) -> str:
    names = " ".join((*option.spellings, f"--{option.name}"))
    words = {Kind.FLAG: "", Kind.BOOLEAN: " yes|no", Kind.NUMBER: " N", Kind.TEXT: " WORD"}
    return names + words.get(option.kind, ' "ARGS"')


def _explain(option: Option) -> str:
    notes = [f"one of {', '.join(option.choices)}"] if option.choices else []
    notes += [f"default {option.default}"] if option.default else []
    return option.help + (f" ({'; '.join(notes)})" if notes else "")
