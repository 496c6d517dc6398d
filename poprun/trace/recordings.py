"""Reading what the instances of a job have recorded, also what is cut off."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from popdist.timeline.asked import SUFFIX
from popdist.timeline.blocks import (
    CLOCKS,
    END,
    EVENTS,
    HEADER,
    JOINED,
    MOST_RATIO,
    NAMES,
    PROFILE,
    read_blocks,
    unpack_events,
    unpack_exchanges,
)
from popdist.timeline.events import EVENT, EventKind
from poprun.cli.wording import cut_off
from poprun.errors import PopRunError
from poprun.trace.contents import check_events, header_in, joined_in, names_in, profile_in
from poprun.trace.profiles import Profile


@dataclass(frozen=True, eq=False)
class Recording:
    """What one instance has recorded, in one attempt at the job.

    Attributes:
        instance: its index when the job began.
        instances: how many there were then.
        host: where it ran.
        attempt: how often the job had been started again before.
        clock: names the clock of its times.
        began_ns: when it began, by that clock.
        began_at_s: the same by the clock on the wall.
        job: the same for all instances that have met; empty where this one has met none.
        asked_clock: names the clock of instance 0, with which `exchanges` were; empty where it has met none.
        names: what the names of events stand for, by number.
        events: an array of `popdist.timeline.events.EVENT`.
        exchanges: int64, four of each exchange with the clock of instance 0; see `popdist.timeline.clocks`.
        is_complete: whether the instance came to its end.
        program: what was started; empty where that is unknown.
        replicas: of all instances; 0: unknown.
        profile: what is to be known of the profile beside it, as `popdist.timeline.profiles` says; None: there is none.
    """

    instance: int = 0
    instances: int = 1
    host: str = ""
    attempt: int = 0
    clock: str = ""
    began_ns: int = 0
    began_at_s: float = 0.0
    job: str = ""
    asked_clock: str = ""
    names: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    events: np.ndarray = field(default_factory=lambda: np.empty(0, EVENT))
    exchanges: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    is_complete: bool = False
    program: Sequence[str] = ()
    replicas: int = 0
    profile: Profile | None = None

    @property
    def title(self) -> str:
        """What it is called where there are several."""
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"instance {self.instance} ({self.host}{again})"

    @property
    def events_lost(self) -> int:
        """How many events came too fast to be kept, or had no room in the file."""
        return int(self.events["value"][self.events["kind"] == EventKind.EVENTS_LOST].sum())


_ROOM_BYTES = 1 << 20
"""Of events in files so small that their ratio says nothing."""
_DAMAGED = (
    LookupError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
    AttributeError,
    struct.error,
    zlib.error,
)


def parse_recording(data: bytes) -> Recording | None:
    """Return the recording in a file; None where it is cut off before there is anything.

    Raises:
        ValueError: it is no such file, or damaged.
    """
    try:
        return _parsed(data)
    except _DAMAGED as error:
        raise ValueError(f"it is damaged ({error!r:.80})") from None


def _parsed(data: bytes) -> Recording | None:
    most_bytes = MOST_RATIO * len(data) + _ROOM_BYTES
    facts: dict[str, Any] = {}
    names: dict[int, Mapping[str, Any]] = {}
    events: list[np.ndarray] = []
    exchanges: list[np.ndarray] = []
    is_complete = False
    for found in read_blocks(data):
        if found.kind == HEADER:
            facts |= header_in(found.content)
        elif found.kind == NAMES:
            names |= names_in(found.content)
        elif found.kind == EVENTS:
            events.append(unpack_events(found.content, most_bytes))
            check_events(events[-1], names)
            most_bytes -= events[-1].nbytes
        elif found.kind == CLOCKS:
            exchanges.append(unpack_exchanges(found.content))
        elif found.kind == JOINED:
            facts |= joined_in(found.content)
        elif found.kind == PROFILE:
            facts["profile"] = profile_in(found.content)
        is_complete = found.kind == END
    if not facts:
        return None
    if "clock" not in facts:
        raise ValueError("it has no header")
    return Recording(
        **facts,
        names=names,
        events=np.concatenate(events) if events else np.empty(0, EVENT),
        exchanges=np.concatenate(exchanges) if exchanges else np.zeros((0, 4), np.int64),
        is_complete=is_complete,
    )


def of_newest_job(recordings: Iterable[Recording]) -> list[Recording]:
    """Those of one job with all of its attempts, by attempt and instance.

    A folder may have files of jobs before, where those had more instances or attempts. An attempt before the last one
    belongs to the same job if no other one began between.
    """
    every = sorted(recordings, key=lambda each: each.began_at_s)
    if not every:
        return []
    wanted: list[Recording] = []
    attempt = max((each for each in every if each.instance == 0), key=_began, default=every[-1]).attempt
    newest = every
    while attempt >= 0:
        of_attempt = [each for each in newest if each.attempt == attempt]
        if of_attempt:
            last = max((each for each in of_attempt if each.job), key=_began, default=of_attempt[-1])
            wanted += [each for each in of_attempt if each.job == last.job or not each.job]
        attempt -= 1
    return sorted(wanted, key=lambda each: (each.attempt, each.instance))


def _began(recording: Recording) -> float:
    return recording.began_at_s


def read_recordings(folder: Path) -> list[Recording]:
    """The recordings of the newest job in a folder.

    Raises:
        PopRunError: there are none.
    """
    files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    found = []
    for file in files:
        try:
            found.append(parse_recording(file.read_bytes()))
        except ValueError as error:
            raise PopRunError(
                f"{file} is no recording that can be read: {error}; remove it, or name another folder"
            ) from None
        except OSError as error:
            raise PopRunError(f"{file} cannot be read: {error.strerror}; name a folder that can") from None
    recordings = of_newest_job(each for each in found if each is not None)
    if not recordings:
        raise PopRunError(
            f"there are no recordings in {folder}; name what poprun --timeline or POPDIST_TIMELINE has filled"
        )
    return recordings


def what_is_missing(recordings: Sequence[Recording]) -> list[str]:
    """Warnings: whose recording is not there, ends before its instance did, or has gaps."""
    warnings = []
    for attempt in sorted({each.attempt for each in recordings}):
        there = [each for each in recordings if each.attempt == attempt]
        absent = sorted(set(range(there[0].instances)) - {each.instance for each in there})
        if absent:
            listed = cut_off(", ".join(map(str, absent)))
            warnings.append(
                f"instances {listed} have no recording here; if they ran elsewhere, copy theirs into the folder"
            )
        warnings += [
            f"{each.title} did not come to its end: what it did last may be missing"
            for each in there
            if not each.is_complete
        ]
        warnings += [
            f"{each.title}: {each.events_lost} events are not recorded: they came too fast, or --timeline-limit was "
            "too small for them"
            for each in there
            if each.events_lost
        ]
    return warnings
