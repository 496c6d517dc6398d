"""Reading and validation of the instances' recordings, which may be cut off, damaged or foreign."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np

from popdist.timeline.asked import SUFFIX
from popdist.timeline.events import (
    CLOCKS,
    END,
    EVENT,
    EVENTS,
    HEADER,
    JOINED,
    MOST_RATIO,
    NAMES,
    PROFILE,
    EventKind,
    read_blocks,
    unpack_events,
    unpack_exchanges,
)
from poprun.cli.wording import count, cut_off
from poprun.errors import PopRunError
from poprun.trace.profiles import Profile


@dataclass(frozen=True, eq=False)
class InstanceRecording:
    """The recording of one instance, in one attempt at the job.

    Attributes:
        instance: The index of the instance when the job began. Spares have the numbers after those of the instances.
        instances: The number of instances when the job began, without spares.
        host: The host of the instance.
        attempt: The number of restarts of the job before.
        clock: The name of the clock of all times in the recording.
        began_ns: The begin of the recording on that clock.
        began_at_s: The begin of the recording on the wall clock.
        job: The name of the job, equal for all instances that met in `popdist.init`; "" if this one met none.
        asked_clock: The name of instance 0's clock, with which `exchanges` were made; "" if there were none.
        names: The meaning of events' names, by number.
        events: The events, an array of `popdist.timeline.events.EVENT`.
        exchanges: int64, four times of each exchange with instance 0's clock; see `popdist.timeline.clocks`.
        is_complete: Whether the recording has its end.
        program: The words of the program; empty if unknown.
        replicas: The number of replicas of all instances; 0 if unknown.
        profile: The profile beside the recording, as `popdist.timeline.profiles` describes it; None without one.
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
    names: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    events: np.ndarray = field(default_factory=lambda: np.empty(0, EVENT))
    exchanges: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    is_complete: bool = False
    program: Sequence[str] = ()
    replicas: int = 0
    profile: Profile | None = None

    @property
    def is_spare(self) -> bool:
        """Whether the recording begins as that of a spare."""
        return self.instance >= self.instances

    @property
    def short_title(self) -> str:
        """The instance or spare with its number."""
        return f"{'spare' if self.is_spare else 'instance'} {self.instance}"

    @property
    def title(self) -> str:
        """A name that distinguishes the recording from the others of the job."""
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"{self.short_title} ({self.host}{again})"

    @property
    def events_lost(self) -> int:
        """The number of events that are not recorded, because they came too fast or the file had no room."""
        return int(self.events["value"][self.events["kind"] == EventKind.EVENTS_LOST].sum())


_ROOM_BYTES = 1 << 20
"""The bytes of events allowed in addition to `MOST_RATIO`, which is too strict for small files."""
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


def parse_recording(data: bytes) -> InstanceRecording | None:
    """Return the recording in a file; None if the file was cut off before its header.

    Raises:
        ValueError: If the file is no recording, or is damaged.
    """
    try:
        return _parsed(data)
    except _DAMAGED as error:
        raise ValueError(f"it is damaged ({error!r:.80})") from None


def _parsed(data: bytes) -> InstanceRecording | None:
    most_bytes = MOST_RATIO * len(data) + _ROOM_BYTES
    recording: InstanceRecording | None = None
    names: dict[int, Mapping[str, object]] = {}
    events: list[np.ndarray] = []
    exchanges: list[np.ndarray] = []
    is_complete = False
    for found in read_blocks(data):
        if found.kind == HEADER:
            recording = _header_in(found.content)
        elif found.kind == NAMES:
            names |= _names_in(found.content)
        elif found.kind == EVENTS:
            events.append(unpack_events(found.content, most_bytes))
            _check_events(events[-1], names)
            most_bytes -= events[-1].nbytes
        elif found.kind == CLOCKS:
            exchanges.append(unpack_exchanges(found.content))
        elif found.kind == JOINED:
            recording = _joined(recording, found.content)
        elif found.kind == PROFILE:
            recording = replace(_known(recording), profile=_profile_in(found.content))
        is_complete = found.kind == END
    if recording is None:
        return None
    return replace(
        recording,
        names=names,
        events=np.concatenate(events) if events else np.empty(0, EVENT),
        exchanges=np.concatenate(exchanges) if exchanges else np.zeros((0, 4), np.int64),
        is_complete=is_complete,
    )


def of_newest_job(recordings: Iterable[InstanceRecording]) -> list[InstanceRecording]:
    """Return the recordings of all attempts of the newest job, sorted by attempt and instance.

    A folder may have files of earlier jobs with more instances or attempts. An earlier attempt belongs to the same job
    if no other job began in between.
    """
    every = sorted(recordings, key=lambda each: each.began_at_s)
    if not every:
        return []
    wanted: list[InstanceRecording] = []
    attempt = max((each for each in every if each.instance == 0), key=_began, default=every[-1]).attempt
    newest = every
    while attempt >= 0:
        of_attempt = [each for each in newest if each.attempt == attempt]
        if of_attempt:
            last = max((each for each in of_attempt if each.job), key=_began, default=of_attempt[-1])
            wanted += [each for each in of_attempt if each.job == last.job or not each.job]
        attempt -= 1
    return sorted(wanted, key=lambda each: (each.attempt, each.instance))


def _began(recording: InstanceRecording) -> float:
    return recording.began_at_s


