"""The trace of all instances, in the format of chrome://tracing, which Perfetto reads too.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format: complete events
("X"), flows ("s", "f"), instants ("i"), counters ("C") and metadata ("M"). Times are in us with three decimal places.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from popdist.records.private_files import open_unless_linked
from popdist.timeline.events import EventKind
from poprun.cli.wording import count, list_ranges
from poprun.trace.aligned import Aligned
from poprun.trace.members import describe_membership, memberships_of
from poprun.trace.profiles import Profiled, nested
from poprun.trace.spans import MatchedCollectives, Sort, Spans

STEPS, PHASES, COMMUNICATION, MEMBERSHIP, REPLICAS, PROFILE = 1, 2, 3, 4, 16, 1 << 24
"""The numbers of the trace's threads in each process."""
_STAGES = 64


@dataclass(frozen=True)
class Counts:
    """The numbers of events in a trace.

    Attributes:
        spans: The number of complete events, including those of profiles and of memberships.
        flows: The number of arrows.
        counters: The number of values of counters.
    """

    spans: int
    flows: int
    counters: int


def write_trace(
    path: Path,
    aligned: Sequence[Aligned],
    spans: Sequence[Spans],
    meetings: MatchedCollectives,
    profiles: Sequence[Profiled | None] = (),
) -> Counts:
    """Write the trace; compress it if the name ends in .gz.

    Args:
        path: The file to write.
        aligned: The recordings.
        spans: The spans of each recording.
        meetings: The collectives of several instances.
        profiles: The profile of each recording, or None; the sequence may be shorter.

    Raises:
        OSError: If the trace cannot be written.
    """
    began = min(int(each.recording.events["when_ns"].min(initial=np.iinfo(np.int64).max)) for each in aligned)
    with opened(path) as file:
        file.write(b'{"displayTimeUnit":"ns","otherData":')
        file.write(json.dumps(_facts(aligned)).encode() + b',"traceEvents":[\n')
        writer, memberships = Writer(file), 0
        for process, (each, own) in enumerate(zip(aligned, spans, strict=True)):
            writer.lines(_metadata(process, each, own))
            _write_spans(writer, process, each, own, began)
            memberships += _write_memberships(writer, process, each, began)
            _write_instants(writer, process, each, began)
            _write_counters(writer, process, each, own, began)
        for process, (each, profile) in enumerate(zip(aligned, profiles, strict=False)):
            if profile is not None:
                _write_profile(writer, process, each, profile, began)
        flows = _write_flows(writer, meetings, began)
        file.write(b"\n]}\n")
    of_profiles = sum(len(each.names) for each in profiles if each is not None)
    return Counts(sum(len(each.spans) for each in spans) + of_profiles + memberships, flows, writer.counters)


def _facts(aligned: Sequence[Aligned]) -> dict[str, object]:
    """Return the facts about clocks, for programs that read the trace."""
    return {
        each.recording.title: {
            "clock": each.recording.clock,
            "is measured": each.is_measured,
            "uncertainty_us": each.uncertainty_ns / 1e3,
            "ahead_us": each.ahead_ns / 1e3,
            "drift_ppm": each.drift * 1e6,
            "drift uncertainty_ppm": each.drift_uncertainty * 1e6,
        }
        for each in aligned
    }


def _metadata(process: int, aligned: Aligned, spans: Spans) -> Iterator[Mapping[str, object]]:
    yield name_of("process_name", process, 0, aligned.recording.title)
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    if not aligned.is_measured or aligned.uncertainty_ns > 1:
        known = f"+- {aligned.uncertainty_ns / 1e3:.0f} us" if aligned.is_measured else "clock unknown"
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_labels", "args": {"labels": known}}
    threads = {STEPS: "steps", PHASES: "training", COMMUNICATION: "communication"}
    of_replicas = spans.of(Sort.REPLICA)
    for track in np.unique(_thread_of_replicas(of_replicas)).tolist():
        replica, stage = divmod(track - REPLICAS, _STAGES)
        several = np.any(of_replicas["track"] > 1)
        threads[track] = f"replica {replica} stage {stage}" if several else f"replica {replica}"
    for thread, name in threads.items():
        yield name_of("thread_name", process, thread, name)
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _thread_of_replicas(spans: np.ndarray) -> np.ndarray:
    found: np.ndarray = REPLICAS + spans["name"].astype(np.int64) * _STAGES + spans["track"] - 1
    return found


