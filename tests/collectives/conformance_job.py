"""One rank of an MPI job that runs all statements: `conformance_job.py MECHANISM REPORT TIER RANKS`.

The mechanism is one of those in `conformance_plan`. RANKS are those that do without the native kernel, as in `1,2`.

The report has one line of JSON per statement: its name, and its failures by rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from conformance_plan import HOROVOD, hosts_of, setting_of, statements_for
from mpi4py import MPI
from statements import LIMITS, failure_of

import collectives
from collectives import Communicator
from collectives.kernel import NATIVE


def connect(mechanism: str) -> Communicator:
    if mechanism == HOROVOD:
        return collectives.connect("horovod", collectives.Settings(limits=LIMITS))
    settings = collectives.Settings(mechanism=setting_of(mechanism), limits=LIMITS)
    hosts = hosts_of(mechanism, MPI.COMM_WORLD.size)
    return collectives.connect("mpi", settings, host=hosts[MPI.COMM_WORLD.rank] if hosts else "")


def main(mechanism: str, report: Path, tier: str, without_kernel: str) -> None:
    warnings.simplefilter("error")
    world = MPI.COMM_WORLD
    if str(world.rank) in without_kernel.split(","):
        os.environ[NATIVE] = "0"
    verdicts = world.Dup()
    communicator = connect(mechanism)
    assert communicator.mechanism == mechanism
    for statement in statements_for(world.size, mechanism, complete=tier == "complete"):
        failures = verdicts.allgather(failure_of(statement, communicator))
        if world.rank == 0:
            with report.open("a") as file:
                file.write(json.dumps([statement.name, failures]) + "\n")
        if any(failures):
            communicator.abandon()
            communicator = connect(mechanism)
    communicator.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
