"""The bytes that the links of hosts carry for an all-reduce, by the kernel's counters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from beds import Bed, open_bed
from looping import run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(170),
]

PROGRAM = str(Path(__file__).with_name("link_bytes_job.py"))
MEBIBYTE = 1 << 18  # in elements
SEGMENT_BYTES = 1514


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with open_bed(tmp_path_factory.mktemp("eight"), 8) as hosts:
        yield hosts


def assert_carries_what_is_least(bed: Bed, hosts: int, instances: int, mechanism: str, elements: int) -> None:
    """Assert that a link carries 2 (h - 1) / h of the array each way, and at most 3 % for headers and barriers.

    Segments that TCP resends, because a busy machine answers late, are allowed on top.
    """
    done = run(bed, bed.names[:hosts], instances, sys.executable, PROGRAM, str(elements))
    assert done.returncode == 0, done.stderr
    lines = (line.rpartition("<stdout>:")[2] for line in done.stdout.splitlines())
    found = [json.loads(line) for line in lines if line.startswith("[")]
    assert [each[3:] for each in found] == [[mechanism, True]] * instances
    least = 2 * (hosts - 1) / hosts * 4 * elements
    busiest = max(max(sent, received) for sent, received, *_ in found)
    segments = sum(again for _, _, again, *_ in found)
    assert least <= busiest <= 1.03 * least + segments * SEGMENT_BYTES, (busiest / least, segments)


@pytest.mark.parametrize(("hosts", "elements"), [(3, 16 * MEBIBYTE), (4, MEBIBYTE), (8, 16 * MEBIBYTE)])
def test_the_busiest_link_carries_the_minimum(eight: Bed, hosts: int, elements: int) -> None:
    assert_carries_what_is_least(eight, hosts, hosts, "ring", elements)


@pytest.mark.parametrize(("hosts", "instances", "elements"), [(2, 4, 16 * MEBIBYTE), (4, 8, MEBIBYTE)])
def test_several_instances_per_host_do_not_increase_the_bytes_on_the_link(
    eight: Bed, hosts: int, instances: int, elements: int
) -> None:
    assert_carries_what_is_least(eight, hosts, instances, "window and ring", elements)
