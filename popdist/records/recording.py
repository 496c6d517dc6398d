"""The recording of each instance's Trainer for `poprun verify`, and the variables that request it.

An instance writes JSON lines into a file of its own in the folder POPDIST_VERIFY_RECORD. The first line has everything
besides the program that decides its bits. Then comes one line per step, written at once, so that a killed instance
leaves a usable file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from popdist.errors import EnvironmentMismatchError

FOLDER_VARIABLE = "POPDIST_VERIFY_RECORD"
"""Folder for the records of the steps of a run of `poprun verify`."""
STEPS_VARIABLE = "POPDIST_VERIFY_STEPS"
"""Number of recorded steps after which a run of `poprun verify` ends with status 0."""
VALUES_VARIABLE = "POPDIST_VERIFY_VALUES"
"""`TRAINING:STEP` of which `poprun verify` keeps the values besides their digests."""
LEAVE_VARIABLE = "POPDIST_VERIFY_LEAVE"
"""Step in which `poprun verify` sends SIGTERM to instance 0."""

SUFFIX = ".jsonl"
CHECKPOINTS = "checkpoints"
"""Subfolder for the checkpoints of the verified program."""

PROCESS, LAYOUT, STEP, VALUES, QUESTION, CHECKPOINT, OBSTACLE, OBSTACLE_TO_JOINS = (
    "process",
    "layout",
    "step",
    "values",
    "question",
    "checkpoint",
    "obstacle",
    "obstacle to joins",
)
"""The kinds of lines."""

LOSS, OPTIMIZER, ELSEWHERE = "loss", "optimizer", ""
"""The values of `Question.where`: the loss function or the optimizer asked while it was compiled, or other code did."""

_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("collectives", "popdist", "strategies"))
_COMPILING = {
    str(_ROOT / "strategies" / "jax" / "gradients" / "replica_program.py"): LOSS,
    str(_ROOT / "strategies" / "jax" / "updates" / "update.py"): OPTIMIZER,
}
_MOST_QUESTIONS = 100


@dataclass(frozen=True)
class Recording:
    """The options of a recording.

    Attributes:
        folder: Folder of the files.
        steps: Number of steps after which the program ends; None: at its own end.
        values_at: Training and step whose values are kept, or None.
        leave_at: Step at which instance 0 receives SIGTERM, or None.
    """

    folder: Path
    steps: int | None = None
    values_at: tuple[int, int] | None = None
    leave_at: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Recording | None:
        """Read the options from the environment; return None if no recording is requested.

        Raises:
            EnvironmentMismatchError: A variable holds no number.
        """
        if not environ.get(FOLDER_VARIABLE):
            return None
        steps, leave = (_numbers(environ, name, 1) for name in (STEPS_VARIABLE, LEAVE_VARIABLE))
        values = _numbers(environ, VALUES_VARIABLE, 2)
        return cls(
            folder=Path(environ[FOLDER_VARIABLE]),
            steps=steps[0] if steps else None,
            values_at=(values[0], values[1]) if values else None,
            leave_at=leave[0] if leave else None,
        )

    def as_variables(self) -> dict[str, str]:
        """Return the variables that request this recording."""
        wanted = {
            STEPS_VARIABLE: self.steps,
            VALUES_VARIABLE: None if self.values_at is None else "{}:{}".format(*self.values_at),
            LEAVE_VARIABLE: self.leave_at,
        }
        given = {name: str(value) for name, value in wanted.items() if value is not None}
        return {FOLDER_VARIABLE: str(self.folder)} | given


def _numbers(environ: Mapping[str, str], name: str, count: int) -> tuple[int, ...]:
    text = environ.get(name, "")
    if not text:
        return ()
    words = text.split(":")
    if len(words) != count or not all(word.isdecimal() for word in words):
        raise EnvironmentMismatchError(f"{name}={text!r} is not what poprun verify sets; unset it")
    return tuple(int(word) for word in words)


@dataclass(frozen=True)
class Question:
    """A use of an instance's identity: the program asked for its index, the number of instances, or similar.

    Attributes:
        what: Name of the function or attribute that it used.
        file: File of the program.
        line: Line in that file.
        where: LOSS, OPTIMIZER or ELSEWHERE.
    """

    what: str
    file: str
    line: int
    where: str = ELSEWHERE


_questions: dict[Question, None] = {}
_obstacles: dict[tuple[str, str], None] = {}


def note_question(what: str) -> None:
    """Record a question of the program about the instance's identity; called by the queried functions.

    Does nothing without a recording. Questions of our own packages are ignored.

    Args:
        what: Name of the function or attribute in use.
    """
    if FOLDER_VARIABLE not in os.environ:
        return
    asking = sys._getframe(2)
    if asking.f_code.co_filename.startswith(_OURS) or len(_questions) == _MOST_QUESTIONS:
        return
    where, frame = ELSEWHERE, asking.f_back
    while frame is not None and not where:
        where, frame = _COMPILING.get(frame.f_code.co_filename, ELSEWHERE), frame.f_back
    _questions.setdefault(Question(what, asking.f_code.co_filename, asking.f_lineno, where))


def questions() -> tuple[Question, ...]:
    """Return the questions asked in this process, in order."""
    return tuple(_questions)


def note_obstacle(reason: str, kind: str = OBSTACLE) -> None:
    """Record a reason why the job ends if an instance is lost. Does nothing without a recording.

    Args:
        reason: The reason in words.
        kind: `OBSTACLE`; or `OBSTACLE_TO_JOINS` if only no spare can take the place of the lost instance.
    """
    if FOLDER_VARIABLE in os.environ:
        _obstacles.setdefault((kind, reason))


def obstacles() -> tuple[tuple[str, str], ...]:
    """Return the kinds and reasons that `note_obstacle` has recorded in this process, in order."""
    return tuple(_obstacles)
