"""The addresses that benchmarks give their workers are nobody else's, from then until the workers listen there."""

from __future__ import annotations

import socket
import sys

import pytest
from benchmark_runs import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import cluster  # noqa: E402


def test_an_address_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To two groups of a benchmark, and to benchmarks beside one another."""
    [address] = cluster.free_addresses(1)
    port = int(address.rpartition(":")[2])
    monkeypatch.setattr(cluster, "PORTS", range(port, port + 1))
    with pytest.raises(OSError, match=f"no 1 of the ports {port} to {port} of 127.0.0.1 are free"):
        cluster.free_addresses(1)


def test_a_server_can_listen_at_an_address_that_was_given() -> None:
    """As one of gRPC, which asks for addresses that others have used before it."""
    [address] = cluster.free_addresses(1)
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        socket.create_connection(server.getsockname()).close()
