"""The cost of a timeline: recording an event, recording a step of the MLP, merging recordings; and errors of clocks.

Usage:

    python benchmarks/timeline.py [--events 10000000] [--repeats 200] [--seconds 5] [--json PATH]

An event goes to no instrument, to poprun's progress page, or to the ring buffer of a timeline; the shortest of many
short repeats counts. A recorded step of the MLP 784-1024-1024-10 (batch 64, one replica, one instance) is repeated as
often. Its cost is its number of events times the cost of an event, and the CPU time of the writing thread. Recordings
of two instances with --events together are merged into a trace (JSON, not compressed) in a temporary folder. A clock
that is five seconds ahead and 200 ppm faster is compared with this host's, over the loopback device and over links with
a delay of 5 to 6 ms each way. Printed are the largest error of the result, and the uncertainty that it claims.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import tempfile
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import training_task
from timing import Machine, command_line  # makes the project importable, too

from collectives.calls import Call
from collectives.instruments import UPDATE, Instruments, is_seen
from popdist.records.progress import ProgressPage, new_page
from popdist.timeline.asked import FOLDER_VARIABLE
from popdist.timeline.clocks import Alignment
from popdist.timeline.events import EVENT, EVENTS, HEADER, MAGIC, EventKind, block, json_block, names_block, pack_events
from popdist.timeline.gauges import Gauge, read_connections
from popdist.timeline.meeting import Answering, Asking, Card
from popdist.timeline.recorder import Recorder, RingBuffer
from poprun.trace.merging import merge
from poprun.trace.recordings import read_recordings
from poprun.trace.spans import Sort, spans_of

SETTINGS = ("events", "repeats", "seconds")
CALLS = 500
PROMISED_MERGE_S, PROMISED_SHARE = 20.0, 0.01
LINKS = {"the loopback device": (0.0, 50.0), "5 ms each way": (0.005, 1000.0)}
"""Delay of messages each way, in s, and the promised error, in us."""
CONNECTIONS = (8, 24, 64, 256)
ASKED_EVERY_S = 0.5
JITTER_S, AHEAD_NS, FASTER = 0.001, 5 * 10**9, 2e-4
_OF_A_STEP = (
    (EventKind.PHASE_BEGINS, 0),
    (EventKind.PHASE_ENDS, 0),
    (EventKind.STEP_BEGINS, 0),
    (EventKind.PHASE_BEGINS, 1),
    (EventKind.PHASE_ENDS, 1),
    *(
        (EventKind.PHASE_BEGINS, 2),
        (EventKind.OPERATION_BEGINS, 4),
        (EventKind.DATA_MOVES, 0),
        (EventKind.OPERATION_ENDS, 0),
    )
    * 2,
    (EventKind.PHASE_ENDS, 2),
    (EventKind.PHASE_BEGINS, 3),
    (EventKind.PHASE_ENDS, 3),
    (EventKind.STEP_ENDS, 0),
    (EventKind.MEASURED, 5),
)
_NAMES = ("data", "forward and backward", "exchange", "update", "all_reduce 'gradients'", "loss")


def main() -> None:
    options = read_options()
    machine = Machine()
    instruments = {
        "with no instrument": Instruments(),
        "with the progress page": Instruments(a_page()),
        "with a timeline": Instruments(Recorder(RingBuffer())),
    }
    events_ns = {way: cost_of_events(each, options.repeats) for way, each in instruments.items()}
    event_ns = events_ns["with a timeline"]
    for way, nanoseconds in events_ns.items():
        print(f"{f'an event {way} costs':<40}{nanoseconds:>10.0f} ns")
    with tempfile.TemporaryDirectory() as folder:
        step = measure_step(Path(folder), options.repeats)
    share = step["events"] * event_ns * 1e-9 / step["step_s"] + step["writing_share"]
    print(f"{'a step of the MLP has':<40}{step['events']:>10.1f} events, and takes {1e3 * step['step_s']:.2f} ms")
    print(f"{'writing them takes':<40}{step['writing_share']:>10.2%} of a core")
    print(f"{'together, of the step':<40}{share:>10.2%}; promised {PROMISED_SHARE:.0%}")
    connections = {count: ask_for_connections(count, options.seconds) for count in CONNECTIONS}
    for count, found in connections.items():
        print(f"{f'asking for {count} connections takes':<40}{1e3 * found['asking_s']:>10.2f} ms, every ", end="")
        print(f"{found['every_s']:.1f} s: {found['share']:.2%} of a core; with that {share + found['share']:.2%}")
    with tempfile.TemporaryDirectory() as folder:
        merged = merge_many(Path(folder), options.events)
    print(
        f"{options.events:,} events are merged in {merged['wall_s']:.1f} s ({merged['cpu_s']:.1f} s of CPU time) ",
        end="",
    )
    print(
        f"into {merged['trace_MB']:.0f} MB; promised {PROMISED_MERGE_S:.0f} s. They were {merged['recorded_MB']:.0f} MB"
    )
    clocks = {name: compare_clocks(delay_s, options.seconds) for name, (delay_s, _) in LINKS.items()}
    for name, found in clocks.items():
        print(f"clocks over {name} are known to {found['error_us']:.0f} us; promised {LINKS[name][1]:.0f} us. ", end="")
        print(f"Claimed uncertainty: {found['least_us']:.0f} to {found['uncertainty_us']:.0f} us")
    machine.write(
        options,
        SETTINGS,
        events_ns=events_ns,
        step=step,
        share=share,
        connections=connections,
        merge=merged,
        clocks=clocks,
    )


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--events", type=int, default=10_000_000, metavar="N", help="events to merge (%(default)s)")
    parser.add_argument("--repeats", type=int, default=200, metavar="N", help="repeats of a measurement (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, metavar="N", help="time to compare clocks (%(default)s)")
    return parser.parse_args()


def a_page() -> ProgressPage:
    """Return a progress page like a job's, without a reader."""
    descriptor = os.memfd_create("progress")
    os.write(descriptor, new_page())
    return ProgressPage(descriptor)


