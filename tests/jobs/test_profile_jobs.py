"""Jobs whose steps are also recorded by the profiler of JAX or PyTorch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from poprun_jobs import start
from strict_trace import read_strictly

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(150)]

IMPORTS = {
    "jax": "from jax.profiler import TraceAnnotation as annotation",
    "torch": "from torch.profiler import record_function as annotation",
}
PROGRAM = """\
import popdist
popdist.init()
communicator = popdist.context.communicator()
instruments = communicator.instruments
for step in range(100, 108):
    instruments.step_begins(step)
    with annotation(f"work of step {step}"):
        communicator.barrier(name="gradients")
    instruments.step_ends(1, 0.5)
"""
BARRIER = "barrier 'gradients': exchange"


@pytest.mark.parametrize(
    ("word", "steps"),
    [
        pytest.param("jax:3", range(102, 105), id="JAX"),
        pytest.param("torch:all@4", range(104, 108), id="PyTorch", marks=pytest.mark.complete),
    ],
)
def test_profiled_steps_appear_in_the_trace_at_their_times(tmp_path: Path, word, steps) -> None:
    profiler = word.partition(":")[0]
    pytest.importorskip(profiler)
    trace = tmp_path / "trace.json"
    program = f"{IMPORTS[profiler]}\n{PROGRAM}"
    words = [f"--timeline={trace}", f"--profile={word}", "--summary=no", sys.executable, "-c", program]
    finished = start("-n=2", "--num-replicas=2", *words).finish()
    assert (finished.status, finished.stderr) == (0, "")
    every = read_strictly(trace)
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in every if event["name"] == "thread_name"}
    events = [event for event in every if event["ph"] == "X"]
    for instance in range(2):
        own = [event for event in events if event["pid"] == instance]
        works = {event["name"]: event for event in own if event.get("cat") == "profile"}
        assert [name for name in works if "work of step" in name] == [f"work of step {step}" for step in steps]
        exchanges = {event["args"]["step"]: event for event in own if event["name"] == BARRIER}
        for step in steps:
            work, exchange = works[f"work of step {step}"], exchanges[step]
            uncertain = uncertainty_us(threads[instance, work["tid"]])
            assert work["ts"] - uncertain <= exchange["ts"]
            assert exchange["ts"] + exchange["dur"] <= work["ts"] + work["dur"] + uncertain


@pytest.mark.complete
def test_the_profile_of_a_killed_instance_is_reported_as_lost(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = [f"--timeline={trace}", "--profile=jax:all", "--inject=kill:instance=1,step=104", sys.executable, "-c"]
    finished = start("-n=2", *words, f"{IMPORTS['jax']}\n{PROGRAM}").finish()
    assert finished.status == 128 + 9
    assert re.search(r"instance 1 \(.*\): the profiler of jax had begun, and its profile is lost", finished.stderr)


def uncertainty_us(name: str) -> int:
    """Return the uncertainty of a thread's clock, as its name gives it, rounded up."""
    found = re.search(r"\(\+- (\d+) us\)", name)
    assert found, name
    return int(found[1]) + 1
