"""Sums over all replicas: an instance is lost in the middle, and the others go on until a new one joins.

Usage: python growing_back.py LOST
LOST: the ranks that are killed, separated by commas. An instance is killed between two steps, a new one on its way.
"""

import os
import signal
import sys
import time

import numpy as np

import popdist
from collectives import BrokenError, PeerLostError
from popdist.context import progress
from popdist.membership import spares
from popdist.membership.leaving import carry_on

STEPS, LOSS_AT, WAIT_AT, REPLICAS = 12, 3, 6, 6
LIMIT_S = 60.0


def end_here():
    os.kill(os.getpid(), signal.SIGKILL)


def await_new_instance(count):
    """Wait until the members change: a new instance joins, or one is lost on its way."""
    give_up_s = time.monotonic() + LIMIT_S
    progress().heeds_wishes(True)
    while popdist.instance().count < count and not progress().is_released:
        assert time.monotonic() < give_up_s, "no new instance has come"
        time.sleep(0.01)


class Sums:
    """The sum so far, and the steps that are made."""

    def __init__(self):
        self.step, self.total = 0, 0.0

    def meet(self):
        """Let instances with more steps tell the others their sum."""
        found = popdist.communicator().all_gather(np.array([float(self.step), self.total]), name="sums")
        self.step, self.total = int(found[:, 0].max()), float(found[found[:, 0].argmax(), 1])
        spares.takes_values()

    def add(self):
        mine = np.array([sum((self.step + 1.0) * (replica + 1) for replica in popdist.instance().local_replica_range)])
        popdist.communicator().all_reduce(mine, "sum")
        self.step, self.total = self.step + 1, self.total + float(mine[0])
        spares.publish(lambda step=self.step, total=self.total: f"{step} {total}".encode())

    def replay(self):
        """Take the next step from the journal; return False if this process joins the others instead."""
        entry = spares.next_entry()
        if entry is None:
            return False
        step, total = entry.decode().split()
        assert int(step) == self.step + 1
        self.step, self.total = int(step), float(total)
        return True

    def make_step(self, count):
        if spares.is_spare() and self.replay():
            return
        is_new = spares.is_spare() or progress().is_released
        while True:
            try:
                if is_new:
                    carry_on()
                    self.meet()
                if self.step == WAIT_AT:
                    await_new_instance(count)
                    if progress().is_released:
                        is_new = True
                        continue
                self.add()
                return
            except (PeerLostError, BrokenError):
                is_new = True


def main():
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    lost = [int(word) for word in sys.argv[1].split(",")]
    popdist.init()
    count = popdist.instance().count
    if spares.is_spare() and rank in lost:
        end_here()
    sums = Sums()
    while sums.step < STEPS:
        if sums.step == LOSS_AT and rank in lost:
            end_here()
        sums.make_step(count)
    expected = sum((step + 1.0) * (replica + 1) for step in range(STEPS) for replica in range(REPLICAS))
    assert sums.total == expected, (sums.total, expected)
    print(f"{popdist.instance().count} instances, {popdist.instance().local_replicas} replicas", flush=True)


main()
