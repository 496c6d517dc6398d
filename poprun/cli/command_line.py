"""The parser of poprun's command line: options up to the first other word, then the program and its arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from poprun.cli.launch_options import OPTIONS, LaunchOptions
from poprun.cli.options import WORDS_FOR_NO, WORDS_FOR_YES, Option, OptionKind
from poprun.cli.settings import PARTITION_VARIABLE, LaunchSettings
from poprun.cli.wording import count, name_nearest
from poprun.errors import UsageError

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from popdist.records.faults import Fault

Value = bool | int | float | str | tuple[str, ...]

_NUMBER = re.compile(r"[+-]?[0-9]{1,4000}")
"""A whole number. `int` would also read `1_0` and digits of every script, and it refuses more than 4300 digits."""

_FRACTION = re.compile(r"[+-]?(?:[0-9]{0,4000}[.][0-9]{1,4000}|[0-9](?:[.][0-9]{1,400})?e-[0-9]{1,3})")
"""A number with a fraction, which options that take seconds accept too; configuration files hold `1e-05`."""

_WITHOUT_DASH = (OptionKind.TEXT, OptionKind.PATH, OptionKind.HOSTS, OptionKind.METRICS)
"""Kinds whose values seldom begin with a dash: in `--output-dir --timestamps` the value was forgotten."""

_MEETS_BY_ITSELF = ": instances find each other without it; leave it out"
_COUNTED_TOGETHER = "; --num-instances (-n) counts the processes of all hosts together, and --host names the hosts"

_ELSEWHERE = {
    **dict.fromkeys(("-c", "--n", "--ntasks"), ", did you mean --num-instances?"),
    "-x": ", did you mean --mpi-local-args?",
    **dict.fromkeys(("--bind-to", "--map-by", "--mca", "--oversubscribe"), ", did you mean --mpi-global-args?"),
    **dict.fromkeys(
        ("--nproc-per-node", "--nproc_per_node", "--nnodes", "--nodes", "-N", "--npernode", "-npernode"),
        _COUNTED_TOGETHER,
    ),
    "-m": ", which is Python's: write `poprun [options] python -m MODULE`",
    **dict.fromkeys(("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"), _MEETS_BY_ITSELF),
    **dict.fromkeys(("--master-addr", "--master-port", "--node-rank"), _MEETS_BY_ITSELF),
    **dict.fromkeys(("--top-address", "--address"), ": watch a job on another host by `ssh HOST poprun top`"),
}
"""Options of mpirun, torchrun, horovodrun, srun and earlier versions, each with the way to the same effect."""


@dataclass(frozen=True)
class CommandLine:
    """The options and the program that the user wrote.

    Attributes:
        values: The given options, by name.
        program: The program and its arguments; may be empty.
    """

    values: dict[str, Value] = field(default_factory=dict)
    program: tuple[str, ...] = ()


def read_command_line(words: Sequence[str], options: Sequence[Option] = OPTIONS, mixed: bool = False) -> CommandLine:
    """Read the words after `poprun`.

    The syntax follows Boost.Program_options: `--name value`, `--name=value`, unambiguous prefixes of long names.

    Args:
        words: The words.
        options: The known options.
        mixed: Whether options may stand between other words, which `program` then holds. Otherwise, the first other
            word ends the options and begins the program.

    Raises:
        UsageError: An option is unknown or ambiguous, or its value is missing or wrong.
    """
    values: dict[str, Value] = {}
    others: list[str] = []
    position = 0
    while position < len(words) and (_is_option(words[position]) or mixed):
        if not _is_option(words[position]):
            others.append(words[position])
            position += 1
            continue
        name, equals, text = words[position].partition("=")
        option = find_option(name, options)
        position += 1
        attached = text if equals else None
        if attached is None and option.if_bare and not _is_fault(words[position : position + 1]):
            _store(values, option, (option.if_bare,))
            continue
        if attached is None and option.kind is not OptionKind.FLAG:
            attached = _next_word(words, position, option)
            position += 1
        _store(values, option, True if attached is None else read_value(option, attached))
    if words[position : position + 1] == ["--"]:
        position += 1
    return CommandLine(values, (*others, *words[position:]))


def find_option(written: str, options: Sequence[Option] = OPTIONS) -> Option:
    """Find the option that a word such as `--num-rep`, `-v` or `--print-topology` names.

    Raises:
        UsageError: The word fits no option, or several; the message names the nearest options.
    """
    for option in options:
        if written == f"--{option.name}" or written in option.spellings:
            return option
    candidates = [] if _elsewhere(written) else [option for option in options if _is_prefix(written, option)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = " or ".join(f"--{option.name}" for option in candidates)
        raise UsageError(f"option {written} is ambiguous: {names}; write it in full")
    command = "poprun --help-all" if options is OPTIONS else "--help"
    raise UsageError(f"unknown option {written}{_suggest(written, options)}; {command} lists all options")


def read_value(option: Option, text: str) -> Value:
    """Read the value that follows an option.

    Raises:
        UsageError: The text is not a value of the option's kind.
    """
    if option.kind in (OptionKind.FLAG, OptionKind.BOOLEAN):
        return _read_boolean(option, text)
    if option.kind in (OptionKind.NUMBER, OptionKind.SECONDS):
        return _read_number(option, text)
    if option.kind is OptionKind.INSTANCES:
        return _read_instances(option, text)
    if option.kind is OptionKind.ARGUMENTS:
        return _split(option, text)
    if option.kind is OptionKind.METRICS:
        return (read_metrics(text),)
    if option.kind is OptionKind.FAULT:
        read_fault(text)
        return (text,)
    if option.kind is OptionKind.INSTANCE_ARGUMENTS:
        read_instance_arguments(text)
        return (text,)
    if not text:
        raise UsageError(f"--{option.name} is empty; give it {option.kind.needs}")
    if option.choices and text not in option.choices:
        raise UsageError(f"--{option.name} is {text!r}; use one of {', '.join(option.choices)}")
    return (text,) if option.kind is OptionKind.HOSTS else text


def read_instance_arguments(text: str) -> tuple[int, tuple[str, ...]]:
    """Split `<index>:-x A=1 -x B=2` into the instance and the words; quotes around all words are removed.

    Raises:
        UsageError: The index or the colon is missing, or the words cannot be split.
    """
    option = find_option("--instance-mpi-local-args")
    index, colon, arguments = text.partition(":")
    if not colon or not index.strip().isdecimal():
        raise UsageError(f'--{option.name} is {text!r}; write the index of the instance first: 0:"-x NAME=value"')
    words = _split(option, arguments)
    if len(words) == 1 and arguments.strip()[:1] in ('"', "'"):
        words = _split(option, words[0])
    return int(index), words


def read_fault(text: str) -> Fault:
    """Parse a value of `--inject`.

    Raises:
        UsageError: The text describes no fault.
    """
    from popdist.records.faults import parse_fault  # takes some milliseconds to load, and few launches inject faults

    try:
        return parse_fault(text)
    except ValueError as error:
        raise UsageError(f"--inject {text!r}: {error}") from None


def read_metrics(text: str) -> str:
    """Check a value of `--metrics`, and return it unchanged.

    Raises:
        UsageError: The text does not name a destination for metrics.
    """
    from popdist.records.metric_words import parse_words  # takes some milliseconds to load, and few launches need it

    try:
        words = parse_words([text])
    except ValueError as error:
        raise UsageError(f"--metrics {error}") from None
    if not words:
        raise UsageError("--metrics is empty; give a destination for metrics, such as csv:run.csv")
    return text


def _check_number(option: Option, number: float) -> None:
    if option.at_least is not None and number < option.at_least:
        raise UsageError(f"--{option.name} is {number}; use {option.at_least} or more")
    if not number <= option.at_most:  # every comparison with nan is false
        raise UsageError(f"--{option.name} is {number}; use at most {option.at_most}")


def settings_from(line: CommandLine, environ: Mapping[str, str] = MappingProxyType({})) -> LaunchSettings:
    """Return the settings of a command line; by default each instance has one replica.

    Args:
        line: The user's words.
        environ: Environment variables; the partition and the name of the run are read from them.

    Raises:
        UsageError: The settings are impossible.
    """
    given = {name.replace("-", "_"): value for name, value in line.values.items()}
    values: dict[str, object] = {name: given[name] for name in LaunchOptions.__annotations__ if name in given}
    _settle_spares(values)
    values.setdefault("num_replicas", values.get("num_instances", 1))
    if environ.get(PARTITION_VARIABLE):
        values.setdefault("vipu_partition", environ[PARTITION_VARIABLE])
    if isinstance(texts := values.get("instance_mpi_local_args"), tuple):
        values["instance_mpi_local_args"] = tuple(read_instance_arguments(text) for text in texts)
    if values.get("metrics"):
        from popdist.records.metric_words import RUN_VARIABLE

        values["metrics_run"] = environ.get(RUN_VARIABLE) or os.urandom(6).hex()
    make: Callable[..., LaunchSettings] = LaunchSettings  # each value was read as its option needs it
    return make(line.program, **values)


def split_instances(value: object) -> tuple[int, int | None]:
    """Return the numbers of instances and of spares in a value of `--num-instances`; None: it names no spares."""
    least, colon, most = str(value).partition(":")
    return int(least), int(most) - int(least) if colon else None


def _settle_spares(values: dict[str, object]) -> None:
    """Replace `N:M` by the numbers of instances and spares; with spares, replace lost instances by default."""
    named = None
    if "num_instances" in values:
        values["num_instances"], named = split_instances(values["num_instances"])
    if named is not None and values.setdefault("spares", named) != named:
        most = f"{values['num_instances']}:{int(str(values['num_instances'])) + named}"
        raise UsageError(
            f"--num-instances {most} starts {count(named, 'spare')}, but --spares is {values['spares']}; "
            "give one of them"
        )
    if values.get("spares"):
        values.setdefault("on_failure", "replace")
    if values.get("regrow"):
        values.setdefault("on_failure", "shrink")


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")


def _is_prefix(written: str, option: Option) -> bool:
    return len(written) > 2 and f"--{option.name}".startswith(written)


def _is_fault(words: Sequence[str]) -> bool:
    """Return whether the next word is a fault, and not the program."""
    from popdist.records.faults import KINDS

    return bool(words) and words[0].partition(":")[0] in KINDS and ":" in words[0]


def _elsewhere(written: str) -> str:
    return _ELSEWHERE.get(written, "") or _ELSEWHERE.get(written.replace("_", "-"), "")


def _suggest(written: str, options: Sequence[Option]) -> str:
    if said := _elsewhere(written):
        return said
    return name_nearest(written, [name for option in options for name in (f"--{option.name}", *option.spellings)])


def _next_word(words: Sequence[str], position: int, option: Option) -> str:
    if position == len(words):
        raise UsageError(f"--{option.name} needs {option.kind.needs}, but the command line ends there")
    word = words[position]
    if word.startswith("-") and option.kind in _WITHOUT_DASH:
        raise UsageError(
            f"--{option.name} needs {option.kind.needs}, got {word!r}; "
            f"write --{option.name}={word} if {word!r} is not the next option"
        )
    return word


def _store(values: dict[str, Value], option: Option, value: Value) -> None:
    earlier = values.get(option.name)
    if isinstance(earlier, tuple) and isinstance(value, tuple):
        value = earlier + value
    values[option.name] = value


def _read_boolean(option: Option, text: str) -> bool:
    if text.lower() not in WORDS_FOR_YES + WORDS_FOR_NO:
        raise UsageError(f"--{option.name} needs yes or no (on, off, true, false, 1, 0), got {text!r}")
    return text.lower() in WORDS_FOR_YES


def _read_number(option: Option, text: str) -> int | float:
    is_fraction = option.kind is OptionKind.SECONDS and _FRACTION.fullmatch(text)
    if not is_fraction and not _NUMBER.fullmatch(text):
        hint = f"; this machine has {os.cpu_count()} cores" if text in ("auto", "gpu", "cpu") else ""
        raise UsageError(f"--{option.name} needs {option.kind.needs}, got {text!r}{hint}")
    number = float(text) if is_fraction else int(text)
    _check_number(option, number)
    return number


def _read_instances(option: Option, text: str) -> int | str:
    least, colon, most = text.partition(":")
    first = int(_read_number(option, least))
    if not colon:
        return first
    last = int(_read_number(option, most))
    if last < first:
        raise UsageError(f"--{option.name} is {text!r}; write the number without spares first, such as {last}:{first}")
    return f"{first}:{last}"


def _split(option: Option, text: str) -> tuple[str, ...]:
    import shlex

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--{option.name} cannot be split into words as in a shell: {error} in {text!r}; check the quotes"
        ) from None
