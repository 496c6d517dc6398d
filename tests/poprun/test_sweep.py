"""Which processes on other hosts are swept: the daemons of one job, whatever the host's name looks like."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from poprun.hosts.sweep import pattern_of, sweep


def daemon(nspace: str) -> str:
    """The command line of a daemon of PRRTE 3.0.14."""
    return (
        f'/opt/bin/prted --daemonize --prtemca ess_base_nspace "{nspace}" --prtemca ess_base_vpid 1 '
        f'--prtemca prte_hnp_uri "{nspace}.0;tcp://10.77.0.10:40001:24"'
    )


@pytest.mark.parametrize(
    ("host", "nspace"),
    [
        ("n1", "prterun-n1-4711@0"),
        ("n1.cluster.example", "prterun-n1-4711@0"),
        ("n1.cluster.example", "prterun-n1.cluster.example-4711@0"),
        ("gpu-rack-3.east", "prterun-gpu-rack-3-4711@0"),
    ],
)
def test_the_daemons_of_a_job_are_found_by_the_short_and_by_the_full_name(host: str, nspace: str) -> None:
    assert re.search(pattern_of(f"{host}-4711"), daemon(nspace))


@pytest.mark.parametrize(
    "nspace", ["prterun-n1-47110@0", "prterun-n1-711@0", "prterun-n12-4711@0", "prterun-n1xcluster-4711@0"]
)
def test_those_of_other_jobs_are_not(nspace: str) -> None:
    assert not re.search(pattern_of("n1.cluster-4711"), daemon(nspace))


def test_the_shell_that_looks_for_them_is_none() -> None:
    for host in ("n1", "n1.cluster.example"):
        pattern = pattern_of(f"{host}-4711")
        assert not re.search(pattern, f"sh -c pgrep -f {pattern}")


LOCALLY = ["sh", "-c", 'eval "$3"', "sh"]
"""In place of ssh: what is to be run on a host, here."""


def test_a_daemon_is_killed_and_its_folder_removed_and_those_of_other_jobs_stay(tmp_path: Path) -> None:
    """Nobody else may be left on its host who would."""
    mpirun = os.getpid()  # no other job on this machine has that number
    nspaces = f"prterun-n1-{mpirun}@0", f"prterun-n2-{mpirun}@0"
    with ExitStack() as stack:
        ours, other = (stack.enter_context(started(daemon(each))) for each in nspaces)
        folders = [tmp_path / f"prted.{process.pid}" for process in (ours, other)]
        for folder in folders:
            (folder / "0").mkdir(parents=True)
            (folder / "hwloc.sm").touch()
        sweep(["host"], [], LOCALLY, f"n1-{mpirun}", {**os.environ, "TMPDIR": str(tmp_path)})
        assert ours.wait() == -signal.SIGKILL
        assert other.poll() is None
        assert [folder.exists() for folder in folders] == [False, True]


@contextmanager
def started(words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with these words in its command line; it is reaped as soon as it has ended."""
    process = subprocess.Popen(["sh", "-c", "read line", *words.split()], stdin=subprocess.PIPE)
    reaping = threading.Thread(target=process.wait)
    reaping.start()
    try:
        yield process
    finally:
        process.kill()
        reaping.join()
        assert process.stdin is not None
        process.stdin.close()
