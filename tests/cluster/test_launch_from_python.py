"""Functions that a Python program launches on other hosts than its own."""

from __future__ import annotations

import json
import sys

import pytest
from looping import Traces

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(300),
]

PROGRAM = """
import json, os, sys
import numpy as np
import popdist

data = np.arange(1 << 20, dtype=np.float32)
listening = "ss -Hltn | grep -v '127.0.0.1' | awk '{print $4}'"


class Unlucky(Exception):
    pass


def where(factor):
    popdist.init()
    found = popdist.getInstanceIndex(), os.uname().nodename, float(data[-1] * factor), len(data[:: 2])
    popdist.synchronize()
    return found


def fail():
    popdist.init()
    if popdist.getInstanceIndex() == 1:
        raise Unlucky("here")
    popdist.synchronize()


options = ["--allow-run-as-root", "yes", "--process-placement", "disabled", *sys.argv[2:]]
print(json.dumps(popdist.launch(where, 2, num_instances=2, num_replicas=4, hosts=sys.argv[1], options=options)))
try:
    popdist.launch(fail, num_instances=2, hosts=sys.argv[1].split(","), options=options)
except Unlucky as error:
    print(json.dumps([str(error), error.__notes__, "in fail" in str(error.__cause__)]))
"""


def launched(hosts, on, *words):
    done = hosts.on(on, sys.executable, "-c", PROGRAM, *words, limit_s=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[") and "<std" not in line]


@pytest.mark.parametrize("launcher", ["h0", "h3"])
def test_a_function_travels_to_other_hosts_and_its_results_and_exceptions_come_back(hosts, launcher):
    traces = Traces(hosts)
    last = float((1 << 20) - 1) * 2
    results, failure = launched(hosts, launcher, "h0,h1")
    assert results == [[0, "h0", last, 1 << 19], [1, "h1", last, 1 << 19]]
    assert failure == ["here", ["raised by instance 1 on h1"], True]
    assert traces.left() == set()


def test_a_restarted_job_reaches_the_launching_process_again(hosts):
    faults = ["--on-failure", "restart", "--inject", "kill:instance=1,phase=barrier", "--max-restarts", "1"]
    results, failure = launched(hosts, "h0", "h0,h1", *faults)
    assert [each[:2] for each in results] == [[0, "h0"], [1, "h1"]]
    assert failure[0] == "here"
