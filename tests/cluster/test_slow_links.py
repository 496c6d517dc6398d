"""Reports about real traffic: a host behind a narrow link, and equal links."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from beds import Bed, open_bed
from looping import run
from sharing_cores import ALL

from poprun.trace.merging import to_be_judged
from poprun.trace.recordings import read_recordings
from poprun.trace.report.text import findings
from poprun.trace.report.verdict import TimelineReport, judge

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.complete,
    pytest.mark.cores(ALL),
    pytest.mark.timeout(170),
]

PROGRAM = """
import sys
import numpy as np
import popdist

popdist.init()
communicator = popdist.context.communicator()
instruments = communicator.instruments
gradients = np.ones(1 << 19, np.float32)
for step in range(12):
    instruments.step_begins(step)
    with instruments.during["forward and backward"]:
        sum(range(int(sys.argv[1])))
    with instruments.during["exchange"]:
        communicator.all_reduce(gradients, "sum", name="gradients")
    instruments.step_ends(1, 0.5)
"""
LITTLE, MUCH = "1000", "10000000"
"""The amounts of computation in a step: almost nothing, and some tenths of a second."""

Start = Callable[..., None]


@pytest.fixture(scope="module")
def beds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with open_bed(tmp_path_factory.mktemp("links"), 4) as hosts:
        yield hosts


def under_poprun(bed: Bed, places: Sequence[str], recordings: Path, *command: str) -> None:
    hosts = list(dict.fromkeys(places))
    done = run(bed, hosts, len(places), *command, POPDIST_TIMELINE=str(recordings))
    assert done.returncode == 0, done.stderr


def over_grpc(bed: Bed, places: Sequence[str], recordings: Path, *command: str) -> None:
    addresses = [f"{host}:{7000 + index}" for index, host in enumerate(places)]
    workers = []
    for index, host in enumerate(places):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environ = {"TF_CONFIG": json.dumps(task), "POPDIST_GRPC_INSECURE": "1", "POPDIST_TIMELINE": str(recordings)}
        workers.append(bed.start(host, *command, environ=environ))
    for worker in workers:
        _, said = worker.communicate(timeout=150)
        assert worker.returncode == 0, said


def verdict_of(
    bed: Bed, hosts: int, computes: str, folder: str, start: Start = under_poprun, on_each: int = 1
) -> TimelineReport:
    """Return the report about a job with the same number of instances on each of the first hosts."""
    recordings = bed.shared / f"{folder}-{start.__name__}-{hosts}x{on_each}"
    places = [host for host in bed.names[:hosts] for _ in range(on_each)]
    start(bed, places, recordings, sys.executable, "-c", PROGRAM, computes)
    return judge(to_be_judged(read_recordings(recordings)))


@pytest.fixture
def hosts(beds: Bed) -> Iterator[Bed]:
    yield beds
    beds.restore()


@pytest.mark.parametrize(
    ("start", "count", "on_each"),
    [(under_poprun, 4, 1), (over_grpc, 3, 2)],
)
def test_a_host_behind_a_narrow_link_is_named_with_its_rate(hosts: Bed, start: Start, count: int, on_each: int) -> None:
    hosts.link("all", "rate=1000mbit")
    hosts.link("h1", "rate=50mbit")
    verdict = verdict_of(hosts, count, LITTLE, "narrow", start, on_each)
    traffic = verdict.traffic
    assert traffic is not None
    assert traffic.host == "h1"
    assert len(traffic.links) == 2 * (count - 1)
    megabits = [8e-6 * each.rate for each in traffic.links]
    assert max(megabits) <= 55
    assert traffic.usual is not None
    assert traffic.usual > 3 * max(each.rate for each in traffic.links)
    assert any(each.startswith("The links of h1 to other hosts are slow") for each in findings(verdict))


def test_the_only_link_is_called_busy_and_not_slow(hosts: Bed) -> None:
    """Between two hosts both directions are equally narrow."""
    hosts.link("h1", "rate=50mbit")
    verdict = verdict_of(hosts, 2, LITTLE, "narrow")
    traffic = verdict.traffic
    assert traffic is not None
    assert traffic.usual is None
    assert 8e-6 * traffic.links[0].rate <= 55
    assert any("the numbers do not show whether that is slow" in each for each in findings(verdict))


def test_no_link_of_a_healthy_job_is_named(hosts: Bed) -> None:
    verdict = verdict_of(hosts, 4, MUCH, "healthy")
    assert verdict.traffic is None
    assert verdict.link is None
