"""One rank of an MPI job that runs all statements: `conformance_job.py MECHANISM REPORT`.

The report has one line of JSON per statement: its name, and what failed on which rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from mpi4py import MPI
from statements import failure_of
from test_conformance import LIMITS, statements_for

import collectives


def main(mechanism: str, report: Path) -> None:
    warnings.simplefilter("error")
    settings = collectives.Settings(mechanism=mechanism, limits=LIMITS)
    world = MPI.COMM_WORLD
    verdicts = world.Dup()
    communicator = collectives.connect("mpi", settings)
    assert communicator.mechanism == mechanism
    for statement in statements_for(world.size):
        failures = verdicts.allgather(failure_of(statement, communicator))
        if world.rank == 0:
            with report.open("a") as file:
                file.write(json.dumps([statement.name, failures]) + "\n")
        if any(failures):
            communicator.abandon()
            communicator = collectives.connect("mpi", settings)
    communicator.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
