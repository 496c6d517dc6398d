"""The summary of a job: it collects attempts while the job runs, and is printed or written to a file at the end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from poprun.cli.log import Log, write_all
from poprun.cli.settings import SummaryAsked
from poprun.cli.wording import (
    count,
    duration_text,
    list_instances,
    list_ranges,
    memory_text,
    number_text,
    share_text,
    size_text,
    without_controls,
)
from poprun.errors import UsageError
from poprun.ipc.facts import Facts
from poprun.monitor.attempts import Attempt, Slowest, Totals, add_up, waiting_share


class Summary:
    """The collected attempts at a job, and the output of its summary.

    Raises:
        UsageError: If the file of the summary cannot be written.
    """

    def __init__(self, asked: SummaryAsked, program: tuple[str, ...], log: Log, environ: Mapping[str, str]) -> None:
        self._asked = asked
        self._program = program
        self._log = log
        self._environ = environ
        self._attempts: list[Attempt] = []
        self._began_at_s = time.time()
        self._began_s = time.monotonic()
        if asked.file:
            make_room(asked.file)

    def note(self, attempt: Attempt) -> None:
        """Store an attempt at the job after its end."""
        self._attempts.append(attempt)

    def finish(self, exit_status: int) -> None:
        """Print the lines and write the file; a failure of either does not change the exit status of the job."""
        duration_s = time.monotonic() - self._began_s
        if self._asked.shows_lines(os.isatty(self._log.descriptor), self._log.level, self._environ):
            text = "".join(f"{without_controls(line)}\n" for line in summary_lines(self._attempts, duration_s))
            write_all(self._log.descriptor, text.encode(errors="surrogateescape"))
        if self._asked.file:
            self._write(duration_s, exit_status)

    def _write(self, duration_s: float, exit_status: int) -> None:
        whole: dict[str, object] = {
            "program": list(self._program),
            "began_at_s": self._began_at_s,
            "duration_s": duration_s,
            "exit_status": exit_status,
        }
        try:
            write_summary(self._asked.file, describe_job(whole, self._attempts))
        except OSError as error:
            self._log.warn(f"there is no summary: {self._asked.file} cannot be written: {error.strerror}")


_MOST_NAMED = 8
"""The largest number of instances whose memory is listed; of more instances, the extremes are shown."""


def summary_lines(attempts: Sequence[Attempt], duration_s: float) -> list[str]:
    """Return lines about a job that took `duration_s`, including pauses; unknown facts are left out."""
    totals = add_up(attempts)
    lines = [_first(attempts, totals, duration_s), _second(totals), _carriers_line(attempts), _third(attempts, totals)]
    return [line for line in lines if line]


def _first(attempts: Sequence[Attempt], totals: Totals, duration_s: float) -> str:
    again = f" in {count(len(attempts), 'attempt')}" if len(attempts) > 1 else ""
    size = _describe_size(attempts[-1]) if attempts else "nothing"
    line = f"summary: {size} ran for {duration_text(duration_s)}{again}"
    if not totals.steps:
        return line
    line += f"; {count(totals.steps, 'step')}{' (of all attempts)' if again else ''}"
    if totals.steps_per_s is not None:
        line += f", {number_text(totals.steps_per_s)} steps/s"
    if totals.samples_per_s:
        line += f", {number_text(totals.samples_per_s)} samples/s"
    return line


def _describe_size(attempt: Attempt) -> str:
    there = sum(not each.is_reserve for each in attempt.facts)
    return size_text(there - attempt.spares, attempt.spares)


def _carriers_line(attempts: Sequence[Attempt]) -> str:
    """Return a line about the instances that drove the replicas, if they changed in the last attempt."""
    carriers = attempts[-1].carriers if attempts else ()
    if len(carriers) < 2:
        return ""
    changes = carriers[1:][-_MOST_NAMED:]
    earlier = len(carriers) - 1 - len(changes)
    left_out = f"; {count(earlier, 'earlier change')}" if earlier else ""
    parts = [
        f"from step {each.step} ({duration_text(each.at_s)}) on instances {list_ranges(each.instances, ', ')}"
        for each in changes
    ]
    return f"summary: replicas on instances {list_ranges(carriers[0].instances)}{left_out}; {'; '.join(parts)}"


def _second(totals: Totals) -> str:
    parts = []
    if totals.waiting_share is not None:
        parts.append(f"waiting for others: {share_text(totals.waiting_share)} of the time of steps")
        if totals.slowest is not None:
            parts[0] += f"; {_describe_slowest(totals.slowest)}"
    if totals.survived:
        parts.append(f"survived {count(len(totals.survived), 'fault')}")
    return f"summary: {'; '.join(parts)}" if parts else ""


def _describe_slowest(slowest: Slowest) -> str:
    shares = f"it waited {share_text(slowest.waiting_share)}, the others {share_text(slowest.others_waiting_share)}"
    return f"the slowest is instance {slowest.instance} on host {slowest.host} ({shares})"


def _third(attempts: Sequence[Attempt], totals: Totals) -> str:
    """Return a line about the memory of each instance: its largest peak in any attempt."""
    peaks: dict[int, int] = {}
    for attempt in attempts:
        for each in attempt.facts:
            if each.peak_memory_bytes:
                peaks[each.index] = max(peaks.get(each.index, 0), each.peak_memory_bytes)
    if not peaks:
        return ""
    if len(peaks) > _MOST_NAMED:
        largest, least = max(peaks, key=lambda index: peaks[index]), min(peaks.values())
        return (
            f"summary: peak memory {memory_text(least)} to {memory_text(totals.peak_memory_bytes)}, "
            f"the highest in instance {largest}"
        )
    by_text: dict[str, list[int]] = {}
    for index, peak in sorted(peaks.items()):
        by_text.setdefault(memory_text(peak), []).append(index)
    listed = (f"{text} ({list_instances(who, ',')})" for text, who in by_text.items())
    return f"summary: peak memory {', '.join(listed)}"


VERSION = 1
"""The version of the file; it grows if a key changes its meaning or is removed. summary_json.md lists all keys."""


def describe_job(whole: Mapping[str, object], attempts: Sequence[Attempt]) -> dict[str, object]:
    """Describe a job in values of JSON, unknown ones as None; `whole` has further facts of the job by key."""
    totals = add_up(attempts)
    return {
        "version": VERSION,
        **whole,
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
        "carriers": [asdict(each) for each in attempt.carriers],
    }


def _describe_totals(totals: Totals) -> dict[str, object]:
    described = asdict(totals)
    del described["peak_memory_bytes"], described["survived"]
    return described


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
        "is_spare": each.is_spare,
        "end": None if each.ending is None else each.ending.describe(),
    }


def make_room(file: str) -> None:
    """Remove the summary of an earlier job, and test whether a new one can be written.

    Raises:
        UsageError: If it cannot be written.
    """
    path = Path(file).absolute()
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        beside = _beside(path)
        beside.touch(exist_ok=False)  # fails for a symbolic link that another user has made
        beside.unlink()
    except OSError as error:
        raise UsageError(f"--summary json:{file} cannot be written: {error.strerror}; name another file") from None


def write_summary(file: str, described: dict[str, object]) -> None:
    """Write the file of a summary, whole or not at all.

    Raises:
        OSError: If the file cannot be written.
    """
    import json  # takes some milliseconds, which jobs without a summary save

    path = Path(file).absolute()
    beside = _beside(path)
    try:
        # In ASCII, JSON escapes everything else, even words of the user that are not UTF-8.
        with beside.open("x", encoding="ascii") as made:
            made.write(f"{json.dumps(described, indent=2, allow_nan=False)}\n")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
