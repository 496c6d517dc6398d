"""The recording of one instance from its start to its end."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from popdist.environments.poprun import process_index
from popdist.instance import Instance
from popdist.records.faults import ATTEMPT_VARIABLE
from popdist.timeline.asked import PROFILE_SUFFIX, SUFFIX, TimelineOptions
from popdist.timeline.clocks import Exchange
from popdist.timeline.events import JOINED, PROFILE, EventKind
from popdist.timeline.meeting import (
    CARD_BYTES,
    Answering,
    Asking,
    Card,
    HostClock,
    answers,
    asks,
    own_addresses,
    this_clock,
)
from popdist.timeline.profiles import Profiling, WantedProfile
from popdist.timeline.spilling import TimelineFile

if TYPE_CHECKING:
    from collectives import Communicator
    from collectives.instruments import Instrument

_MOST_TRACK = (1 << 16) - 1


@final
class Timeline:
    """The recording of this instance.

    Args:
        asked: Options.
        instance: This instance.
        environ: Environment variables, with the number of this attempt of the job.
        clock: Clock of this host; None: this process's monotonic clock.

    Raises:
        EnvironmentMismatchError: The library of the requested profiler is not installed.
    """

    def __init__(
        self, asked: TimelineOptions, instance: Instance, environ: Mapping[str, str], clock: HostClock | None = None
    ) -> None:
        attempt = int(environ.get(ATTEMPT_VARIABLE, "0"))
        self._clock = clock or this_clock()
        self._host = instance.host
        number = process_index(environ, instance)
        header = {
            "instance": number,
            "instances": instance.count,
            "replicas": [instance.replica_offset, instance.local_replicas, instance.total_replicas],
            "host": instance.host,
            "pid": os.getpid(),
            "program": sys.argv[:1],
            "attempt": attempt,
            "clock": self._clock.name,
            "began_ns": self._clock.now_ns(),
            "began_at_s": time.time(),
        }
        name = f"instance-{number}{f'.{attempt}' if attempt else ''}{SUFFIX}"
        self._recording = TimelineFile(asked.folder / name, header, asked.limit_bytes, self._clock.now_ns)
        self._profiling = None if asked.profile is None else self._open_profiling(asked.profile)
        self._process = os.getpid()
        self._answering: Answering | None = None
        self._asking: Asking | None = None
        self._recording.start()
        atexit.register(self.close)  # runs after the handler that waits for the others, which is registered later

    @property
    def instruments(self) -> tuple[Instrument, ...]:
        """The instruments of the recording: the recorder, and one that starts a profiler."""
        profiling = () if self._profiling is None else (self._profiling,)
        return (self._recording.recorder, *profiling)

    @property
    def writing_s(self) -> float:
        """The CPU time spent on writing so far."""
        return self._recording.writing_s

    def meet(self, communicator: Communicator) -> None:
        """Find the hosts with other clocks and start comparing clocks with them; a collective call of all instances."""
        answering = None
        if communicator.rank == 0 and communicator.size > 1:
            answering = Answering(self._clock.now_ns)
            card = Card(self._clock.name, self._host, answering.token, answering.port, own_addresses())
        else:
            card = Card(self._clock.name, self._host, secrets.token_bytes(16))
        packed = np.frombuffer(card.pack(), np.uint8)
        gathered = communicator.all_gather(packed, name="comparison of clocks (POPDIST_TIMELINE)")
        cards = [Card.unpack(row.tobytes()) for row in gathered.reshape(communicator.size, CARD_BYTES)]
        self._recording.add(JOINED, {"job": cards[0].token.hex(), "clocks": [each.clock for each in cards]})
        if answering is not None and answers(cards):
            self._answering = answering
            answering.start()
        elif answering is not None:
            answering.close()
        if asks(cards, communicator.rank):
            self._asking = Asking(cards[0], self._clock.now_ns)
            self._recording.align_by(self._take_exchanges)
            self._asking.start()

    def renumbered(self, index: int, count: int, change: int) -> None:
        """Note a change of the members.

        Args:
            index: The new index of this instance.
            count: The number of active instances; 0 if this one sleeps as a spare from now on.
            change: The number of the change, counted from 1, the same on all instances.
        """
        self._recording.recorder.note(int(EventKind.RENUMBERED), min(change, _MOST_TRACK), (index << 32) + count)

    def close(self) -> None:
        """Write the rest and end. Repeated calls do nothing; a forked process does not end its parent's recording."""
        if os.getpid() != self._process:
            return
        if self._profiling is not None:
            self._profiling.close()
        if self._asking is not None:
            self._asking.close()
        self._recording.close()
        if self._answering is not None:
            self._answering.close()
        atexit.unregister(self.close)

    def _open_profiling(self, wanted: WantedProfile) -> Profiling:
        folder = self._recording.path.with_suffix(PROFILE_SUFFIX)
        return Profiling(wanted, folder, self._clock.now_ns, partial(self._recording.add, PROFILE))

    def _take_exchanges(self) -> list[Exchange]:
        taken: list[Exchange] = []
        while self._asking is not None and self._asking.exchanges:
            taken.append(self._asking.exchanges.popleft())
        return taken
