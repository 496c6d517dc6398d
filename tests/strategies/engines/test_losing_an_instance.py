"""Whenever an instance is lost in a step of whatever engine, the others end with the bits of all of them.

An instance is lost at each event that instruments see of it, and instead of each of its messages.
"""

from __future__ import annotations

import functools
import threading
from typing import final

import pytest
from engine_rows import EVERY, REPLICAS, Row, batches, bits_of, train
from losing import Lost, thread_name
from surviving_instances import run_instances

from collectives import PeerLostError, ThreadHub

BEFORE = -1
"""The number of the step before the first one: what instances do to begin with the same state."""


@final
class Events:
    """An instrument that counts the events of an instance in one step, and loses it at one of them.

    Args:
        instance: the one that it sees.
        step: in which it counts, until the next one begins.
        last: the number of the event at which the instance is lost; None to count all of them.

    Attributes:
        seen: the names of the events.
    """

    def __init__(self, instance: int, step: int, last: int | None = None) -> None:
        self._instance, self._step, self._last = instance, step, last
        self._at: int | None = None
        self.seen: list[str] = []

    def begin(self) -> None:
        self._at = BEFORE

    def step_begins(self, step: int) -> None:
        self._at = step
        self._note("step")

    def step_ends(self, rows: int, loss: float) -> None:
        self._note("end of the step")

    def phase_begins(self, phase: str) -> None:
        self._note(phase)

    def phase_ends(self, phase: str) -> None:
        self._note(f"end of {phase}")

    def operation_begins(self, number: int, call) -> None:
        self._note(call.title)

    def operation_ends(self) -> None:
        self._note("end of a collective")

    def data_moves(self, nbytes: int) -> None:
        self._note("data move")

    def before_send(self, source: int, to: int) -> None:
        if source == self._instance:
            self._note(f"message to {to}")

    def _note(self, name: str) -> None:
        if self._at == self._step and threading.current_thread().name == thread_name(self._instance):
            self.seen.append(name)
            if len(self.seen) - 1 == self._last:
                raise Lost


def trained(row: Row, count: int, events: Events, instance: int, mechanism: str):
    def function(strategy):
        if strategy.replicas.first_index == instance:
            events.begin()
        return train(strategy, row)

    hub = ThreadHub(count, events.before_send)
    return run_instances(count, REPLICAS, function, mechanism=mechanism, hub=hub, instruments={instance: events})


@functools.cache
def undisturbed(row: Row):
    [found] = run_instances(1, REPLICAS, functools.partial(train, row=row))
    return found


@EVERY
@pytest.mark.parametrize("mechanism", ["window", "ring"])
@pytest.mark.parametrize("step", [BEFORE, 0, 2])
@pytest.mark.parametrize(("count", "lost"), [(2, 0), (2,1), (3,0),(3,1), (3, 2)])
def test_the_others_go_on_to_the_same_bits(row, count, lost, step, mechanism):
    all_events = Events(lost, step)
    assert trained(row, count, all_events, lost, mechanism) == [undisturbed(row)] * count
    print(len(all_events.seen), all_events.seen)
    for number, name in enumerate(all_events.seen):
        found = trained(row, count, Events(lost, step, number), lost, mechanism)
        expected = [None if instance == lost else undisturbed(row) for instance in range(count)]
        assert found == expected, (number, name)
