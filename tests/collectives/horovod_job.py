"""One rank of a job over Horovod that is observed, disturbed or ended: `horovod_job.py TASK`."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives import BrokenError, CollectiveError, Communicator

TENSORS = 40
LAST = "last tensor"
ABRUPT_ENDS = ("kill", "raise", "exit", "shut down")


def reduce_alone_and_in_a_group(communicator: Communicator) -> None:
    """Reduce tensors alone and in a group, for Horovod's timeline."""
    arrays = [np.ones(2000 + number, np.float32) for number in range(TENSORS)]
    for number, array in enumerate(arrays):
        communicator.ordered_all_reduce([array], name=f"single:{number}")
    names = [f"grouped:{number}" for number in range(TENSORS)]
    communicator.grouped_ordered_all_reduce([[array] for array in arrays], arrays, names=names)
    communicator.all_reduce(arrays[0], name=LAST)
    await_record(communicator)
    communicator.close()


def await_record(communicator: Communicator) -> None:
    """Return when Horovod's thread has written all events up to LAST; events not yet written at its end would be
    lost.
    """
    path = Path(os.environ["HOROVOD_TIMELINE"])
    is_written = np.zeros(1, bool)
    while not is_written[0]:  # Horovod flushes the file on later writes, at most once a second
        if communicator.rank == 0:
            is_written[0] = LAST in path.read_text()
        communicator.broadcast(is_written)


def end_while_others_reduce(communicator: Communicator, how: str) -> None:
    """End the last rank without notice, and print the errors of the others."""
    communicator.barrier(name="begin")
    if communicator.rank == communicator.size - 1:
        end(how)
    try:
        communicator.all_reduce(np.ones(70_001), name="weights")
    except CollectiveError as error:
        print(f"rank {communicator.rank}: {type(error).__name__}: {error}", flush=True)
        with pytest.raises(BrokenError, match="all_reduce 'weights'.* failed before"):
            communicator.barrier()
        raise


def end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("out of data")
    if how == "shut down":
        from horovod import torch as hvd

        hvd.shutdown()
    sys.exit(0)


def main(task: str) -> None:
    warnings.simplefilter("error")
    communicator = collectives.connect("horovod")
    if task in ABRUPT_ENDS:
        end_while_others_reduce(communicator, task)
    else:
        reduce_alone_and_in_a_group(communicator)


if __name__ == "__main__":
    main(sys.argv[1])
