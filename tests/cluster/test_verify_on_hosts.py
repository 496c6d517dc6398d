"""`poprun verify` with runs on several hosts."""

from __future__ import annotations

import os
import sys

import pytest
from beds import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(170)]

PROGRAM = str(ROOT / "tests" / "jobs" / "programs" / "verified_training.py")


def verify(bed, *options):
    root = ["--allow-run-as-root", "yes"] if os.geteuid() == 0 else []
    job = ["--host", "h0,h1", "--num-replicas", "4", "--process-placement", "disabled", *root, *options]
    return bed.on("h0", sys.executable, "-m", "poprun", "verify", *job, sys.executable, PROGRAM, "well", limit_s=150.0)


def test_records_of_all_hosts_are_compared(hosts):
    folder = hosts.shared / "records"
    done = verify(hosts, "--spreads=1,2", "--record-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 2 runs of 4 steps" in done.stdout
    of_hosts = [sorted(path.name.split(".")[0] for path in (folder / run).glob("*.jsonl")) for run in ("1", "2")]
    assert of_hosts == [["h0"], ["h0", "h1"]]


def test_a_directory_that_is_not_shared_is_noticed(hosts):
    done = verify(hosts, "--spreads=2", "--record-dir=/tmp/records-of-one-host")
    assert done.returncode == 1
    assert "instance 1 of 2 x 2 left no record where poprun looks for it; is --record-dir a directory" in done.stderr


def test_several_hosts_need_a_shared_directory(hosts):
    done = verify(hosts, "--spreads=1,2")
    assert done.returncode == 2
    assert "give --record-dir, a directory that all hosts share" in done.stderr
    assert "run 1" not in done.stderr