def cost_of_events(instruments: Instruments, repeats: int) -> float:
    """Return the ns of an event: the mean over a phase's two events and a collective's three."""
    told = (instruments.operation_begins, instruments.data_moves, instruments.operation_ends)
    begins, moves, ends = (each if is_seen(each) else None for each in told)  # as communicators do
    phase, call = instruments.during[UPDATE], Call("all_reduce", "gradients")
    statement = "with phase: pass\nif begins: begins(1, call)\nif moves: moves(8)\nif ends: ends()"
    names = {"phase": phase, "begins": begins, "moves": moves, "ends": ends, "call": call}
    of_loop = min(timeit.repeat("pass", number=CALLS, repeat=repeats))
    return 1e9 * (min(timeit.repeat(statement, globals=names, number=CALLS, repeat=repeats)) - of_loop) / CALLS / 5


def measure_step(folder: Path, steps: int) -> dict[str, float]:
    """Run the MLP, and return its median step, the events of a step, and the share of a core that writing takes."""
    os.environ[FOLDER_VARIABLE] = str(folder)
    import jax
    import jax.numpy as jnp
    import optax

    import popdist
    import strategies
    from popdist.membership.process import process

    def loss_fn(variables: Any, batch: Any, key: Any) -> Any:
        hidden = batch["image"].reshape(len(batch["image"]), -1)
        for layer in ("hidden1", "hidden2"):
            hidden = jax.nn.relu(hidden @ variables[layer]["kernel"] + variables[layer]["bias"])
        logits = hidden @ variables["logits"]["kernel"] + variables["logits"]["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])), {}

    popdist.init()
    trainer = strategies.Trainer(strategies.PopDistStrategy(), loss_fn, optax.adam(1e-3))
    state = trainer.init(training_task.first_variables("mlp"))
    batch = training_task.batches_of(0, 64, 1)[0]
    for _ in range(steps):
        state, _ = trainer.step(state, batch)
    assert process.timeline is not None
    writing_s = process.timeline.writing_s
    process.timeline.close()
    (recording,) = read_recordings(folder)
    found = spans_of(recording).of(Sort.STEP)
    times = found["end_ns"] - found["begin_ns"]
    first = int(found["begin_ns"][steps // 2])
    events = np.count_nonzero(recording.events["when_ns"] >= first) / (steps - steps // 2)
    return {
        "step_s": float(np.median(times[steps // 2 :])) / 1e9,
        "events": events,
        "writing_share": writing_s / (float(found["end_ns"][-1] - found["begin_ns"][0]) / 1e9),
    }


def ask_for_connections(count: int, seconds: float) -> dict[str, float]:
    """Return the time that the writing thread needs to ask the kernel for `count` connections, and the interval."""
    asked: list[float] = []

    def read() -> dict[str, float]:
        asked.append(time.monotonic())
        return read_connections()

    recorder, gauge = Recorder(RingBuffer()), Gauge(read)
    with connections_to_others(count):
        gauge.look(recorder.measured)  # the first look makes the names
        began, began_cpu = asked.pop(), time.thread_time()
        while not asked or time.monotonic() - began < seconds:
            time.sleep(ASKED_EVERY_S)
            gauge.look(recorder.measured)
        spent_s, lasted_s = time.thread_time() - began_cpu, time.monotonic() - began
    return {"asking_s": spent_s / len(asked), "every_s": lasted_s / len(asked), "share": spent_s / lasted_s}


@contextlib.contextmanager
def connections_to_others(count: int) -> Iterator[None]:
    """Open `count` ends of connections within this process, half of them to addresses of their own."""
    with contextlib.ExitStack() as opened:
        for number in range(count // 2):
            with socket.create_server((f"127.0.1.{number + 1}", 0)) as server:
                opened.enter_context(socket.create_connection(server.getsockname()))
                opened.enter_context(server.accept()[0])
        yield


def merge_many(folder: Path, count: int) -> dict[str, float]:
    """Merge recordings of two instances that have `count` events together."""
    recorded = sum(write_recording(folder, instance, count // 2) for instance in range(2))
    began, began_cpu = time.perf_counter(), time.process_time()
    merge(folder, folder / "trace.json")
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - began_cpu,
        "recorded_MB": recorded / 1e6,
        "trace_MB": (folder / "trace.json").stat().st_size / 1e6,
    }


def compare_clocks(delay_s: float, seconds: float) -> dict[str, float]:
    """Compare a clock that is ahead and faster with this host's clock, and check the result against the truth.

    Returns:
        The largest error, and the largest and smallest claimed uncertainty, in us.

    Raises:
        AssertionError: If an error is larger than its claimed uncertainty.
    """
    began = time.monotonic_ns()

    def ahead_ns(now_ns: Any) -> Any:
        return AHEAD_NS + (now_ns - began) * FASTER

    answering = Answering(lambda: int((now := time.monotonic_ns()) + ahead_ns(now)))
    answering.start()
    link = Link(answering.port, delay_s) if delay_s else None
    asking = Asking(Card("there", "host", answering.token, link.port if link else answering.port, ("127.0.0.1",)))
    asking.start()
    time.sleep(seconds)
    asking.close()
    for each in (link, answering):
        if each is not None:
            each.close()
    alignment = Alignment.of(list(asking.exchanges))
    times = np.linspace(alignment.when_ns[0], alignment.when_ns[-1], 10_000).astype(np.int64)
    found = alignment.at(times)
    errors = np.abs(found.middle_ns - ahead_ns(times))
    assert np.all(errors <= found.uncertainty_ns), "an error is larger than its claimed uncertainty"
    return {
        "error_us": float(errors.max()) / 1e3,
        "uncertainty_us": float(found.uncertainty_ns.max()) / 1e3,
        "least_us": float(found.uncertainty_ns.min()) / 1e3,
    }


class Link:
    """A link that delays datagrams between an asking and an answering socket, each by a random time."""

    def __init__(self, to_port: int, delay_s: float) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._there = ("127.0.0.1", to_port)
        self._delay_s = delay_s
        self._random = random.Random(0)
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        asker: Any = None
        while message := self._socket.recvfrom(100):
            data, sender = message
            if not data:
                self._socket.close()
                return
            if sender != self._there:
                asker = sender
            to = asker if sender == self._there else self._there
            later_s = self._delay_s + self._random.uniform(0, JITTER_S)
            threading.Timer(later_s, self._socket.sendto, (data, to)).start()

    def close(self) -> None:
        """End the link."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
            mine.sendto(b"", ("127.0.0.1", self.port))


def write_recording(folder: Path, instance: int, count: int) -> int:
    """Write a recording of many equal steps, and return its size in bytes."""
    numbers = np.random.default_rng(instance)
    steps = -(-count // len(_OF_A_STEP))
    events = np.zeros((steps, len(_OF_A_STEP)), EVENT)
    events["kind"], events["name"] = np.array(_OF_A_STEP).T
    events["value"][events["kind"] == EventKind.STEP_BEGINS] = np.arange(steps)
    events = events.reshape(-1)[:count]
    events["when_ns"] = np.cumsum(numbers.integers(500, 200_000, len(events)))
    header = {
        "instance": instance,
        "instances": 2,
        "host": "here",
        "attempt": 0,
        "clock": "one",
        "began_ns": 0,
        "began_at_s": 0.0,
    }
    said = {number: {"name": name} for number, name in enumerate(_NAMES)}
    said[4] |= {"call": "all_reduce"}
    with (folder / f"instance-{instance}.timeline").open("wb") as file:
        file.write(MAGIC + json_block(HEADER, header) + names_block(said))
        for start in range(0, len(events), 5000):
            file.write(block(EVENTS, pack_events(events[start : start + 5000])))
        return file.tell()


if __name__ == "__main__":
    main()
