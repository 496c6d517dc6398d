"""Program whose instances end one after another while one of them is killed.

usage: ending_apart.py waiting|chief|at-work FOLDER

Instance 0 is killed only after all others have passed the barrier; each of them then puts a file into the folder.

waiting: instance 1 is killed while it waits at its end for instance 0.
chief:   instance 0 is killed while the others wait at their end.
at-work: instance 0 is killed while instance 1 waits at its end and instance 2 in a collective.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import collectives
import popdist
from popdist import context

POLL_S = 0.01


def main(case: str, folder: Path) -> None:
    popdist.init()
    popdist.synchronize()
    instance, others = popdist.getInstanceIndex(), popdist.getNumInstances() - 1
    if instance:
        (folder / str(instance)).touch()
    else:
        until(lambda: len(list(folder.iterdir())) == others)
    CASES[case](instance)


def killed_waiting(instance: int) -> None:
    if instance == 1:
        threading.Thread(target=die_at_the_end, daemon=True).start()
    elif instance == 0:
        until(lambda: popdist.progress().is_released)
        print("the result", flush=True)
        popdist.finalizeBackend()
        print("chief" if popdist.is_chief() else "another one", flush=True)


def killed_before_its_end(instance: int) -> None:
    if instance == 0:
        die()


def killed_while_one_works(instance: int) -> None:
    if instance == 0:
        die()
    if instance == 2:
        try:
            popdist.communicator().all_reduce(np.ones(1))
        except collectives.PeerLostError:
            now = popdist.carry_on()
            total = popdist.communicator().all_reduce(np.ones(1))
            print(f"instance {now.index} of {now.count}, chief: {popdist.is_chief()}, sum {total[0]:g}", flush=True)


CASES = {
    "waiting": killed_waiting,
    "chief": killed_before_its_end,
    "at-work": killed_while_one_works,
}


def die_at_the_end() -> None:
    """Kill this process once it waits for the others to end; the exact moment makes no difference."""
    joined = popdist.communicator()
    until(lambda: not context.isBackendInitialized() or joined.calls_made > 1)
    die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until(is_so) -> None:
    while not is_so():
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
