"""Recorded events of a training on two instances in threads: their order, and unchanged bits."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy

from collectives import Settings
from collectives.backends.thread import ThreadHub, connect
from collectives.instruments import Instruments
from popdist import Instance
from popdist.timeline.events import EventKind
from popdist.timeline.recorder import Recorder, RingBuffer
from poprun.trace.merging import put_together
from poprun.trace.recordings import InstanceRecording
from poprun.trace.report.verdict import judge
from poprun.trace.spans import Sort
from strategies import Trainer, fingerprint

STEPS, REPLICAS = 4, 4
ROWS = {"x": np.arange(96, dtype=np.float32).reshape(32, 3)}


def train(hub, rank, recorder, found):
    """Return the variables of one instance after some steps, and the reported losses."""
    instance = Instance(rank, 2, 2, 2 * rank, REPLICAS, rank)
    settings = Settings(progress=Instruments(*([recorder] if recorder else [])))
    with connect(settings, hub, rank) as communicator:
        strategy = ConnectedStrategy(instance, communicator)
        dataset = strategy.distribute_dataset(ROWS, batch_size=2, shuffle=False)
        trainer = Trainer(strategy, lambda variables, batch, key: jnp.mean(batch["x"] @ variables), optax.sgd(0.1))
        state = trainer.init(np.ones(3, np.float32))
        losses = []
        for batch in dataset.epoch(0):
            state, metrics = trainer.step(state, batch)
            losses.append(metrics["loss"])
        found[rank] = fingerprint(state.variables), losses


def trained(recorders):
    found, hub = {}, ThreadHub(2)
    threads = [threading.Thread(target=train, args=(hub, rank, recorders[rank], found)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(2)]


@pytest.fixture(scope="module")
def recorded():
    """Provide the recordings and results of two instances."""
    rings = [RingBuffer(), RingBuffer()]
    recorders = [Recorder(ring) for ring in rings]
    found = trained(recorders)
    recordings = [
        InstanceRecording(
            rank, 2, "here", names=recorders[rank].take_new_names(), events=rings[rank].take()[0], is_complete=True
        )
        for rank in range(2)
    ]
    return recordings, found


def test_recording_changes_no_bits(recorded):
    assert trained([None, None]) == recorded[1]


def test_a_step_has_its_events_in_order(recorded):
    recordings, _ = recorded
    for recording in recordings:
        events = recording.events[recording.events["track"] == 0]
        begins = np.flatnonzero(events["kind"] == EventKind.STEP_BEGINS)
        assert events["value"][begins].tolist() == list(range(STEPS))
        last = events[begins[-2] :][: begins[-1] - begins[-2]]
        phase = ["PHASE_BEGINS", "PHASE_ENDS"]
        operation = ["OPERATION_BEGINS", "DATA_MOVES", "OPERATION_ENDS"]
        assert [EventKind(kind).name for kind in last["kind"].tolist() if kind != EventKind.WAITS_FOR] == [
            "STEP_BEGINS",
            *phase,
            *phase,
            *(phase[0], *operation, phase[1]),
            *phase,
            *phase,
            "STEP_ENDS",
            "MEASURED",
            *phase,
        ]
        names = [recording.names[number]["name"] for number in last["name"][np.isin(last["kind"], (3, 5))].tolist()]
        compute = "forward and backward"
        gradients = "ordered_all_reduce 'gradients/float32'"
        assert names == [compute, compute, "exchange", gradients, compute, "update", "data"]


def test_every_replica_is_seen_in_every_step(recorded):
    recordings, _ = recorded
    job = put_together(recordings)
    for rank, spans in enumerate(job.spans):
        replicas = spans.of(Sort.REPLICA)
        for replica in (2 * rank, 2 * rank + 1):
            assert replicas["step"][replicas["name"] == replica].tolist() == list(range(STEPS))


def test_rows_and_losses_match_the_steps(recorded):
    recordings, found = recorded
    for recording, spans, (_, losses) in zip(recordings, put_together(recordings).spans, found, strict=True):
        assert spans.measured["loss"][1].tolist() == losses
        ends = recording.events[recording.events["kind"] == EventKind.STEP_ENDS]
        assert ends["value"].tolist() == [4] * STEPS


def test_a_recording_gives_a_verdict(recorded):
    verdict = judge(put_together(recorded[0]))
    assert verdict.table.steps.tolist() == list(range(STEPS))
    assert len(verdict.shares) == 2
    assert verdict.overlap[0].share is not None
