"""One worker of a group that runs all statements: `grpc_conformance_job.py RANK REPORT TIER ADDRESS...`.

Each communicator meets at separate addresses, because a failed one may still be leaving.
"""

from __future__ import annotations

import json
import sys
import warnings
from itertools import count
from pathlib import Path

import numpy as np
from conformance_plan import GRPC, statements_for
from statements import LIMITS, failure_of

import collectives
from collectives import Communicator


def main(rank: int, report: Path, tier: str, addresses: list[str]) -> None:
    warnings.simplefilter("error")
    number = count()

    def connect() -> Communicator:
        attempt = next(number)
        settings = collectives.Settings(limits=LIMITS)
        return collectives.connect("grpc", settings, addresses=[f"{at}.{attempt}" for at in addresses], rank=rank)

    verdicts, communicator = connect(), connect()
    for statement in statements_for(len(addresses), GRPC, complete=tier == "complete"):
        failures = all_texts(verdicts, failure_of(statement, communicator))
        if rank == 0:
            with report.open("a") as file:
                file.write(json.dumps([statement.name, failures]) + "\n")
        if any(failures):
            communicator.abandon()
            communicator = connect()
    communicator.close()
    verdicts.close()


def all_texts(verdicts: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks by a second communicator, because statements may leave the first one in any
    state.
    """
    line = np.zeros(1 << 14, np.uint8)
    encoded = np.frombuffer(text.encode()[: line.size], np.uint8)
    line[: encoded.size] = encoded
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in verdicts.all_gather(line)]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
