"""Tests specific to Horovod beyond `conformance_horovod`: its timeline, its environment, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from horovod_installed import needs_horovod
from horovod_job import ABRUPT_ENDS, TENSORS
from mpi_jobs import HERE, ROOT, mpirun_command

LIMIT_S = 150.0
DYING_S = 20.0
MARKER = "HOROVOD_TEST_MARKER"

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture
def environ() -> dict[str, str]:
    """Provide the environment of a job without settings for Horovod and MPI."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_MCA_"))}
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), MARKER: uuid.uuid4().hex}


def end_of(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; no process that it has started outlives it or the limit."""
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        wait_until_gone(living(environ[MARKER]))
        assert living(environ[MARKER]) == []
        return ended
    finally:
        for process in living(environ[MARKER]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 9)


def wait_until_gone(processes: list[int]) -> None:
    """Wait until processes that mpirun has just killed are gone."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(process)
            select.select([handle], [], [], DYING_S)
            os.close(handle)


def living(marker: str) -> list[int]:
    """Return the processes whose environment carries the marker."""
    sought = f"{MARKER}={marker}".encode()
    return [int(at.name) for at in Path("/proc").glob("[0-9]*") if sought in environ_of(at)]


def environ_of(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it is gone
        return []


def job(ranks: int, task: str) -> list[str]:
    return mpirun_command(ranks, HERE / "horovod_job.py", task)


# ---- Horovod's timeline


class Timeline:
    """The timeline of Horovod's coordinator (https://horovod.readthedocs.io/en/stable/timeline_include.html)."""

    def __init__(self, path: Path) -> None:
        self.events = json.loads(path.read_text())
        names = [event for event in self.events if event.get("name") == "process_name"]
        self.tensors = {event["pid"]: event["args"].get("name", "") for event in names}

    def beginnings(self, word: str) -> list[str]:
        """Return the names of events that begin for tensors with this word in their name, in order."""
        chosen = {pid for pid, name in self.tensors.items() if word in name}
        return [event["name"] for event in self.events if event["ph"] == "B" and event["pid"] in chosen]


def negotiations(beginnings: list[str]) -> int:
    """Return the number of negotiations that follow a data transfer or come first."""
    steps = [name for name in beginnings if name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")]
    pairs = zip(["ALLREDUCE", *steps], steps, strict=False)
    return sum(pair == ("ALLREDUCE", "NEGOTIATE_ALLREDUCE") for pair in pairs)


@pytest.mark.job
@pytest.mark.cores(2)
@needs_horovod
@pytest.mark.complete
def test_many_gradients_cost_one_negotiation_and_their_names_are_in_the_timeline(
    environ: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    ended = end_of(job(2, "record"), environ | {"HOROVOD_TIMELINE": str(path)})
    assert ended.returncode == 0, ended.stderr
    timeline = Timeline(path)
    singles, grouped = timeline.beginnings("single:"), timeline.beginnings("grouped:")
    assert singles.count("NEGOTIATE_ALLREDUCE") == grouped.count("NEGOTIATE_ALLREDUCE") == TENSORS
    assert negotiations(singles) == TENSORS
    assert negotiations(grouped) == 1
    for number in range(TENSORS):
        assert any(f"all_reduce 'single:{number}'" in name for name in timeline.tensors.values()), number
        assert any(re.search(rf"\bgrouped:{number}\b", name) for name in timeline.tensors.values()), number


# ---- ranks that end


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
@needs_horovod
@pytest.mark.parametrize("how", ABRUPT_ENDS)
def test_the_end_of_a_rank_ends_the_job_while_others_reduce(environ: dict[str, str], how: str) -> None:
    """The timeout of ten minutes is not reached; mpirun may end the others before they can print their errors."""
    ended = end_of(job(2, how), environ)
    assert ended.returncode != 0
    said = [line for line in ended.stdout.splitlines() if line.startswith("rank ")]
    expected = (
        r"rank (\d): PeerLostError: rank \1 on .* cannot go on with all_reduce 'weights': Horovod says: .*shut down"
    )
    assert all(re.match(expected, line) for line in said), said
    if how in ("exit", "shut down"):
        assert said


# ---- forked children

CHILD_THAT_STARTS = """\
import os, sys
import numpy as np
import collectives.backends.horovod
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
communicator = collectives.connect("horovod")
communicator.all_reduce(np.ones(2))
communicator.close()
"""


@pytest.mark.complete
@pytest.mark.job
@needs_horovod
def test_a_child_may_start_horovod_if_its_parent_has_not(environ: dict[str, str]) -> None:
    ended = end_of([sys.executable, "-c", CHILD_THAT_STARTS], environ)
    assert ended.returncode == 0, ended.stderr


# ---- the environment

CONNECT_AND_TELL = """\
import json, os
import collectives
collectives.connect("horovod").close()
print(json.dumps(dict(os.environ)))
"""
DEFAULTS = {
    "HOROVOD_CYCLE_TIME": "0.2",
    "HOROVOD_FUSION_THRESHOLD": "1048576",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
OWN = {"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_FUSION_THRESHOLD": "0", "OMPI_MCA_mpi_yield_when_idle": "0"}


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
@needs_horovod
@pytest.mark.parametrize(
    ("given", "used"), [({}, DEFAULTS), pytest.param(OWN, OWN, marks=pytest.mark.complete)], ids=["not set", "set"]
)
def test_horovod_and_mpi_are_set_to_be_quick_and_to_yield_unless_the_user_sets_them(
    environ: dict[str, str], given: dict[str, str], used: dict[str, str]
) -> None:
    ended = end_of([sys.executable, "-c", CONNECT_AND_TELL], environ | given)
    assert ended.returncode == 0, ended.stderr
    after = json.loads(ended.stdout.splitlines()[-1])
    assert {name: after[name] for name in used} == used


# ---- without Horovod

CONNECT_WITHOUT = """\
import sys
import collectives
for module in sys.argv[1:]:
    sys.modules[module] = None
    try:
        collectives.connect("horovod")
    except collectives.MissingBackendError as error:
        assert isinstance(error, ImportError)
        print(error)
    del sys.modules[module]
"""


@pytest.mark.complete
def test_a_missing_library_names_the_script_that_installs_it(environ: dict[str, str]) -> None:
    missing = ("torch", "horovod")
    ended = end_of([sys.executable, "-W", "error", "-c", CONNECT_WITHOUT, *missing], environ)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert len(said) == len(missing)
    for line in said:
        assert line.startswith("the horovod backend needs Horovod and torch (")
        assert line.endswith("build and install them with: sh launch_scripts/install_horovod.sh")
