"""Python programs of several workers that know each other's addresses."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpi_jobs import HERE, LIMIT_S, ROOT


@contextlib.contextmanager
def socket_addresses(workers: int) -> Iterator[list[str]]:
    """Provide addresses of Unix-domain sockets in a separate directory."""
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        yield [f"unix:{folder}/{rank}" for rank in range(workers)]


def environ_with(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment for programs that import the project and the modules beside the tests."""
    paths = [str(ROOT), str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(changes or {})}


def start_worker(
    program: Path, arguments: Sequence[str], changes: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start one worker in a separate process group."""
    return subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env=environ_with(changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended_afterwards(workers: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Kill all remaining workers at the end of the block."""
    try:
        yield
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()


def end_of(workers: Sequence[subprocess.Popen[str]], limit_s: float = LIMIT_S) -> list[tuple[int, str, str]]:
    """Wait for all workers, and return the exit status and the output of each."""
    give_up = time.monotonic() + limit_s
    ends = []
    with ended_afterwards(workers):
        for worker in workers:
            out, err = worker.communicate(timeout=max(0.1, give_up - time.monotonic()))
            ends.append((worker.returncode, out, err))
    return ends
