"""Reading poprun's command line: options up to the first other word, then the program and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poprun.errors import UsageError
from poprun.options import OPTIONS, Kind, Option

Value = bool | int | str | tuple[str, ...]

_TRUE = ("yes", "on", "true", "1")
_FALSE = ("no", "off", "false", "0")


@dataclass(frozen=True)
class CommandLine:
    """What the user wrote.

    Attributes:
        values: the options that were given, by name.
        program: the program and its arguments; may be empty.
    """

    values: dict[str, Value] = field(default_factory=dict)
    program: tuple[str, ...] = ()


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Read the words after `poprun`.

    Boost.Program_options is the model: `--name value`, `--name=value`, unambiguous prefixes of long names.

    Raises:
        UsageError: an option is unknown or ambiguous, or its value is missing or wrong.
    """
    values: dict[str, Value] = {}
    position = 0
    while position < len(words) and _is_option(words[position]):
        name, equals, text = words[position].partition("=")
        option = find_option(name)
        position += 1
        attached = text if equals else None
        if attached is None and option.kind is not Kind.FLAG:
            attached = _next_word(words, position, option)
            position += 1
        _store(values, option, _convert(option, attached))
    if words[position : position + 1] == ["--"]:
        position += 1
    return CommandLine(values, tuple(words[position:]))


def find_option(written: str) -> Option:
    """The option that is meant by a word such as `--num-rep`, `-v` or `--print-topology`.

    Raises:
        UsageError: none or several are meant; the nearest ones are named.
    """
    for option in OPTIONS:
        if written == f"--{option.name}" or written in option.spellings:
            return option
    candidates = [option for option in OPTIONS if _is_prefix(written, option)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = " or ".join(f"--{option.name}" for option in candidates)
        raise UsageError(f"option {written} is ambiguous: {names}; write it in full")
    raise UsageError(f"unknown option {written}{_suggest(written)}; poprun --help lists all options")


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")


def _is_prefix(written: str, option: Option) -> bool:
    return len(written) > 2 and f"--{option.name}".startswith(written)


def _suggest(written: str) -> str:
    import difflib  # costs some milliseconds, needed only on the way out

    known = [spelling for option in OPTIONS for spelling in (f"--{option.name}", *option.spellings)]
    nearest = difflib.get_close_matches(written.replace("_", "-"), known, n=3, cutoff=0.6)
    return f", did you mean {' or '.join(nearest)}?" if nearest else ""


def _next_word(words: Sequence[str], position: int, option: Option) -> str:
    if position == len(words):
        raise UsageError(f"--{option.name} needs {option.kind.value}, the command line ends there")
    return words[position]


def _store(values: dict[str, Value], option: Option, value: Value) -> None:
    earlier = values.get(option.name)
    if isinstance(earlier, tuple) and isinstance(value, tuple):
        value = earlier + value
    values[option.name] = value


def _convert(option: Option, text: str | None) -> Value:
    if text is None:
        return True
    if option.kind in (Kind.FLAG, Kind.BOOLEAN):
        return _read_boolean(option, text)
    if option.kind is Kind.NUMBER:
        return _read_number(option, text)
    if option.kind is Kind.ARGUMENTS:
        return _split(option, text)
    if option.choices and text not in option.choices:
        raise UsageError(f"--{option.name} is {text!r}; use one of {', '.join(option.choices)}")
    return text


def _read_boolean(option: Option, text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise UsageError(f"--{option.name} needs yes or no (on, off, true, false, 1, 0), got {text!r}")
    return text.lower() in _TRUE


def _read_number(option: Option, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--{option.name} needs {option.kind.value}, got {text!r}") from None


def _split(option: Option, text: str) -> tuple[str, ...]:
    import shlex  # costs some milliseconds, needed only by those who use it

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--{option.name} cannot be split like a shell does: {error} in {text!r}; check the quotes"
        ) from None
