"""What pipelines did, as a file for Perfetto (ui.perfetto.dev) or chrome://tracing: a process for each replica."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from strategies.pipelines.pictures.panel import label_of
from strategies.pipelines.timetable import Timed

Event = Mapping[str, object]

MICROSECONDS = 1e6


def perfetto(replicas: Mapping[int, Sequence[Timed]]) -> str:
    """JSON with an event for each action; times in microseconds, and a thread for each device.

    Source: "Trace Event Format", Google, 2016: the object with `traceEvents`, complete events (X), metadata (M).

    Args:
        replicas: for each replica what its devices did, in seconds.
    """
    events = [event for replica, spans in sorted(replicas.items()) for event in _events(replica, spans)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(replica: int, spans: Sequence[Timed]) -> Iterator[Event]:
    yield _named("process_name", replica, 0, f"replica {replica}")
    for device in sorted({span.device for span in spans}):
        yield _named("thread_name", replica, device, f"device {device}")
    for span in sorted(spans, key=lambda span: (span.begin_s, span.device)):
        yield {
            "name": f"{label_of(span)} stage {span.action.stage}",
            "cat": span.action.kind.value,
            "ph": "X",
            "ts": span.begin_s * MICROSECONDS,
            "dur": (span.end_s - span.begin_s) * MICROSECONDS,
            "pid": replica,
            "tid": span.device,
            "args": {
                "kind": span.action.kind.value,
                "stage": span.action.stage,
                "micro_batch": span.action.micro_batch,
            },
        }


def _named(what: str, replica: int, device: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": replica, "tid": device, "args": {"name": name}}
