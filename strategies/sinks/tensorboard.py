"""Metrics for TensorBoard, in event files written by its own package, without TensorFlow."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from strategies.sinks.distribution import Distribution
from strategies.sinks.sink import Row, Sink

_numbers = itertools.count()
_VERSION = "brain.Event:2"


@final
class TensorBoard(Sink):
    """An event file in a folder; every instance that writes, and every start of the job, makes a new file.

    TensorBoard hides values of older files from the first step of a newer file on. Numbers are float32, as in all
    events. (tensorboardX, which is smaller, imports PyTorch if that is installed, and gives two files of one second the
    same name.)
    """

    way_out = "make room there, or name another folder"

    def __init__(self, folder: Path) -> None:
        self.name = f"tensorboard:{folder}"
        self._folder = folder
        self._writer: Any = None
        self._is_begun = False

    @override
    def open(self, goes_on: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now_s = time.time()  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{now_s:.6f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._writer = RecordWriter((self._folder / name).open("xb"))
        self._is_begun = False
        self._writer.write(Event(wall_time=now_s, file_version=_VERSION).SerializeToString())
        self._writer.flush()

    @override
    def write(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._is_begun:
            first = rows[0].step + (not rows[0].is_training)
            start = SessionLog(status=SessionLog.START)
            self._writer.write(Event(step=first, wall_time=rows[0].time_s, session_log=start).SerializeToString())
            self._is_begun = True
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=number) for name, number in row.values.items()]
            values += [Summary.Value(tag=name, histo=_histogram(each)) for name, each in row.distributions.items()]
            event = Event(step=row.step, wall_time=row.time_s, summary=Summary(value=values))
            self._writer.write(event.SerializeToString())
        self._writer.flush()

    @override
    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def _histogram(distribution: Distribution) -> object:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    return HistogramProto(
        min=distribution.least,
        max=distribution.most,
        num=distribution.size,
        sum=distribution.total,
        sum_squares=distribution.squares,
        bucket_limit=distribution.edges[1:].tolist(),
        bucket=distribution.counts.tolist(),
    )
