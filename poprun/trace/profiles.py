"""Profiles of an instance on the clock of its recording.

A profiler has its own clock. Before and after each marker in the profile, the time on the recording's clock was noted.
These times bound the difference of the clocks, as an exchange of messages with another host does.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from popdist.timeline.clocks import Alignment
from popdist.timeline.profiles import MARKER

_OF_A_DEVICE = "gpu_user_annotation"
"""The category of annotations that PyTorch shows a second time, at the time when the device reached them."""
_OF_THE_PROFILER = "Trace"
_DAMAGED = (
    *(EOFError, LookupError, TypeError, AttributeError, OverflowError, RecursionError),
    *(gzip.BadGzipFile, json.JSONDecodeError, UnicodeDecodeError, zlib.error),
)
_MOST_RATIO, _ROOM_BYTES = 200, 1 << 20
"""The limits of an unpacked profile; profiles of JAX and PyTorch are 10 to 30 times as large as their files."""


class TraceEvent(TypedDict, total=False):
    """An event in the format of chrome://tracing, with times in us."""

    ph: str
    cat: str
    name: str
    ts: float
    dur: float
    pid: int | str
    tid: int | str
    args: Mapping[str, object]


@dataclass(frozen=True)
class Profile:
    """The description of a profile in the recording beside it.

    Attributes:
        profiler: The name of the profiler.
        file: The path relative to the folder of the recording; "" if profiling has begun and no file was written.
        markers: For each marker, the times of the recording's clock before and after it, in ns.
    """

    profiler: str
    file: str
    markers: Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Profiled:
    """The spans that a profiler saw.

    Attributes:
        threads: The names of threads.
        thread: The index of each span's thread, int64.
        begin_ns: The begin of each span, int64.
        end_ns: The end of each span, int64.
        names: The names of the spans.
        args: The further facts about each span, as JSON.
        uncertainty_ns: The largest error of the times.
    """

    threads: Sequence[str]
    thread: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    names: Sequence[str]
    args: Sequence[str]
    uncertainty_ns: float


def read_profile(folder: Path, profile: Profile) -> Profiled:
    """Read the file of a profile from the folder of its recording.

    Raises:
        ValueError: If the file is damaged, or is no profile.
        OSError: If the file cannot be read.
    """
    try:
        with gzip.open(folder / profile.file) as file:
            most_bytes = _MOST_RATIO * (folder / profile.file).stat().st_size + _ROOM_BYTES
            text = file.read(most_bytes + 1)
        if len(text) > most_bytes:
            raise ValueError(f"it has more than {_MOST_RATIO} bytes for each byte of its file")
        return on_clock_of_recording(json.loads(text), profile)
    except _DAMAGED as error:
        raise ValueError(f"it is cut off or damaged ({error!r})") from None


def on_clock_of_recording(trace: Mapping[str, Sequence[TraceEvent]], profile: Profile) -> Profiled:
    """Return the spans of a chrome://tracing trace, with times on the recording's clock.

    Raises:
        ValueError: If the trace has none of the markers.
    """
    every = [each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") != _OF_THE_PROFILER]
    begin = np.array([round(1e3 * each["ts"]) for each in every], np.int64)
    end = begin + np.array([round(1e3 * each["dur"]) for each in every], np.int64)
    places = {each["name"]: place for place, each in enumerate(every) if each.get("cat") != _OF_A_DEVICE}
    noted = {f"{MARKER} {number}": times for number, times in enumerate(profile.markers)}
    found = [(noted[name], places[name]) for name in noted.keys() & places.keys()]
    alignment = Alignment.of([(before, begin[place], end[place], after) for (before, after), place in found])
    if not alignment.is_known:
        raise ValueError("it has none of the markers that relate its clock to that of the recording")
    is_shown = np.array([each["name"] not in noted for each in every], bool)
    shown = [each for each in every if each["name"] not in noted]
    names = _names_of_threads(trace["traceEvents"], {each["pid"] for each in shown}, profile.profiler)
    threads = {thread: place for place, thread in enumerate(dict.fromkeys(_thread(each) for each in shown))}
    thread = np.array([threads[_thread(each)] for each in shown], np.int64)
    begin, end = begin[is_shown], end[is_shown]
    begins, uncertainty_ns = _moved(begin, alignment)
    return Profiled(
        [names.get(each, f"{profile.profiler}: thread {each[1]}") for each in threads],
        thread,
        begins,
        begins + (end - begin),
        [each["name"] for each in shown],
        [json.dumps(each.get("args", {})) for each in shown],
        uncertainty_ns,
    )


def nested(thread: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the ends of spans, cut to the ends of enclosing spans, so that spans can be drawn nested."""
    ends = end.tolist()
    begins, threads = begin.tolist(), thread.tolist()
    around: dict[int, list[int]] = {}
    for place in np.lexsort((-end, begin)).tolist():
        open_until = around.setdefault(threads[place], [])
        while open_until and open_until[-1] <= begins[place]:
            open_until.pop()
        if open_until:
            ends[place] = min(ends[place], open_until[-1])
        open_until.append(ends[place])
    return np.array(ends, np.int64)


def _moved(times_ns: np.ndarray, alignment: Alignment) -> tuple[np.ndarray, float]:
    """Return times of the profile as times of the recording, and their uncertainty in ns."""
    roughly = times_ns - round(float(alignment.at(alignment.when_ns[:1]).middle_ns[0]))
    ahead = alignment.at(roughly)
    return times_ns - np.rint(ahead.middle_ns).astype(np.int64), float(ahead.uncertainty_ns.max(initial=0.0)) + 1


def _thread(event: TraceEvent) -> tuple[object, object]:
    return event["pid"], event["tid"]


def _names_of_threads(
    events: Sequence[TraceEvent], shown: Set[object], profiler: str
) -> dict[tuple[object, object], str]:
    """Return the names of threads, each after the name of its process if several processes are shown."""
    said = [each for each in events if each.get("ph") == "M"]
    processes = {each["pid"]: each["args"]["name"] for each in said if each["name"] == "process_name"}
    of_process = {pid: f"{name} " if len(shown) > 1 else "" for pid, name in processes.items()}
    return {
        _thread(each): f"{profiler}: {of_process.get(each['pid'], '')}{each['args']['name']}"
        for each in said
        if each["name"] == "thread_name"
    }
