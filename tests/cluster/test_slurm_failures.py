"""Failures of poprun jobs in a real Slurm: the promises are the same as over ssh (test_launch.py)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys

import pytest
from beds import ROOT
from looping import Looping, Traces, await_value, looping, own_lines
from slurm_bed import Slurm

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.long,
    pytest.mark.timeout(240),
]

SILENCE_S = 4

COUNT = 3
INSIDE = ("--nodes=3", "--ntasks-per-node=1")
"""Options for h0 to h2, where poprun runs on one of the job's hosts, as in sbatch."""
OUTSIDE = ("--nodelist=h[1-3]", "--ntasks-per-node=1")
"""Options for h1 to h3, where poprun runs on h0 as on a login node."""


@pytest.fixture
def slurm(hosts, slurm_conf):
    cluster = Slurm(hosts, slurm_conf)
    cluster.free_all()
    return cluster


def poprun(*options, **loop):
    """Return the words of a job with one instance on each of three hosts."""
    job = ["--num-instances", str(COUNT), "--num-replicas", str(COUNT), "--process-placement", "disabled"]
    return [sys.executable, "-m", "poprun", *job, "--allow-run-as-root", "yes", *options, *looping(**loop)]


def salloc(slurm, nodes, *options, **loop):
    """Start a job in the shell of an allocation; instance 1 is on the second of its hosts."""
    job = Looping(slurm.bed, ["salloc", "--quiet", *nodes, *poprun(*options, **loop)], **slurm.environ)
    job.await_start()
    return job


@pytest.mark.parametrize(
    ("deed", "status", "how"),
    [("raise", 1, "ended with exit status 1"), ("kill", 137, "was killed by SIGKILL")],
)
def test_a_failed_instance_ends_the_job_and_is_named(slurm, deed, status, how):
    job = salloc(slurm, INSIDE, victim=1, deed=deed)
    found, lines = job.end()
    assert found == status
    assert re.match(rf"instance 1 on host h1 \(pid \d+\) {how}, after collective 50", lines[0]), lines
    assert job.left() == set()


@pytest.mark.parametrize(("nodes", "host"), [(INSIDE, "h1"), (OUTSIDE, "h2")], ids=["inside", "outside"])
def test_a_killed_daemon_ends_the_job_and_its_host_is_named(slurm, nodes, host):
    """srun ends the other daemons at once, which are not to blame."""
    job = salloc(slurm, nodes)
    daemons = [pid for pid, command in slurm.bed.processes(host).items() if re.match(r"\S*prted ", command)]
    os.kill(max(daemons), signal.SIGKILL)  # srun waits for the other one
    status, lines = job.end()
    assert status == 1
    assert lines[0] == f"host {host} has lost its daemon of Open MPI, and with it instance 1"
    assert job.left() == set()


def test_a_host_with_a_cut_link_cleans_itself_up_and_ends_the_job(slurm):
    job = salloc(slurm, INSIDE, "--host-timeout-s", str(SILENCE_S))
    slurm.bed.link("h2", "down")
    assert job.left(["h2"]) == set()
    status, lines = job.end()
    assert status != 0
    assert re.search(r"instance 2 on host h2", "\n".join(lines)), lines
    assert job.left() == set()


def test_a_revoked_allocation_ends_the_job_and_blames_no_instance(slurm):
    job = salloc(slurm, INSIDE)
    slurm.run("scancel", "--user=root")
    status, lines = job.end()
    assert status != 0
    assert lines[0].endswith("before every instance had completed")
    assert re.search("instance [12] on host h[12] had to stop because SIGTERM came", "\n".join(lines)), lines
    assert job.left() == set()


def test_a_node_set_down_ends_the_job_and_blames_no_instance(slurm):
    job = salloc(slurm, OUTSIDE)
    try:
        slurm.run("scontrol", "update", "nodename=h2", "state=down", "reason=test")
        status, lines = job.end()
        assert status != 0
        assert lines[0].endswith("before every instance had completed")
        assert re.search("instance [02] on host h[13] had to stop", "\n".join(lines)), lines
        assert job.left() == set()
    finally:
        slurm.run("scontrol", "update", "nodename=h2", "state=resume")


def test_a_cancelled_batch_job_leaves_nothing(slurm):
    """Slurm sends SIGTERM to all processes, including poprun."""
    out, err, script = (slurm.folder / name for name in ("stdout", "stderr", "script"))
    script.write_text(f"#!/bin/sh\ntrap : TERM\n{shlex.join(poprun())}\necho exit status $?\n")
    out.write_text("")
    traces = Traces(slurm.bed)
    slurm.run("sbatch", *INSIDE, "--output", str(out), "--error", str(err), str(script))
    assert "all are up" in await_value(out.read_text, lambda text: "all are up" in text), err.read_text()
    slurm.run("scancel", "--user=root")
    assert traces.left() == set()
    assert own_lines(err.read_text()) == ["poprun received SIGTERM and ended all instances"]
    assert "exit status 143" in await_value(out.read_text, lambda text: "exit status" in text)


def test_a_training_that_loses_an_instance_goes_on_to_the_same_bits(slurm):
    program = (sys.executable, str(ROOT / "tests" / "jobs" / "programs" / "surviving_training.py"), "4")
    job = (sys.executable, "-m", "poprun", "--allow-run-as-root", "yes", "--num-replicas", "6")
    options = ("--num-instances", "3", "--on-failure", "shrink", "--inject", "kill:instance=1,step=3,phase=all_reduce")
    expected, *_ = found_by(slurm.bed.on("h0", *job, *program).stdout)
    done = slurm.run("salloc", "--quiet", *INSIDE, *job, *options, *program, limit_s=120.0)
    assert done.returncode == 0, done.stderr
    found = found_by(done.stdout)
    assert [each["replicas"] for each in found] == [3, 3]
    assert {(each["fingerprint"], each["step"]) for each in found} == {(expected["fingerprint"], expected["step"])}
    assert "the job completed without 1 instance: instance 1 on host h1 " in done.stderr


def found_by(stdout):
    """Return the results of the remaining instances."""
    lines = (line.rpartition("<stdout>:")[2] for line in stdout.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_failed_job_is_restarted_in_its_allocation(slurm):
    """All three hosts are used again, because a single failure does not exclude a host."""
    program = ("sh", "-c", "echo $POPDIST_RESTART_COUNT; test $OMPI_COMM_WORLD_RANK$POPDIST_RESTART_COUNT != 10")
    job = (sys.executable, "-m", "poprun", "--allow-run-as-root", "yes", "--num-instances", "3", "--num-replicas", "3")
    options = ("--on-failure", "restart", "--restart-backoff-s", "0")
    done = slurm.run("salloc", "--quiet", *INSIDE, *job, *options, *program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<stdout>:1") == 3
    assert "restart 1 of 3: 3 instances on h0, h1, h2" in done.stderr
    assert "the job completed after 1 restart: instance 1 on host h1 " in done.stderr
