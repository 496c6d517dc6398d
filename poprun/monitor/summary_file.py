"""The summary of a job as a file, which is there as a whole or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from poprun.errors import UsageError
from poprun.ipc.facts import Facts
from poprun.monitor.attempts import Attempt, Totals, add_up, waiting_share

VERSION = 1
"""Grows when a key gets another meaning or goes; docs/observability.md has all of them."""


@dataclass(frozen=True)
class Whole:
    """What is to be said about a job besides its attempts.

    Attributes:
        program: its words.
        began_at_s: when it began, in seconds since 1970.
        duration_s: how long it took, pauses between attempts included.
        exit_status: poprun's.
    """

    program: tuple[str, ...]
    began_at_s: float
    duration_s: float
    exit_status: int


def describe_job(whole: Whole, attempts: Sequence[Attempt]) -> dict[str, object]:
    """Everything, in values that JSON has; what is not known is None."""
    totals = add_up(attempts)
    return {
        "version": VERSION,
        "program": list(whole.program),
        "began_at_s": whole.began_at_s,
        "duration_s": whole.duration_s,
        "exit_status": whole.exit_status,
        "failure": (attempts[-1].failure or None) if attempts else None,
        **_describe_totals(totals),
        "faults_survived": [
            {"attempt": attempt, "followed_by": followed_by, "fault": fault}
            for attempt, followed_by, fault in totals.survived
        ],
        "peak_memory_bytes": totals.peak_memory_bytes or None,
        "attempts": [_describe_attempt(attempt) for attempt in attempts],
    }


def _describe_attempt(attempt: Attempt) -> dict[str, object]:
    return {
        "duration_s": attempt.duration_s,
        "exit_status": attempt.ended.exit_status,
        "failure": attempt.failure or None,
        **_describe_totals(add_up([attempt])),
        "instances": [_describe_instance(each) for each in attempt.facts],
    }


def _describe_totals(totals: Totals) -> dict[str, object]:
    return {
        "steps": totals.steps,
        "samples": totals.samples,
        "steps_per_s": totals.steps_per_s,
        "samples_per_s": totals.samples_per_s,
        "waiting_share": totals.waiting_share,
        "slowest": None if totals.slowest is None else asdict(totals.slowest),
    }


def _describe_instance(each: Facts) -> dict[str, object]:
    made = each.record.made
    loss = made.loss if made.loss is not None and math.isfinite(made.loss) else None
    return {
        "instance": each.index,
        "host": each.host or None,
        "steps": made.steps,
        "samples": made.samples,
        "timed_steps": made.timed_steps,
        "timed_samples": made.timed_samples,
        "timed_s": made.timed_s,
        "waited_s": made.waited_s,
        "waiting_share": waiting_share(made),
        "loss": loss,
        "peak_memory_bytes": each.peak_memory_bytes or None,
        "is_given_up": each.is_given_up,
        "end": None if each.ending is None else each.ending.describe(),
    }


def make_room(file: str) -> None:
    """Take the summary of an earlier job away, and see that there can be one of this job.

    Raises:
        UsageError: there cannot.
    """
    path = Path(file).absolute()
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        beside = _beside(path)
        beside.touch(exist_ok=False)  # so no link that others have made is followed
        beside.unlink()
    except OSError as error:
        raise UsageError(f"--summary json:{file} cannot be written: {error.strerror}; name another file") from None


def write_summary(file: str, described: dict[str, object]) -> None:
    """Write the file, whole.

    Raises:
        OSError: it cannot be written.
    """
    import json  # costs some milliseconds, needed only by those who ask for it

    path = Path(file).absolute()
    beside = _beside(path)
    try:
        # Words of the user that are not UTF-8 are escaped, as everything that is not ASCII.
        with beside.open("x", encoding="ascii") as made:
            made.write(f"{json.dumps(described, indent=2, allow_nan=False)}\n")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
