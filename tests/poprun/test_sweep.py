"""The sweep of other hosts for daemons of one job, for any form of the host's name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from poprun.hosts.sweep import pattern_of, sweep


def daemon(nspace: str) -> str:
    """Return the command line of a daemon of PRRTE 3.0.14."""
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
def test_the_daemons_of_a_job_are_found_by_short_and_full_host_names(host: str, nspace: str) -> None:
    assert re.search(pattern_of(f"{host}-4711"), daemon(nspace))


@pytest.mark.parametrize(
    "nspace", ["prterun-n1-47110@0", "prterun-n1-711@0", "prterun-n12-4711@0", "prterun-n1xcluster-4711@0"]
)
def test_daemons_of_other_jobs_are_not_found(nspace: str) -> None:
    assert not re.search(pattern_of("n1.cluster-4711"), daemon(nspace))


def test_the_searching_shell_does_not_find_itself() -> None:
    for host in ("n1", "n1.cluster.example"):
        pattern = pattern_of(f"{host}-4711")
        assert not re.search(pattern, f"sh -c pgrep -f {pattern}")


LOCALLY = ["sh", "-c", 'case "$3" in *"\n"*) exit 1 ;; esac; eval "$3"', "sh"]
"""A replacement for ssh: it runs the command here; a C shell, a possible login shell, reads only one line."""


def test_only_the_jobs_daemon_is_killed_and_its_folder_removed(tmp_path: Path) -> None:
    """No other process may remove the folder or reap the daemon, as in a container without an init."""
    mpirun = os.getpid()  # no other job on this machine has that number
    nspaces = f"prterun-n1-{mpirun}@0", f"prterun-n2-{mpirun}@0"
    with ExitStack() as stack:
        ours, other = (stack.enter_context(started(daemon(each))) for each in nspaces)
        folders = [folder_of(process, tmp_path) for process in (ours, other)]
        sweep(["host"], [], LOCALLY, f"n1-{mpirun}", {**os.environ, "TMPDIR": str(tmp_path)})
        assert [folder.exists() for folder in folders] == [False, True]
        assert ours.wait() == -signal.SIGKILL
        assert other.poll() is None


@pytest.mark.skipif(not shutil.which("tcsh"), reason="needs tcsh")
def test_a_daemon_is_killed_through_a_c_shell(tmp_path: Path) -> None:
    by_tcsh = ["sh", "-c", 'exec tcsh -f -c "$3"', "sh"]
    with started(daemon(f"prterun-n1-{os.getpid()}@0")) as ours:
        folder = folder_of(ours, tmp_path)
        sweep(["host"], [], by_tcsh, f"n1-{os.getpid()}", {**os.environ, "TMPDIR": str(tmp_path)})
        assert not folder.exists()
        assert ours.wait() == -signal.SIGKILL


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv, for another user")
def test_the_folder_of_another_users_daemon_stays_because_the_daemon_lives() -> None:
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *LOCALLY]
    with TemporaryDirectory(dir="/tmp") as everybodys, started(daemon(f"prterun-n1-{os.getpid()}@0")) as theirs:
        os.chmod(everybodys, 0o777)
        folder = folder_of(theirs, Path(everybodys))
        sweep(["host"], [], as_nobody, f"n1-{os.getpid()}", {**os.environ, "TMPDIR": everybodys})
        assert theirs.poll() is None
        assert folder.exists()


def folder_of(process: subprocess.Popen[bytes], temporary: Path) -> Path:
    """Make the folder of a daemon, which everybody may remove."""
    folder = temporary / f"prted.{process.pid}"
    (folder / "0").mkdir(parents=True)
    (folder / "hwloc.sm").touch()
    for each in (folder, folder / "0"):
        each.chmod(0o777)
    return folder


@contextmanager
def started(words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with these words in its command line."""
    with subprocess.Popen(["sh", "-c", "read line", *words.split()], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
