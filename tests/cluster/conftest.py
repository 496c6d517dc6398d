"""Hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from beds import Bed, open_bed


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Provide four hosts, h0 to h3, for the whole session; skip if they cannot be made."""
    with open_bed(tmp_path_factory.mktemp("bed")) as hosts:
        yield hosts


@pytest.fixture
def hosts(bed: Bed) -> Iterator[Bed]:
    """Provide the four hosts; changes of links are undone after each test."""
    yield bed
    bed.restore()


@pytest.fixture(scope="session")
def slurm_conf(bed: Bed) -> str:
    """Start a Slurm on the four hosts, and provide the value of SLURM_CONF for its clients inside a host."""
    return bed.start_slurm()
