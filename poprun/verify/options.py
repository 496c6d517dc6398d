"""The options of `poprun verify`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from poprun.cli.command_line import CommandLine, Value, find_option, read_command_line
from poprun.cli.config import import_config
from poprun.cli.help import describe_section
from poprun.cli.launch_options import OPTIONS
from poprun.cli.options import Option, OptionKind, option, options_of
from poprun.cli.wording import USUAL_COLUMNS, wrap
from poprun.errors import UsageError

VERIFY = "Verify"
SOME_FAULT = "some"
"""The value of `--inject` if the user names no fault."""

TEXT, PATH = OptionKind.TEXT, OptionKind.PATH
MPI, RING, GRPC = "mpi", "ring", "grpc"
TRANSPORTS = (MPI, RING, GRPC)

_NOT_OF_VERIFY = {
    "num-instances": "verify chooses the numbers of instances; name them with --spreads",
    "on-failure": "a failed run ends; use --inject for a run with a failure under shrink",
    "max-restarts": "nothing is started again; leave it out",
    "restart-backoff-s": "nothing is started again; leave it out",
    "min-instances": "nothing is started again; leave it out",
    "dry-run": "verify has no dry run; leave it out",
    "json": "verify writes JSON with --certificate FILE",
    "export-config": "verify has no configuration; leave it out",
    "overwrite-config": "verify has no configuration; leave it out",
    "metrics": "every run would write them; start the program without verify",
    "norms-every": "every run would take them, and nothing would write them; start the program without verify",
    "histograms-every": "every run would take them, and nothing would write them; start the program without verify",
    "timeline": "a timeline shows one run; start the program without verify",
    "timeline-limit": "a timeline shows one run; leave it out",
    "profile": "a profile shows one run; leave it out",
    "version": "write poprun --version",
    "version-format": "write poprun --version",
}

USAGE = """\
usage: poprun verify --num-replicas R [options] program ...
       poprun verify --against FILE [options]"""


_of_verify = partial(option, section=VERIFY)


@dataclass(frozen=True)
class VerifyRequest:
    """The user's request to `poprun verify`; each of its own options is a field.

    Attributes:
        line: The options of poprun for every run, and the program.

    Raises:
        UsageError: If the options are impossible, or exclude each other.
    """

    line: CommandLine
    spreads: tuple[int, ...] = _of_verify((), TEXT, "numbers of instances, e.g. 1,2,8; default: at most 4 that fit")
    steps: int | None = _of_verify(None, OptionKind.NUMBER, "end each run after this number of steps")
    transports: tuple[str, ...] = _of_verify(
        (MPI,), TEXT, "the connections between instances: mpi, ring (only messages of MPI), grpc", shown=""
    )
    inject: tuple[str, ...] = _of_verify(
        (),
        OptionKind.FAULT,
        "one more run, with this failure under shrink; without a fault, an instance is killed half-way",
        if_bare=SOME_FAULT,
    )
    with_losses: bool = _of_verify(
        False,
        OptionKind.FLAG,
        "one more run, which loses instances and gets a spare (--spares: their number), against one process",
    )
    resume: bool = _of_verify(
        False, OptionKind.FLAG, "one more run, which is stopped and resumed on another number of instances"
    )
    certificate: Path | None = _of_verify(None, PATH, "if all runs are equal, write a certificate of them to this file")
    against: Path | None = _of_verify(None, PATH, "repeat the runs of a certificate, and compare")
    record_dir: Path | None = _of_verify(None, PATH, "keep the records of the runs in this new directory")

    def __post_init__(self) -> None:
        if not self.line.program and self.against is None:
            raise UsageError(f"no program given; {USAGE.splitlines()[0]}")
        for spread in self.spreads:
            if spread < 1 or (self.knows_replicas and self.replicas % spread):
                fitting = ",".join(str(each) for each in divisors(self.replicas))
                raise UsageError(
                    f"--spreads names {spread} instances for {self.replicas} replicas, which must divide evenly: "
                    f"use some of {fitting}, or another --num-replicas"
                )
        if set(self.transports) == {GRPC} and (self.inject or self.with_losses):
            name = "--inject" if self.inject else "--with-losses"
            raise UsageError(f"{name} needs shrink, which works over MPI, and --transports names only grpc; add mpi")

    @property
    def knows_replicas(self) -> bool:
        """Whether R is known before a certificate is read."""
        return self.against is None or "num-replicas" in self.line.values

    @property
    def replicas(self) -> int:
        """The number of replicas R."""
        return int(str(self.line.values.get("num-replicas", 1)))

    @property
    def named_spares(self) -> int | None:
        """The number of spares that the user names for runs with failures; None if the user names none."""
        named = self.line.values.get("spares")
        return None if named is None else int(str(named))


OPTIONS_OF_VERIFY: tuple[Option, ...] = options_of(VerifyRequest)
_OPTIONS = (*(each for each in OPTIONS if each.name != "inject"), *OPTIONS_OF_VERIFY)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in increasing order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def describe_verify(columns: int = USUAL_COLUMNS) -> str:
    """Return the text of `poprun verify --help`, for a page with `columns` columns."""
    return "\n\n".join(
        [
            USAGE,
            describe_section(VERIFY, OPTIONS_OF_VERIFY, columns),
            wrap("All other options of poprun apply to every run, see poprun --help.", columns),
        ]
    )


def read_words(words: Sequence[str]) -> VerifyRequest | None:
    """Read the words after `poprun verify`; return None for `--help`.

    Raises:
        UsageError: If the words cannot be understood, or ask for something impossible.
    """
    line = read_command_line(words, _OPTIONS)
    if line.values.get("help") or line.values.get("help-all"):
        return None
    own = {each.name: line.values[each.name] for each in OPTIONS_OF_VERIFY if each.name in line.values}
    rest = import_config(
        CommandLine({name: line.values[name] for name in line.values if name not in own}, line.program)
    )
    for name, way_out in _NOT_OF_VERIFY.items():
        if name in rest.values and find_option(f"--{name}"):
            raise UsageError(f"--{name} is not for poprun verify: {way_out}")
    steps, paths = own.get("steps"), ("certificate", "against", "record-dir")
    spreads = _numbers(str(own["spreads"])) if "spreads" in own else ()
    return VerifyRequest(
        line=_with_replicas(rest, spreads) if "against" not in own else rest,
        spreads=spreads,
        transports=_transports(str(own["transports"])) if "transports" in own else (MPI,),
        steps=None if steps is None else int(str(steps)),
        inject=_faults(own.get("inject")),
        with_losses=bool(own.get("with-losses")),
        resume=bool(own.get("resume")),
        **{name.replace("-", "_"): Path(str(own[name])) for name in paths if name in own},
    )


def _with_replicas(line: CommandLine, spreads: tuple[int, ...]) -> CommandLine:
    """Return the line with a number of replicas; by default, one for each instance of the largest spread."""
    if not spreads or "num-replicas" in line.values:
        return line
    return CommandLine(line.values | {"num-replicas": max(spreads)}, line.program)


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isascii() or not word.isdecimal() or len(word) > 9:
            raise UsageError(f"--spreads is {text!r}; write numbers of instances such as 1,2,8")
    return tuple(dict.fromkeys(int(word) for word in words))


def _transports(text: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in TRANSPORTS:
            raise UsageError(f"--transports names {word!r}; use some of {','.join(TRANSPORTS)}")
    return tuple(dict.fromkeys(words))


def _faults(value: Value | None) -> tuple[str, ...]:
    return tuple(str(each) for each in value) if isinstance(value, tuple) else ()
