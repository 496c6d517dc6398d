"""A fault that is planted in the code to see whether the tests notice it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class OutOfDateError(Exception):
    """The list of faults does not fit the code or the tests."""


@dataclass(frozen=True)
class Fault:
    """A part of a source file, and its replacement while the fault is planted.

    Attributes:
        name: The consequence of the fault, as a statement.
        path: The path of the file from the root of the project.
        old: The right text, which occurs in the file exactly once.
        new: The wrong text.
        caught_by: The node id of a test of the default tier that fails with the fault.
        needs_kernel: Whether the native kernel has to be in use; without it, NumPy's sums are tried.
    """

    name: str
    path: str
    old: str
    new: str
    caught_by: str
    needs_kernel: bool = False

    def __post_init__(self) -> None:
        if self.old == self.new or not self.caught_by:
            raise ValueError(f"{self.name!r} changes nothing, or names no test")

    def planted_in(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            OutOfDateError: The right text is missing, or occurs more than once.
        """
        if (found := text.count(self.old)) != 1:
            raise OutOfDateError(
                f"{self.name!r} wants to change a text that {self.path} has {found} times: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def check(faults: Sequence[Fault], root: Path) -> None:
    """Check that every fault can be planted, and that all have different names.

    Raises:
        OutOfDateError: Some faults cannot be planted; the message names all of them.
    """
    complaints = [
        f"two faults are called {name!r}" for name, times in Counter(f.name for f in faults).items() if times > 1
    ]
    for fault in faults:
        path = root / fault.path
        try:
            fault.planted_in(path.read_text() if path.is_file() else "")
        except OutOfDateError as error:
            complaints.append(str(error))
    if complaints:
        raise OutOfDateError("; ".join(complaints))


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults whose name contains one of `names`; all faults if there are no names.

    Raises:
        OutOfDateError: A name matches no fault.
    """
    for name in names:
        if not any(name in fault.name for fault in faults):
            raise OutOfDateError(f"no fault is called {name!r}; --list shows them")
    return [fault for fault in faults if not names or any(name in fault.name for name in names)]
