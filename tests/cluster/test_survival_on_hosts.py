"""Jobs on several hosts that survive losses."""

from __future__ import annotations

import json
import sys

import pytest
from beds import ROOT
from looping import Traces, run, words

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.long,
    pytest.mark.timeout(170),
]

PROGRAM = str(ROOT / "tests" / "jobs" / "programs" / "surviving_training.py")
SILENCE_S = 4


def train(bed, hosts, instances, *options):
    """Train, and return the results of the remaining instances and poprun's messages."""
    options = ("--num-replicas", "8", *options)
    done = run(bed, hosts, instances, sys.executable, PROGRAM, "4", options=options)
    assert done.returncode == 0, done.stderr
    lines = (line.rpartition("<stdout>:")[2] for line in done.stdout.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")], done.stderr


@pytest.fixture(scope="module")
def alone(bed):
    """Return the result of a single process."""
    [found], _ = train(bed, ["h0"], 1)
    return found


@pytest.mark.parametrize(
    ("kind", "instances", "lost", "phase"),
    [("kill", 2, 0, "all_reduce"), ("cut", 4, 3, "forward")],
)
def test_the_others_go_on_to_the_same_bits(hosts, alone, kind, instances, lost, phase):
    fault = f"{kind}:instance={lost},step=3,phase={phase}"
    found, error = train(hosts, hosts.names[:2], instances, "--on-failure", "shrink", "--inject", fault)
    assert len(found) == instances - 1
    assert sum(each["replicas"] for each in found) == 8
    for each in found:
        assert (each["fingerprint"], each["losses"]) == (alone["fingerprint"], alone["losses"])
    assert f"the job completed without 1 instance: instance {lost} on host h{lost * 2 // instances} " in error


UNTIL_THE_SECOND_ATTEMPT = """
import os
import numpy as np
import popdist

popdist.init()
count = 0
while os.environ["POPDIST_RESTART_COUNT"] == "0" or count < 100:
    popdist.allreduce(np.ones(10), tensor_name=None)
    count += 1
    if count == 50:
        print("all are up", flush=True)
"""


@pytest.mark.parametrize("mode", ["shrink", "restart"])
def test_a_host_with_a_cut_link_is_left_out_of_the_next_attempt(hosts, mode):
    options = ("--on-failure", mode, "--host-timeout-s", str(SILENCE_S), "--restart-backoff-s", "0")
    traces = Traces(hosts)
    program = (sys.executable, "-c", UNTIL_THE_SECOND_ATTEMPT)
    job = hosts.start("h0", *words(hosts.names[:3], 3, *options), *program)
    assert any("all are up" in line for line in job.stdout), job.stderr.read()
    hosts.link("h2", "down")
    _, error = job.communicate(timeout=100)
    assert job.returncode == 0, error
    assert "restart 1 of 3: 3 instances on h0" in error
    assert "the job completed after 1 restart: " in error
    assert "h2" in error
    assert traces.left() == set()


def test_a_new_instance_starts_on_the_host_that_lost_one(hosts):
    program = str(ROOT / "tests" / "jobs" / "programs" / "growing_back.py")
    options = ("--num-replicas", "6", "--regrow", "yes", "--max-restarts", "2", "--restart-backoff-s", "0")
    done = run(hosts, hosts.names[:2], 2, sys.executable, program, "1", options=options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 instances, 3 replicas") == 2
    assert "instance 4 starts on host h1 in the place of a lost one: 1 of 2" in done.stderr
