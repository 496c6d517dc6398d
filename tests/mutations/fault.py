"""A fault that is planted in the code to see whether the tests notice it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class OutOfDateError(Exception):
    """The list no longer fits the code or the tests."""


@dataclass(frozen=True)
class Fault:
    """A part of a source file, and what stands there instead while the fault is planted.

    Attributes:
        name: what is wrong then, as a statement.
        path: of the file, from the root of the project.
        old: the right text; it occurs there exactly once.
        new: the wrong one.
        caught_by: the node id of a test of the default tier that fails then.
    """

    name: str
    path: str
    old: str
    new: str
    caught_by: str

    def __post_init__(self) -> None:
        if self.old == self.new or not self.caught_by:
            raise ValueError(f"{self.name!r} changes nothing, or names no test")

    def planted_in(self, text: str) -> str:
        """The text of its file with the fault.

        Raises:
            OutOfDateError: the right text is not there, or more than once.
        """
        if (found := text.count(self.old)) != 1:
            raise OutOfDateError(
                f"{self.name!r} wants to change a text that {self.path} has {found} times: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def check(faults: Sequence[Fault], root: Path) -> None:
    """Whether every fault can be planted and told apart.

    Raises:
        OutOfDateError: it says of all that cannot why.
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
    """The faults whose name contains one of `names`; all of them without any.

    Raises:
        OutOfDateError: a name fits none.
    """
    for name in names:
        if not any(name in fault.name for fault in faults):
            raise OutOfDateError(f"no fault is called {name!r}; --list shows them")
    return [fault for fault in faults if not names or any(name in fault.name for name in names)]
