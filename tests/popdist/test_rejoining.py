"""A worker over gRPC that is started again, and what may befall it on its way: the others go on to the same sums."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_jobs import socket_addresses
from workers import Worker, disposed_of

from popdist.membership.standby import PASS_ON_EVERY_S

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "jobs" / "programs" / "rejoining.py"
VICTIM = 3
TIMEOUT_S = 8  # less than POPDIST_STALL_WARNING_S, after which a stopped worker is lost
FOREIGN = ("POPDIST_", "OMPI_", "PMIX_", "TF_CONFIG")

pytestmark = pytest.mark.timeout(120)


class Cluster:
    """The workers of a job; the first two stay, and the others are lost.

    Args:
        addresses: The addresses of four workers.
        workers: A list for all workers that are started.
        step_s: The time that a step takes.
    """

    def __init__(self, addresses, workers, step_s=0.005):
        self._addresses, self._workers, self._step_s = addresses, workers, step_s
        self.first = [self.start(rank) for rank in range(4)]
        self.staying = self.first[:2]

    def start(self, rank, fault="", moment=""):
        """Start a worker; a fault strikes in a moment of its program, or at a collective that popdist itself makes."""
        task = {"cluster": {"worker": self._addresses}, "task": {"type": "worker", "index": rank}}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        changes = {"TF_CONFIG": json.dumps(task), "POPDIST_JOB_TOKEN": "secret", "POPDIST_TIMEOUT_S": str(TIMEOUT_S)}
        changes["STEP_S"] = str(self._step_s)
        words = [fault, moment] if fault else []
        if moment == "announced":
            changes["POPDIST_INJECT"], words = f"{fault}:instance={rank},phase=all_gather", []
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            env=clean | {"PYTHONPATH": str(ROOT)} | changes,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._workers.append(Worker(process))
        return self._workers[-1]

    def shrink(self):
        """Lose all workers but two, one after another, so that each time enough are left."""
        for worker in self.staying:
            worker.wait_for("step 20 of 4 workers")
        for rank in (VICTIM, 2):
            self.first[rank].kill()
            self.make_steps(rank)

    def make_steps(self, count):
        """Wait until the first two have made more steps as so many workers."""
        said = f"of {count} workers"
        before = [len(worker.containing(said)) for worker in self.staying]
        for worker, lines in zip(self.staying, before, strict=True):
            worker.wait_for(said, count=lines + 2)

    def end(self, *others):
        """End the job, and return its lines with results."""
        self.staying[0].tell("end")
        workers = [*self.staying, *others]
        assert [worker.end() for worker in workers] == [0] * len(workers), [worker.text for worker in workers]
        assert not any(worker.containing("so it has not joined") for worker in workers)
        return {worker.wait_for("right after") for worker in workers}


def test_a_worker_joins_others_whose_results_are_passed_on_after_every_step():
    with socket_addresses(4) as addresses, disposed_of() as workers:
        cluster = Cluster(addresses, workers, step_s=1.2 * PASS_ON_EVERY_S)
        for worker in cluster.staying:
            worker.wait_for("of 4 workers")
        cluster.first[VICTIM].kill()
        for worker in cluster.staying:
            worker.wait_for("of 3 workers")
        again = cluster.start(VICTIM)
        again.wait_for("of 4 workers")
        assert len(cluster.end(cluster.first[2], again)) == 1


def test_the_others_make_steps_while_workers_replay_and_are_killed_on_their_way():
    """At last two workers are started again at once."""
    with socket_addresses(4) as addresses, disposed_of() as workers:
        cluster = Cluster(addresses, workers)
        cluster.shrink()
        slow = cluster.start(VICTIM, "hold", "replaying")
        slow.wait_for("comes to replaying")
        cluster.make_steps(2)
        assert not any(worker.containing("has joined again") for worker in cluster.staying)
        slow.tell("go on")
        cluster.make_steps(3)
        slow.kill()
        cluster.make_steps(2)
        for moment in ("connected", "replaying", "announced", "handover"):
            assert cluster.start(VICTIM, "kill", moment).end() == -signal.SIGKILL
            cluster.make_steps(2)
        again = [cluster.start(rank) for rank in (2, VICTIM)]
        cluster.make_steps(4)
        assert len(cluster.end(*again)) == 1


@pytest.mark.complete
@pytest.mark.long
def test_the_others_make_steps_if_a_worker_is_stopped_on_its_way():
    with socket_addresses(4) as addresses, disposed_of() as workers:
        cluster = Cluster(addresses, workers)
        cluster.shrink()
        for moment in ("connected", "replaying"):
            stopped = cluster.start(VICTIM, "stop", moment)
            stopped.wait_for(f"comes to {moment}")
            cluster.make_steps(2)
            stopped.kill()
        for count, moment in enumerate(("announced", "handover"), 1):
            stopped = cluster.start(VICTIM, "stop", moment)
            for worker in cluster.staying:
                worker.wait_for(f"is lost: it has not joined within timeout_s = {TIMEOUT_S}", count=count)
            cluster.make_steps(2)
            stopped.kill()
        again = cluster.start(VICTIM)
        cluster.make_steps(3)
        assert len(cluster.end(again)) == 1
