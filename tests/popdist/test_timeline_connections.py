"""The kernel's statistics of connections: bytes sent, by the addresses of both ends."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

import pytest

from popdist.timeline.gauges import BUSY, ROUND_TRIP, SENT, Addresses, ends_in, read_connections, summed

HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def connected():
    with socket.create_server((THERE, 0)) as server:
        near = socket.create_connection(server.getsockname(), source_address=(HERE, 0))
        far, _ = server.accept()
        with near, far:
            yield near, far


def sent_by(near, far, nbytes):
    """Return when all bytes have arrived and the sender knows that."""
    near.sendall(bytes(nbytes))
    while nbytes:
        nbytes -= len(far.recv(nbytes))
    far.sendall(b"!")
    near.recv(1)


@pytest.mark.parametrize("nbytes", [1, 1000, 100_003])
def test_the_counter_equals_the_bytes_sent(connected, nbytes):
    name = Addresses(HERE, THERE).named(SENT)
    before = read_connections()[name]
    sent_by(*connected, nbytes)
    assert read_connections()[name] - before == pytest.approx(nbytes, abs=1)  # the kernel counts the handshake, too


def test_both_directions_are_counted_with_their_times(connected):
    sent_by(*connected, 1000)
    found = read_connections()
    for ends in (Addresses(HERE, THERE), Addresses(THERE, HERE)):
        assert found[ends.named(SENT)] >= 1
        assert found[ends.named(BUSY)] >= 0
        assert ends.named(ROUND_TRIP) in found


def test_connections_between_the_same_addresses_are_added_up(connected):
    sent_by(*connected, 1000)
    name = Addresses(HERE, THERE).named(SENT)
    alone = read_connections()[name]
    with socket.create_server((THERE, 0)) as server:
        near = socket.create_connection(server.getsockname(), source_address=(HERE, 0))
        far, _ = server.accept()
        with near, far:
            sent_by(near, far, 500)
            assert read_connections()[name] - alone == pytest.approx(500, abs=1)


def info_of(sent, round_trip_us, busy_us, full_us):
    """Return the kernel's record of a connection (linux/tcp.h, struct tcp_info)."""
    info = bytearray(256)
    struct.pack_into("<Q", info, 120, sent)
    struct.pack_into("<I", info, 148, round_trip_us)
    struct.pack_into("<QQ", info, 168, busy_us, full_us)
    return bytes(info)


def test_several_connections_give_sums_and_the_shortest_round_trip():
    ends = Addresses(HERE, THERE)
    names = ends.named(SENT), ends.named(BUSY), ends.named(ROUND_TRIP)
    found = summed(
        [(names, info_of(1000, 300, 5_000_000, 1_000_000)), (names, info_of(500, 200, 2_000_000, 2_000_000))]
    )
    assert found == {names[0]: 1500, names[1]: 4.0, names[2]: 200e-6}


WITH_OTHERS = """
import os, socket
from popdist.timeline.gauges import read_connections

server = socket.create_server(("127.0.0.1", 0))
client, datagrams = socket.create_connection(server.getsockname()), socket.socket(type=socket.SOCK_DGRAM)
pair = socket.socketpair()
before = os.listdir("/proc/self/fd")
print(read_connections(), os.listdir("/proc/self/fd") == before)
"""


def test_other_sockets_are_not_counted_and_no_descriptor_is_left_open():
    """Connections within one address, servers, datagrams, pipes and pairs; the process opens no other files."""
    command = [sys.executable, "-Wignore::ResourceWarning", "-c", WITH_OTHERS]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout == "{} True\n"


def test_connections_stay_blocking_if_new_sockets_get_a_timeout(connected):
    """A Python socket made from a descriptor would make the connection non-blocking."""
    socket.setdefaulttimeout(5)
    try:
        assert Addresses(HERE, THERE).named(SENT) in read_connections()
    finally:
        socket.setdefaulttimeout(None)
    assert all(os.get_blocking(each.fileno()) for each in connected)


def test_ipv4_addresses_have_one_spelling():
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((f"::ffff:{THERE}", 0))
        server.listen()
        with socket.create_connection((THERE, server.getsockname()[1]), source_address=(HERE, 0)):
            far, _ = server.accept()
            with far:
                assert Addresses(THERE, HERE).named(SENT) in read_connections()


@pytest.mark.parametrize("ends", [Addresses(HERE, THERE), Addresses("fe80::1", "fd00::2")])
def test_addresses_are_read_back_from_the_name(ends):
    assert ends_in(ends.named(SENT), SENT) == ends
    assert ends_in(ends.named(SENT), BUSY) is None
    assert ends_in("memory", SENT) is None