def _write_spans(writer: Writer, process: int, aligned: Aligned, spans: Spans, began: int) -> None:
    names = {number: str(said["name"]) for number, said in aligned.recording.names.items()}
    head = f'{{"ph":"X","pid":{process},"tid":'
    for sort in Sort:
        own = spans.of(sort)
        texts = _heads(sort, head, names)
        keys = _thread_of_replicas(own) if sort is Sort.REPLICA else own["name"].astype(np.int64)
        heads = [texts(key) for key in keys.tolist()]
        start, duration = us_of(own["begin_ns"] - began), us_of(own["end_ns"] - own["begin_ns"])
        failed = np.where(own["failed"], ',"failed":true', "") if own["failed"].any() else [""] * len(own)
        form = '%s,"ts":%d.%03d,"dur":%d.%03d,"args":{"step":%d%s}},\n'
        writer.table(form, [heads, *start, *duration, own["step"], failed])


def _heads(sort: Sort, head: str, names: Mapping[int, str]) -> Callable[[int], str]:
    """Return a function from a span's name or thread to the beginning of the span's JSON text."""
    if sort is Sort.REPLICA:
        return lambda thread: f'{head}{thread},"name":"compute","cat":"replica"'
    if sort in (Sort.STEP, Sort.BETWEEN_STEPS):
        text = f'{head}{STEPS},"name":"{"step" if sort is Sort.STEP else "between steps"}","cat":"step"'
        return lambda _: text
    thread = PHASES if sort is Sort.PHASE else COMMUNICATION
    ending = {Sort.WAIT: ": waiting for others", Sort.TRANSFER: ": exchange"}.get(sort, "")
    texts = {
        number: f'{head}{thread},"name":{json.dumps(name + ending)},"cat":"{sort.name.lower()}"'
        for number, name in names.items()
    }
    return texts.__getitem__


def _write_memberships(writer: Writer, process: int, aligned: Aligned, began: int) -> int:
    """Write which replicas an instance drives when, if that has changed or if it begins as a spare; count the spans."""
    recording = aligned.recording
    memberships = memberships_of(recording)
    if not len(recording.events) or (len(memberships) == 1 and not recording.is_spare):
        return 0
    times = recording.events["when_ns"]
    begins = np.array([times[max(each.events.start - 1, 0)] for each in memberships])
    ends = np.append(begins[1:], times[-1])
    names = [
        f"replicas {list_ranges(each.replicas(recording.replicas))}" if each.count else "spare" for each in memberships
    ]
    head = f'{{"ph":"X","pid":{process},"tid":{MEMBERSHIP},"cat":"membership"'
    writer.lines(iter([name_of("thread_name", process, MEMBERSHIP, "replicas driven")]))
    form = f'{head},"name":"%s","ts":%d.%03d,"dur":%d.%03d}},\n'
    writer.table(form, [names, *us_of(begins - began), *us_of(ends - begins)])
    return len(names)


def _write_profile(writer: Writer, process: int, aligned: Aligned, profile: Profiled, began: int) -> None:
    """Write a profile as further threads of the instance, whose names include the uncertainty of the times."""
    known = f"(+- {(aligned.uncertainty_ns + profile.uncertainty_ns) / 1e3:.0f} us)"
    for thread, name in enumerate(profile.threads, PROFILE):
        writer.lines(iter([name_of("thread_name", process, thread, f"{name} {known}")]))
    begin = np.maximum(aligned.at_home(profile.begin_ns), began)
    end = nested(profile.thread, begin, np.maximum(aligned.at_home(profile.end_ns), begin))
    names = [json.dumps(name) for name in profile.names]
    form = f'{{"ph":"X","pid":{process},"tid":%d,"name":%s,"cat":"profile","ts":%d.%03d,"dur":%d.%03d,"args":%s}},\n'
    writer.table(form, [PROFILE + profile.thread, names, *us_of(begin - began), *us_of(end - begin), profile.args])


_SAID: Mapping[EventKind, Callable[[int], str]] = {
    EventKind.WAITS_FOR: lambda value: f"still waits for instance {value}",
    EventKind.EVENTS_LOST: lambda value: f"{count(value, 'event')} could not be recorded",
}


