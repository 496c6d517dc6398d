"""Sums over all replicas of a cluster: workers are lost and started again, until a line on standard input ends it.

Usage: python rejoining.py [FAULT MOMENT]
FAULT: what befalls this worker, which was started again: `kill`, `stop`, or `hold` until a line on standard input.
MOMENT: when: `connected`, `replaying`, or `handover`. POPDIST_INJECT serves for the moments between.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import popdist
from collectives import BrokenError, PeerLostError
from popdist.context import join_cluster, progress
from popdist.environments.tf_config import read_cluster
from popdist.membership import spares
from popdist.membership.leaving import carry_on

FAULT, MOMENT = sys.argv[1:] or ("", "")
STEPS_SHOWN, REPLAYED = 20, 10
STEP_S = float(os.environ.get("STEP_S", "0.005"))  # the work of a step, which no worker does again when it replays
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def comes_to(moment):
    if moment != MOMENT:
        return
    print(f"comes to {moment}", flush=True)
    if FAULT in SIGNALS:
        os.kill(os.getpid(), SIGNALS[FAULT])
    else:
        sys.stdin.readline()


class Sums:
    """The sum so far, and the steps that are made."""

    def __init__(self):
        self.step, self.total, self.is_over, self.count = 0, 0.0, False, 0
        self.is_asked = threading.Event()

    def await_order(self):
        """Wait for a line on standard input, which ends the job."""
        if sys.stdin.readline():
            self.is_asked.set()

    def meet(self):
        """Let workers with more steps tell the others their sum."""
        comes_to("handover")
        own = np.array([float(self.step), self.total, self.is_over])
        found = popdist.communicator().all_gather(own, name="sums")
        newest = found[found[:, 0].argmax()]
        if newest[0] > self.step:  # its journal needs the step that others have completed
            self.complete(*newest)
        spares.takes_values()

    def take(self, step, total, is_over):
        self.step, self.total, self.is_over = int(step), float(total), bool(is_over)

    def complete(self, step, total, is_over):
        self.take(step, total, is_over)
        spares.publish(lambda: f"{step} {total} {int(is_over)}".encode())

    def add(self):
        time.sleep(STEP_S)
        instance = popdist.instance()
        mine = [sum((self.step + 1.0) * (replica + 1) for replica in instance.local_replica_range)]
        both = np.array([*mine, float(self.is_asked.is_set())])
        popdist.communicator().all_reduce(both, "sum")
        self.complete(self.step + 1, self.total + both[0], bool(both[1]))
        if instance.count != self.count or self.step % STEPS_SHOWN == 0:
            self.count = instance.count
            print(f"step {self.step} of {self.count} workers", flush=True)

    def replay(self):
        """Take the next step from the journal; return False if this process joins the others instead."""
        if self.step == REPLAYED:
            comes_to("replaying")
        entry = spares.next_entry()
        if entry is None:
            return False
        step, *rest = map(float, entry.decode().split())
        assert step == self.step + 1
        self.take(step, *rest)
        return True

    def make_step(self):
        if spares.is_spare() and self.replay():
            return
        is_new = spares.is_spare()
        spares.may_change(True, True)
        while True:
            try:
                if is_new or progress().is_resize_due:
                    carry_on()
                    self.meet()
                if not self.is_over:
                    self.add()
                break
            except (PeerLostError, BrokenError):
                is_new = True
        spares.may_change(False, False)


def main():
    cluster = read_cluster(os.environ)
    replicas = len(cluster.addresses)
    join_cluster(cluster, replicas, True)
    comes_to("connected")
    sums = Sums()
    if not FAULT:
        threading.Thread(target=sums.await_order, daemon=True).start()
    while not sums.is_over:
        sums.make_step()
    expected = sum((step + 1.0) * (replica + 1) for step in range(sums.step) for replica in range(replicas))
    assert sums.total == expected, (sums.total, expected)
    print(f"right after {sums.step} steps", flush=True)


main()