def read_recordings(folder: Path) -> list[InstanceRecording]:
    """Read the recordings of the newest job in a folder.

    Raises:
        PopRunError: If there are none, or if a file cannot be read.
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
            f"there are no recordings in {folder}; name a folder that poprun --timeline or POPDIST_TIMELINE has filled"
        )
    return recordings


def what_is_missing(recordings: Sequence[InstanceRecording]) -> list[str]:
    """Return warnings about recordings that are missing, end too early, or have gaps."""
    warnings = []
    for attempt in sorted({each.attempt for each in recordings}):
        there = [each for each in recordings if each.attempt == attempt]
        absent = sorted(set(range(there[0].instances)) - {each.instance for each in there})
        if absent:
            listed = cut_off(", ".join(map(str, absent)))
            warnings.append(
                f"instance {listed} has no recording here; if it ran on another host, copy its file here"
                if len(absent) == 1
                else f"instances {listed} have no recording here; if they ran on other hosts, copy their files here"
            )
        warnings += [
            f"{each.title} did not come to its end: its last events may be missing"
            for each in there
            if not each.is_complete
        ]
        warnings += [
            f"{each.title}: {count(each.events_lost, 'event')} could not be recorded, because events came too fast, or "
            "because --timeline-limit was too small"
            for each in there
            if each.events_lost
        ]
    return warnings


_MOST_INSTANCES = _MOST_NAMES = 1 << 20
_MOST_ATTEMPTS = 10_000
_MOST_STEP = 1 << 40
_LATEST_S = 2.5e11  # datetime knows no times much later than this
_TEXT_BYTES = 4096
_NAMED = (
    EventKind.PHASE_BEGINS,
    EventKind.PHASE_ENDS,
    EventKind.OPERATION_BEGINS,
    EventKind.MEASURED,
    EventKind.SEEN_AT,
)


def _known(recording: InstanceRecording | None) -> InstanceRecording:
    if recording is None:
        raise ValueError("it has no header")
    return recording


def _header_in(content: bytes) -> InstanceRecording:
    """Return a recording with the facts of its header: the instance, its job, and the begin."""
    said = _object(json.loads(content))
    instances = _number(said, "instances", 1, _MOST_INSTANCES)
    program = said.get("program") or ()
    if not isinstance(program, list | tuple):
        raise ValueError(f"its program is {program!r:.40}")
    return InstanceRecording(
        _number(said, "instance", 0, _MOST_INSTANCES),
        instances,
        _text(said, "host"),
        _number(said, "attempt", 0, _MOST_ATTEMPTS),
        _text(said, "clock"),
        _number(said, "began_ns", 0, 1 << 62),
        _time(said, "began_at_s"),
        program=tuple(map(str, program)),
        replicas=_replicas(said.get("replicas")),
    )


def _joined(recording: InstanceRecording | None, content: bytes) -> InstanceRecording:
    """Return the recording with the name of its job and of instance 0's clock."""
    said = _object(json.loads(content))
    clocks = said.get("clocks")
    if not isinstance(clocks, list) or not clocks or not isinstance(clocks[0], str):
        raise ValueError("it names no clock of instance 0")
    return replace(_known(recording), job=_text(said, "job"), asked_clock=clocks[0])


def _profile_in(content: bytes) -> Profile:
    """Return the description of a profile, whose file must be inside of the folder of the recording."""
    said = _object(json.loads(content))
    markers = said.get("markers")
    if not isinstance(markers, list) or not all(_is_pair(each) for each in markers):
        raise ValueError("the markers of its profile are not pairs of times")
    file = PurePosixPath(_text(said, "file"))
    if file.is_absolute() or ".." in file.parts:
        raise ValueError(f"its profile is outside of the folder, {str(file)!r}")
    return Profile(_text(said, "profiler"), _text(said, "file"), markers)


def _names_in(content: bytes) -> dict[int, Mapping[str, object]]:
    """Return the meaning of events' names, by number."""
    found: dict[int, Mapping[str, object]] = {}
    for number, said in json.loads(content):
        if type(number) is not int or not 0 <= number < _MOST_NAMES:
            raise ValueError(f"a name has the number {number!r:.40}")
        _text(_object(said), "name")
        found[number] = said
    return found


def _check_events(events: np.ndarray, names: Mapping[int, object]) -> None:
    """Raise ValueError for events with an unknown kind, with an unknown name, or of impossible steps."""
    kinds = events["kind"]
    if not np.isin(kinds, list(EventKind)).all():
        raise ValueError("it has events of an unknown kind")
    used = np.unique(events["name"][np.isin(kinds, _NAMED)])
    if not set(used.tolist()) <= names.keys():
        raise ValueError("it has events without a name")
    steps = events["value"][kinds == EventKind.STEP_BEGINS]
    if len(steps) and not 0 <= steps.min() <= steps.max() < _MOST_STEP:
        raise ValueError("it has steps with impossible numbers")


def _object(said: object) -> dict[str, object]:
    if not isinstance(said, dict):
        raise ValueError(f"it has {said!r:.40} instead of a JSON object")
    return said


def _number(said: Mapping[str, object], name: str, least: int, most: int) -> int:
    number = said.get(name)
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"its {name} is {number!r:.40}")
    return number


def _time(said: Mapping[str, object], name: str) -> float:
    number = said.get(name)
    if not isinstance(number, int | float) or not math.isfinite(number) or not 0 <= number < _LATEST_S:
        raise ValueError(f"its {name} is {number!r:.40}")
    return float(number)


def _text(said: Mapping[str, object], name: str) -> str:
    text = said.get(name)
    if not isinstance(text, str) or len(text) > _TEXT_BYTES or re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"its {name} is {text!r:.40}")
    return text


def _replicas(said: object) -> int:
    """Return the number of replicas of all instances; 0 if unknown."""
    is_known = isinstance(said, list) and len(said) == 3 and type(said[2]) is int and 0 < said[2] <= _MOST_STEP
    return int(said[2]) if is_known and isinstance(said, list) else 0


def _is_pair(each: object) -> bool:
    return isinstance(each, list) and len(each) == 2 and all(type(time) is int and abs(time) < 1 << 62 for time in each)
