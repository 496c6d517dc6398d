"""Configuration files: the options of a launch, and optionally its program, as TOML.

A file holds the given options under their long names, in the order of `--help`; all other options have their defaults.
Importing and exporting a file again gives the same bytes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from popdist.records.private_files import fault_of_file, open_unless_linked
from poprun.cli.command_line import CommandLine, Value, read_value, split_instances
from poprun.cli.launch_options import OPTIONS
from poprun.cli.options import Option, OptionKind
from poprun.cli.wording import cut_off, name_nearest, without_controls
from poprun.errors import UsageError

PROGRAM = "program"
"""The key of the program and its arguments."""

_MOST_CHARACTERS = 1 << 28
"""The limit for files to read; the longest certificate is far shorter."""

_WITHOUT_QUOTES = (OptionKind.FLAG, OptionKind.BOOLEAN, OptionKind.NUMBER, OptionKind.INSTANCES, OptionKind.SECONDS)
_EXCLUSIVE = (frozenset(("host", "hostfile")),)


def format_config(line: CommandLine) -> str:
    """Return the text of a configuration file.

    Options that concern one call of poprun only, such as `--dry-run` and `--export-config`, are left out.
    """
    import tomli_w  # takes some milliseconds to load, and few launches export

    table: dict[str, object] = {
        option.name: list(value) if isinstance(value := line.values[option.name], tuple) else value
        for option in OPTIONS
        if not option.once and option.name in line.values
    }
    if line.program:
        table[PROGRAM] = list(line.program)
    return tomli_w.dumps(table)


def parse_config(text: str, path: str) -> CommandLine:
    """Read a configuration file as if its options had been written on a command line.

    Raises:
        UsageError: The text is not TOML, a key is unknown, or a value is wrong.
    """
    import tomllib  # takes some milliseconds to load, and few launches import

    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, or thousands of brackets
        raise UsageError(f"configuration {path} is not TOML: {_one_line(error)}") from None
    program = table.pop(PROGRAM, [])
    if not isinstance(program, list) or not all(isinstance(word, str) for word in program):
        raise UsageError(f'configuration {path}: program is not a list of words; write `program = ["python", "x.py"]`')
    values = {key: _read(_find(key, path), value, path) for key, value in table.items()}
    return CommandLine(values, tuple(program))


def merge(line: CommandLine, imported: CommandLine) -> CommandLine:
    """Return the command line, completed by a file. A list of the command line replaces that of the file."""
    given = set(line.values)
    displaced = {name for group in _EXCLUSIVE if group & given for name in group} | given
    if ":" in str(line.values.get("num-instances")):
        displaced.add("spares")
    kept = {name: value for name, value in imported.values.items() if name not in displaced}
    if "spares" in given and "num-instances" in kept:
        kept["num-instances"] = split_instances(kept["num-instances"])[0]
    return CommandLine(kept | line.values, line.program or imported.program)


def import_config(line: CommandLine) -> CommandLine:
    """Return the command line, completed by the file that `--import-config` names, if any.

    Raises:
        UsageError: The file cannot be read, or is no valid configuration.
    """
    path = line.values.get("import-config")
    if path is None:
        return line
    try:
        text = read_trusted(Path(str(path)), "configuration")
    except OSError as error:
        raise UsageError(f"configuration {path} cannot be read: {error.strerror}; check --import-config") from None
    except UnicodeDecodeError:
        raise UsageError(f"configuration {path} is not a text file; check --import-config") from None
    return merge(line, parse_config(text, str(path)))


def read_trusted(path: Path, what: str) -> str:
    """Return the text of a file whose content decides what poprun runs.

    Args:
        path: The path of the file.
        what: The kind of file, for messages.

    Raises:
        UsageError: Another user can change the file, or the file is too long.
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is not UTF-8 text.
    """
    with path.open(encoding="utf-8") as file:
        if fault := fault_of_file(file.fileno()):
            raise UsageError(f"{what} {path} controls which program poprun runs, but {fault}")
        text = file.read(_MOST_CHARACTERS)
        if len(text) == _MOST_CHARACTERS:
            raise UsageError(f"{what} {path} has {_MOST_CHARACTERS} characters or more; name the right file")
        return text


def open_own(path: Path, flags: int) -> int:
    """Open a file for writing that no other user can write to, and return its descriptor.

    Args:
        path: The path of the file, which is created if it does not exist.
        flags: Flags of `os.open` besides O_WRONLY and O_CREAT, such as `os.O_EXCL`.

    Raises:
        OSError: The file cannot be written.
    """
    descriptor = open_unless_linked(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o022 and status.st_uid == os.geteuid():
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~0o022)
    return descriptor


def check_export(line: CommandLine) -> None:
    """Refuse an existing `--export-config` file early: preparing hosts, which comes first, may take an hour.

    Raises:
        UsageError: The file exists and may not be replaced.
    """
    path = line.values.get("export-config")
    if path is not None and Path(str(path)).exists() and not line.values.get("overwrite-config"):
        raise _exists(path)


def export_config(line: CommandLine) -> str | None:
    """Write the file that `--export-config` names, if any, and return its path.

    Raises:
        UsageError: The file exists and may not be replaced, or it cannot be written.
    """
    path = line.values.get("export-config")
    if path is None:
        return None
    text = format_config(line)
    try:
        data = text.encode()
        replaces = line.values.get("overwrite-config")
        with open(open_own(Path(str(path)), os.O_TRUNC if replaces else os.O_EXCL), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise _exists(path) from None
    except UnicodeEncodeError:
        raise UsageError("the options or the program are not valid UTF-8, which TOML needs; leave them out") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; check --export-config") from None
    return str(path)


def _one_line(said: object) -> str:
    return without_controls(cut_off(str(said)))


def _exists(path: Value) -> UsageError:
    return UsageError(f"{path} exists; give --overwrite-config yes, or another name to --export-config")


def _find(key: str, path: str) -> Option:
    settings = {option.name: option for option in OPTIONS if not option.once}
    if key in settings:
        return settings[key]
    if any(option.name == key for option in OPTIONS):
        raise UsageError(f"configuration {path}: {key} applies to a single call of poprun; give it on the command line")
    nearest = name_nearest(key, [*settings, PROGRAM])
    raise UsageError(
        f"configuration {path} has an unknown key {_one_line(key)}{nearest or '; poprun --help-all lists all options'}"
    )


def _read(option: Option, value: object, path: str) -> Value:
    try:
        return _convert(option, value)
    except UsageError as error:
        raise UsageError(f"configuration {path}: {_one_line(error)}") from None


def _convert(option: Option, value: object) -> Value:
    """Convert a value of TOML; a text, a number or a boolean is read like a word of the command line."""
    if isinstance(value, str) or (isinstance(value, bool | int | float) and option.kind in _WITHOUT_QUOTES):
        return read_value(option, str(value))
    if option.is_repeatable and isinstance(value, list) and all(isinstance(word, str) for word in value):
        for word in value if option.kind is not OptionKind.ARGUMENTS else ():
            read_value(option, word)
        return tuple(value)
    raise UsageError(f"--{option.name} needs {option.kind.needs}, got {value!r}")
