"""Forks of a process, as `multiprocessing` makes them to load data; `conformance_forks` has the communicators."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from conformance_forks import end_of_child
from grpc_jobs import environ_with, socket_addresses
from grpc_threads import WorkerThreads

from collectives import Communicator
from collectives.calls import Call
from collectives.shared_memory.segment import create_segment, open_segment
from popdist.records.progress import PAGE_BYTES, ProgressPage, new_page

CHILDREN = 8


def test_a_child_forked_while_workers_communicate_survives() -> None:
    def talk(communicator: Communicator) -> None:
        while not communicator.all_reduce(np.full(1, has_ended[0]), "max")[0]:
            pass
        communicator.close()

    has_ended = [0]
    with socket_addresses(2) as addresses, ThreadPoolExecutor(2) as pool:
        workers = WorkerThreads(addresses)
        ranks = [workers.join(rank) for rank in range(2)]
        talking = [pool.submit(talk, rank.result()) for rank in ranks]
        ends = [end_of_child(wait_for_a_child_of_its_own) for _ in range(CHILDREN)]
        has_ended[0] = 1
        for each in talking:
            each.result()
    assert ends == [0] * CHILDREN


def wait_for_a_child_of_its_own() -> None:
    own = os.fork()
    if own == 0:
        os._exit(0)
    assert os.waitpid(own, 0)[1] == 0


ENDS_BY_ITSELF = """
import sys, os
from collectives import forks
forks.at_exit(lambda: print("exit of", os.getpid(), flush=True))
inherited = lambda: print("must not run", flush=True)
forks.at_exit(inherited)
forks.not_at_exit(inherited)
print("parent", os.getpid(), flush=True)
if os.fork() == 0:
    forks.at_exit(lambda: print("child", forks.generation, flush=True))
    sys.exit(3)
assert os.wait()[1] >> 8 == 3
"""


def test_a_child_runs_only_its_own_exit_handlers() -> None:
    said = subprocess.run(
        [sys.executable, "-c", ENDS_BY_ITSELF], env=environ_with(), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[1:] == ["child 1", said[0].replace("parent", "exit of")]


def test_a_segment_is_copied_for_a_child(tmp_path: Path) -> None:
    def write() -> None:
        assert bytes(segment[:2]) == b"ab"
        memory[:] = 7
        assert bytes(segment[:2]) == b"\x07\x07"

    segment, path = create_segment(10_000, tmp_path)
    memory = np.frombuffer(segment, np.uint8)
    memory[:2] = np.frombuffer(b"ab", np.uint8)
    assert end_of_child(write) == 0
    assert bytes(open_segment(path, 10_000)[:3]) == b"ab\0"


def test_a_child_does_not_write_into_the_progress_page() -> None:
    descriptor = os.memfd_create("page")
    os.write(descriptor, new_page())
    page = ProgressPage(descriptor)
    page.step_begins(5)
    before = os.pread(descriptor, PAGE_BYTES, 0)

    def act() -> None:
        page.step_begins(6)
        page.operation_begins(7, Call("barrier"))
        page.finished()
        assert not page.is_released

    assert end_of_child(act) == 0
    assert os.pread(descriptor, PAGE_BYTES, 0) == before
    page.step_begins(6)
    assert os.pread(descriptor, PAGE_BYTES, 0) != before
    os.close(descriptor)
