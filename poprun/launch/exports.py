"""What `-x` in options for mpirun says. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_OPTION = "-x"


def exports(arguments: Sequence[str]) -> dict[str, str | None]:
    """What `-x NAME=value` sets, and what `-x NAME` forwards (None); the last one of each name."""
    pairs = zip(arguments, arguments[1:], strict=False)
    written = [value.partition("=") for option, value in pairs if option == _OPTION]
    return {name: value if equals else None for name, equals, value in written}


def export_options(variables: dict[str, str | None]) -> list[str]:
    """The options that export these variables: the other way round."""
    return [word for name, value in variables.items() for word in (_OPTION, _assignment(name, value))]


def without_exports(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """The options without those that export these variables."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        exported = next(rest, None) if word == _OPTION else None
        if exported is None or exported.partition("=")[0] not in names:
            kept += [word] if exported is None else [word, exported]
    return kept


def _assignment(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"
