"""One job of each kind on two hosts; all others are in the complete tier (test_launch.py, test_slurm.py)."""

from __future__ import annotations

import json
import sys

import pytest
from looping import Traces, own_lines, run
from slurm_bed import Slurm
from test_launch import WHO
from test_slurm import POPRUN, said_by

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

FAILS_ON_H1 = ("sh", "-c", "test $OMPI_COMM_WORLD_RANK = 0 || exit 3; exec sleep 1000")


@pytest.mark.cores(2)
def test_instances_on_two_hosts_find_each_other_and_the_same_environment(hosts):
    done = run(hosts, hosts.names[:2], 2, sys.executable, "-c", WHO, XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line.partition(":")[2]) for line in done.stdout.splitlines())
    assert [each[:4] for each in found] == [[0, 0, 0, "h0"], [1, 0, 1, "h1"]]
    # poprun may have added a flag.
    assert [each[4]["XLA_FLAGS"].split()[0] for each in found] == ["--xla_cpu_enable_fast_math=false"] * 2
    assert [each[4]["PYTHONPATH"] for each in found] == [hosts.environ["PYTHONPATH"]] * 2


def test_an_instance_that_fails_on_another_host_ends_the_job_and_is_named(hosts):
    traces = Traces(hosts)
    done = run(hosts, hosts.names[:2], 2, *FAILS_ON_H1)
    assert done.returncode == 3, done.stderr
    assert own_lines(done.stderr)[0].startswith("instance 1 on host h1 (pid ")
    assert own_lines(done.stderr)[0].endswith(" ended with exit status 3")
    assert traces.left() == set()


def test_a_slurm_job_uses_the_hosts_of_its_allocation_without_ssh(hosts, slurm_conf):
    slurm = Slurm(hosts, slurm_conf)
    slurm.free_all()
    job = ["--num-instances", "2", "--num-replicas", "2", "--process-placement", "disabled", "hostname"]
    done = slurm.run("salloc", "--quiet", "-N2", "-n2", *POPRUN, *job, POPRUN_SSH_ARGS="-p 1")
    assert said_by(done) == ["h0", "h1"], done.stderr
