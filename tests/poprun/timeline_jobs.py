"""Simulated jobs: the recordings that their instances would make, with planted faults."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from popdist.timeline.events import EVENT, EventKind
from poprun.trace.recordings import InstanceRecording

MS = 10**6
NAMES = (
    *("data", "forward and backward", "exchange", "update", "checkpoint", "compile"),
    *("loss", "memory", "wait for cores", "all_reduce 'gradients'", "train.py:12"),
)
_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_SAID = {number: {"name": name} for name, number in _NUMBERS.items()}
_SAID[_NUMBERS["all_reduce 'gradients'"]] |= {"call": "all_reduce 'gradients' (sum)", "operation": "all_reduce"}


@dataclass(frozen=True)
class Made:
    """A simulated job.

    Attributes:
        instances: The number of instances.
        steps: The number of steps of each instance.
        input_ms: The time for input data in each step, by instances that differ.
        compute_ms: The time to compute in each step, by instances that differ.
        transfer_ms: The time to transfer the gradients, for all instances.
        slow_link: (source, target) of the link on which the gradients need `link_ms` longer.
        link_ms: The additional time on the slow link.
        late_data_ms: The additional time for gradients on their way to some instances.
        core_wait_ms: The wait for cores in each step, by instances that differ.
        between_ms: The time of the program's own code between steps, in its line 12, by instances that have any.
        pauses_ms: The time of that code before some steps: (instance, step): ms.
        delays_ms: Additional time to compute in some steps: (instance, step): ms.
        jitter: The relative variation of all times.
        seed: The seed of that variation.
    """

    instances: int
    steps: int = 60
    input_ms: dict[int, float] = field(default_factory=dict)
    compute_ms: dict[int, float] = field(default_factory=dict)
    transfer_ms: float = 1.0
    slow_link: tuple[int, int] | None = None
    link_ms: float = 0.0
    late_data_ms: dict[int, float] = field(default_factory=dict)
    core_wait_ms: dict[int, float] = field(default_factory=dict)
    between_ms: dict[int, float] = field(default_factory=dict)
    pauses_ms: dict[tuple[int, int], float] = field(default_factory=dict)
    delays_ms: dict[tuple[int, int], float] = field(default_factory=dict)
    all_input_ms: float = 0.2
    jitter: float = 0.05
    seed: int = 0

    def recordings(self) -> list[InstanceRecording]:
        """Return the recordings of all instances."""
        random = np.random.default_rng(self.seed)
        pages = [_Page() for _ in range(self.instances)]
        for step in range(self.steps):
            for instance, page in enumerate(pages):
                self._before_the_exchange(random, instance, step, page)
            came = max(page.now for page in pages)
            for instance, page in enumerate(pages):
                self._exchange(instance, page, came)
                page.phase("update", MS * random.uniform(0.9, 1.1))
                page.note(EventKind.STEP_ENDS, value=64)
                page.measured("loss", 1 / (1 + step))
                page.measured("memory", 1e8 + 1e5 * step)
                page.waited += self.core_wait_ms.get(instance, 0.1) / 1e3
                page.measured("wait for cores", page.waited)
        return [
            InstanceRecording(
                instance=instance,
                instances=self.instances,
                host=f"host{instance // 2}",
                clock="one",
                job="a",
                program=["train.py"],
                replicas=2 * self.instances,
                names=_SAID,
                events=np.array(page.events, EVENT),
                is_complete=True,
            )
            for instance, page in enumerate(pages)
        ]

    def _before_the_exchange(self, random, instance, step, page):
        if pause_ms := self.pauses_ms.get((instance, step), 0.0) + self.between_ms.get(instance, 0.0):
            page.note(EventKind.SEEN_AT, "train.py:12")
            page.now += MS * self._varied(random, pause_ms)
        page.phase("data", MS * self._varied(random, self.input_ms.get(instance, self.all_input_ms)))
        page.note(EventKind.STEP_BEGINS, value=step)
        compute = self._varied(random, self.compute_ms.get(instance, 10.0)) + self.delays_ms.get((instance, step), 0)
        page.phase("forward and backward", MS * compute)
        page.note(EventKind.PHASE_BEGINS, "exchange")
        page.note(EventKind.OPERATION_BEGINS, "all_reduce 'gradients'", step + 1)

    def _exchange(self, instance, page, came):
        page.now = came + 20_000
        page.note(EventKind.DATA_MOVES, value=4096)
        if self.slow_link is not None:
            if instance == self.slow_link[1]:
                page.now += MS // 10
                page.note(EventKind.WAITS_FOR, value=self.slow_link[0])
                page.now -= MS // 10
            page.now += self.link_ms * MS
        page.now += (self.transfer_ms + self.late_data_ms.get(instance, 0.0)) * MS
        page.note(EventKind.OPERATION_ENDS)
        page.note(EventKind.PHASE_ENDS, "exchange")

    def _varied(self, random, ms):
        return ms * random.uniform(1 - self.jitter, 1 + self.jitter)


class _Page:
    def __init__(self):
        self.now = 1000.0
        self.waited = 0.0
        self.events = []

    def note(self, kind, name="data", value=0):
        self.events.append((int(self.now), int(kind), 0, _NUMBERS[name], value))
        self.now += 1000

    def measured(self, name, number):
        self.note(EventKind.MEASURED, name, struct.unpack("<q", struct.pack("<d", number))[0])

    def phase(self, name, lasts_ns):
        self.note(EventKind.PHASE_BEGINS, name)
        self.now += lasts_ns
        self.note(EventKind.PHASE_ENDS, name)
