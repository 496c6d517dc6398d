"""Hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from beds import Bed, open_bed


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Four hosts, h0 to h3, that are there for the whole session; skips where they cannot be made."""
    with open_bed(tmp_path_factory.mktemp("bed")) as hosts:
        yield hosts


@pytest.fixture
def hosts(bed: Bed) -> Iterator[Bed]:
    """The four hosts; what a test does to their links is undone after it."""
    yield bed
    bed.restore()


@pytest.fixture(scope="session")
def slurm_conf(bed: Bed) -> str:
    """A Slurm on the four hosts; the value of SLURM_CONF for its clients, to be run inside a host."""
    return bed.start_slurm()
