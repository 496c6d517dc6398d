"""What the blocks of a recording say, checked: it may be damaged, or written by somebody else. Pure.

Each function raises ValueError where a block says what no instance records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from popdist.timeline.events import EventKind
from poprun.trace.profiles import Profile

_MOST_INSTANCES = _MOST_NAMES = 1 << 20
_MOST_ATTEMPTS = 10_000
_MOST_STEP = 1 << 40
_LATEST_S = 2.5e11  # what calendars know ends soon after
_TEXT_BYTES = 4096
_NAMED = (
    EventKind.PHASE_BEGINS,
    EventKind.PHASE_ENDS,
    EventKind.OPERATION_BEGINS,
    EventKind.MEASURED,
    EventKind.SEEN_AT,
)


def header_in(content: bytes) -> dict[str, Any]:
    """Return which instance has recorded, and when."""
    said = _object(_json(content))
    instances = _number(said, "instances", 1, _MOST_INSTANCES)
    return {
        "instance": _number(said, "instance", 0, instances - 1),
        "instances": instances,
        "host": _text(said, "host"),
        "attempt": _number(said, "attempt", 0, _MOST_ATTEMPTS),
        "clock": _text(said, "clock"),
        "began_ns": _number(said, "began_ns", 0, 1 << 62),
        "began_at_s": _time(said, "began_at_s"),
        "program": tuple(map(str, said.get("program") or ())),
        "replicas": _replicas(said.get("replicas")),
    }


def joined_in(content: bytes) -> dict[str, Any]:
    """Return the job and the clock of instance 0."""
    said = _object(_json(content))
    clocks = said.get("clocks")
    if not isinstance(clocks, list) or not clocks or not isinstance(clocks[0], str):
        raise ValueError("it names no clock of instance 0")
    return {"job": _text(said, "job"), "asked_clock": clocks[0]}


def profile_in(content: bytes) -> Profile:
    """Return what is said of a profile, which lies in the folder of the recording."""
    said = _object(_json(content))
    markers = said.get("markers")
    if not isinstance(markers, list) or not all(_is_pair(each) for each in markers):
        raise ValueError("the markers of its profile are no pairs of times")
    file = PurePosixPath(_text(said, "file"))
    if file.is_absolute() or ".." in file.parts:
        raise ValueError(f"its profile lies elsewhere, {str(file)!r}")
    return Profile(_text(said, "profiler"), _text(said, "file"), markers)


def names_in(content: bytes) -> dict[int, Mapping[str, Any]]:
    """Return what the names of events stand for."""
    found: dict[int, Mapping[str, Any]] = {}
    for pair in _json(content):
        number, said = pair
        if type(number) is not int or not 0 <= number < _MOST_NAMES:
            raise ValueError(f"a name has the number {number!r:.40}")
        _text(_object(said), "name")
        found[number] = said
    return found


def check_events(events: np.ndarray, names: Mapping[int, object]) -> None:
    """Refuse events that no instance records: without a name, of no kind, or of steps without number."""
    kinds = events["kind"]
    if not np.isin(kinds, list(EventKind)).all():
        raise ValueError("it has events of no kind that is known")
    used = np.unique(events["name"][np.isin(kinds, _NAMED)])
    if not set(used.tolist()) <= names.keys():
        raise ValueError("it has events without a name")
    steps = events["value"][kinds == EventKind.STEP_BEGINS]
    if len(steps) and not 0 <= steps.min() <= steps.max() < _MOST_STEP:
        raise ValueError("it has steps with impossible numbers")


def _json(content: bytes) -> Any:
    return json.loads(content)


def _object(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise ValueError(f"it has {said!r:.40} in place of a JSON object")
    return said


def _number(said: Mapping[str, Any], name: str, least: int, most: int) -> int:
    number = said.get(name)
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"its {name} is {number!r:.40}")
    return number


def _time(said: Mapping[str, Any], name: str) -> float:
    number = said.get(name)
    if not isinstance(number, int | float) or not math.isfinite(number) or not 0 <= number < _LATEST_S:
        raise ValueError(f"its {name} is {number!r:.40}")
    return float(number)


def _text(said: Mapping[str, Any], name: str) -> str:
    text = said.get(name)
    if not isinstance(text, str) or len(text) > _TEXT_BYTES or re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"its {name} is {text!r:.40}")
    return text


def _replicas(said: object) -> int:
    """Of all instances; 0: unknown."""
    is_known = isinstance(said, list) and len(said) == 3 and type(said[2]) is int and 0 < said[2] <= _MOST_STEP
    return int(said[2]) if is_known and isinstance(said, list) else 0


def _is_pair(each: object) -> bool:
    return isinstance(each, list) and len(each) == 2 and all(type(time) is int and abs(time) < 1 << 62 for time in each)
