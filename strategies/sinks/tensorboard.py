"""Metrics for TensorBoard, by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from strategies.sinks.row import Row
from strategies.sinks.sink import Sink


@final
class TensorBoard(Sink):
    """A file of events in a folder; every instance that writes, and every start of the job, makes another one.

    What older files there have of the first step that is written, and of later ones, TensorBoard does not show any
    more. Numbers are float32, as events have them.

    Args:
        folder: is made.
    """

    way_out = "make room there, or name another folder"

    def __init__(self, folder: Path) -> None:
        self.name = f"tensorboard:{folder}"
        self._folder = folder
        self._writer: Any = None
        self._is_begun = False

    def open(self, goes_on: bool) -> None:
        """See `Sink`."""
        from tensorboardX.event_file_writer import EventsWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(self._folder / "events"))
        self._writer.flush()
        self._is_begun = False

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if not self._is_begun:
            self._is_begun = True
            first = rows[0].step + (not rows[0].is_training)
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=first, wall_time=rows[0].time_s, session_log=start))
        for row in rows:
            self._writer.write_event(_event_of(row))
        self._writer.flush()

    def close(self) -> None:
        """See `Sink`."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def _event_of(row: Row) -> Any:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=number) for name, number in row.values.items()]
    return Event(step=row.step, wall_time=row.time_s, summary=Summary(value=values))