def _write_instants(writer: Writer, process: int, aligned: Aligned, began: int) -> None:
    events = aligned.recording.events
    renumbered = partial(describe_membership, replicas=aligned.recording.replicas)
    described: Mapping[EventKind, Callable[[int], str]] = {**_SAID, EventKind.RENUMBERED: renumbered}
    for kind, said in described.items():
        own = events[events["kind"] == kind]
        head = f'{{"ph":"i","s":"t","pid":{process},"tid":{COMMUNICATION},"cat":"{kind.name.lower()}"'
        names = [said(value) for value in own["value"].tolist()]
        writer.table(f'{head},"name":"%s","ts":%d.%03d}},\n', [names, *us_of(own["when_ns"] - began)])


def _write_counters(writer: Writer, process: int, aligned: Aligned, spans: Spans, began: int) -> None:
    counters = dict(spans.measured)
    moved = spans.moved
    counters["exchanged bytes"] = (moved["when_ns"], np.cumsum(moved["value"]))
    steps = spans.of(Sort.STEP)
    if len(steps) > 1:
        lasted = np.maximum(np.diff(steps["end_ns"]), 1) / 1e9
        counters["rows per second"] = (steps["end_ns"][1:], steps["value"][1:] / lasted)
        counters["steps per second"] = (steps["end_ns"][1:], 1 / lasted)
    for name, (times, values) in counters.items():
        finite = np.isfinite(values)
        head = f'{{"ph":"C","pid":{process},"tid":0,"name":{json.dumps(name)},"ts":'.replace("%", "%%")
        columns = [*us_of(times[finite] - began), values[finite].astype(np.float64)]
        writer.table(f'{head}%d.%03d,"args":{{"value":%r}}}},\n', columns)
        writer.counters += int(finite.sum())


def _write_flows(writer: Writer, meetings: MatchedCollectives, began: int) -> int:
    """Write an arrow from the last instance to come to a collective to each instance that waited for it."""
    if not len(meetings.step):
        return 0
    last = meetings.last
    rows, receivers = np.nonzero(meetings.took_part)
    others = receivers != last[rows]
    rows, receivers = rows[others], receivers[others]
    senders = last[rows]
    numbers = np.arange(len(rows))
    for phase, processes, times in (
        ("s", senders, meetings.came_ns[rows, senders]),
        ("f", receivers, meetings.moved_ns[rows, receivers]),
    ):
        head = f'{{"ph":"{phase}","bp":"e","cat":"flow","name":"last","tid":{COMMUNICATION}'
        writer.table(f'{head},"id":%d,"pid":%d,"ts":%d.%03d}},\n', [numbers, processes, *us_of(times - began)])
    return len(rows)


_CHUNK = 20_000
_COMPRESSED = ".gz"


class Writer:
    """A writer of events to a trace, which puts commas between them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_first = True
        self.counters = 0

    def text(self, text: str) -> None:
        """Write events, each of which ends with a comma and a new line."""
        if text:
            self._file.write((text[:-2] if self._is_first else f",\n{text[:-2]}").encode())
            self._is_first = False

    def lines(self, events: Iterator[Mapping[str, object]]) -> None:
        """Write a few events."""
        self.text("".join(f"{json.dumps(event)},\n" for event in events))

    def table(self, form: str, columns: Sequence[Sequence[object] | np.ndarray]) -> None:
        """Write one event for each row of the columns; the format `form` has one `%` for each column."""
        count = len(columns[0])
        for start in range(0, count, _CHUNK):
            parts = [each[start : start + _CHUNK] for each in columns]
            size = len(parts[0])
            flat: list[object] = [None] * (size * len(parts))
            for place, part in enumerate(parts):
                flat[place :: len(parts)] = part.tolist() if isinstance(part, np.ndarray) else part
            self.text((form * size) % tuple(flat))


def opened(path: Path) -> BinaryIO:
    """Open the file of a trace for writing, and empty it; compress it if its name ends in .gz."""
    if path.suffix == _COMPRESSED:
        os.close(open_unless_linked(path, os.O_WRONLY | os.O_CREAT))
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=1))
    return open(path, "wb", buffering=1 << 20, opener=open_unless_linked)


def name_of(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def us_of(times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split times into whole us and the remaining ns."""
    return times_ns // 1000, times_ns % 1000
