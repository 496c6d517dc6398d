"""The reader and the help of a subcommand without a program, such as `poprun top`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from poprun.cli.command_line import Value, read_command_line
from poprun.cli.help import describe_section
from poprun.cli.log import show
from poprun.cli.options import Option
from poprun.cli.wording import USUAL_COLUMNS, columns_of, wrap


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, whose options may stand between its other words.

    Attributes:
        usage: The first lines of the help.
        text: The explanation of the command.
        options: The options, all of one section; one of them is `help`.
    """

    usage: str
    text: str
    options: tuple[Option, ...]

    def describe(self, columns: int = USUAL_COLUMNS) -> str:
        """Return the text of `--help`."""
        described = describe_section(self.options[0].section, self.options, columns)
        return "\n\n".join([self.usage, wrap(self.text, columns), described])

    def read(self, words: Sequence[str]) -> tuple[dict[str, Value], tuple[str, ...]]:
        """Return the given options by name, and the other words.

        Raises:
            UsageError: An option is unknown or ambiguous, or its value is missing or wrong.
            SystemExit: The user asks for the help, which is shown.
        """
        line = read_command_line(words, self.options, mixed=True)
        if line.values.get("help"):
            show(self.describe(columns_of(os.environ) or USUAL_COLUMNS))
            raise SystemExit(0)
        return line.values, line.program
