"""Measured traces of a Trainer's pipeline, as its watch gets them."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.pipelines.plan import Trace, plan

COUNT = 8
START = {"first": np.ones((3, 5), np.float32), "second": np.ones((5, 5), np.float32), "last": np.ones(5, np.float32)}


def loss_fn(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = jnp.tanh(batch @ variables["first"])
    with strategies.pipeline_stage(1):
        hidden = jnp.tanh(hidden @ variables["second"])
    with strategies.pipeline_stage(2):
        return jnp.mean((hidden @ variables["last"]) ** 2)


@pytest.fixture(scope="module")
def traces():
    """Provide a function that returns the trace of the second step of two replicas for a schedule and mapping."""
    found = {}

    def of(schedule, mapping):
        if (schedule, *mapping) not in found:
            seen = []
            watched = strategies.Pipelining(mapping, schedule, watch=lambda replicas: seen.append(Trace(replicas)))
            strategy = strategies.IPUStrategy(num_replicas=2, ipus_per_replica=3)
            trainer = strategies.Trainer(
                strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=COUNT, pipeline=watched
            )
            state = trainer.init(START)
            for step in range(2):
                state, _ = trainer.step(state, np.full((2 * COUNT, 3), step, np.float32))
            assert len(seen) == 2
            found[schedule, *mapping] = seen[-1]
        return found[schedule, *mapping]

    return of


def in_order(spans):
    """Return the actions of each device, by the times at which they began."""
    devices = sorted({span.device for span in spans})
    return tuple(tuple(span.action for span in spans if span.device == one) for one in devices)


CASES = [("zero_bubble", [0, 1, 2]), ("one_forward_one_backward", [0, 1, 0])]


@pytest.mark.parametrize(("schedule", "mapping"), CASES)
def test_every_replica_followed_the_timetable_of_the_plan(schedule, mapping, traces):
    trace = traces(schedule, mapping)
    planned = plan(3, COUNT, schedule, mapping).timetable
    assert list(trace.replicas) == [0, 1]
    for spans in trace.replicas.values():
        assert in_order(spans) == planned.devices
        ends = {span.action: span.end_s for span in spans}
        assert len(spans) == len(ends) == sum(map(len, planned.devices))
        assert all(span.begin_s >= ends[one] for span in spans for one in planned.dependencies(span.action))


@pytest.mark.parametrize(("schedule", "mapping"), CASES)
def test_a_device_does_one_thing_at_a_time(schedule, mapping, traces):
    for spans in traces(schedule, mapping).replicas.values():
        for device in set(mapping):
            own = [span for span in spans if span.device == device]
            assert all(span.begin_s <= span.end_s for span in own)
            assert all(before.end_s <= after.begin_s for before, after in itertools.pairwise(own))


def test_a_trace_is_drawn(traces):
    text = str(traces("zero_bubble", [0, 1, 2]))
    assert text.count("replica") == 2
    assert text.count("device 2 stage 2") >= 2
