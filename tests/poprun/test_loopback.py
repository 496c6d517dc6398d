"""Variables and sockets that keep a job on one host off the network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from poprun.ipc.sockets import keep_to_loopback
from poprun.launch.transports import loopback_variables, transport_variables

LISTENS = """
import socket, sys
v4, v6, udp = socket.socket(), socket.socket(socket.AF_INET6), socket.socket(type=socket.SOCK_DGRAM)
idle = socket.socket()
for each in (v4, v6, udp, idle):
    each.bind(("", 0))
v4.listen(), v6.listen()
print(flush=True)
sys.stdin.readline()
print([each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for each in (v4, v6, udp, idle)])
"""


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (loopback_variables, ("btl", "btl_tcp_if_include", "btl_tcp_if_exclude")),
        (transport_variables, ("pml", "mtl", "btl")),
    ],
)
def test_transports_and_networks_named_by_the_user_are_kept(variables, names):
    for name in names:
        assert variables(["--mca", name, "x"], {}) == {}
        assert variables(["-x", f"OMPI_MCA_{name}=x"], {}) == {}
        assert variables([], {f"OMPI_MCA_{name}": "x"}) == {}


OTHERS = ["--mca", "osc", "^ucx"], {"OMPI_MCA_osc": "sm"}


def test_tcp_is_limited_to_the_loopback_interface_by_default():
    assert loopback_variables(*OTHERS) == {"OMPI_MCA_btl_tcp_if_include": "lo"}


def test_no_fabric_is_used_within_a_host_by_default():
    assert transport_variables(*OTHERS) == {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct"}


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_listening_sockets_of_a_child_are_bound_to_the_loopback_interface():
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "\n"
        keep_to_loopback(child.pid)
        said, _ = child.communicate("\n", timeout=60)
    if said.count("lo") == 0 and not may_take_descriptors():
        pytest.skip("the kernel does not let us")
    assert eval(said) == [b"lo\0", b"lo\0", b"", b""]


def test_an_ended_process_is_ignored():
    with subprocess.Popen(["true"]) as child:
        child.wait(60)
        keep_to_loopback(child.pid)


def may_take_descriptors() -> bool:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    tracing = subprocess.run(
        ["cat", "/proc/self/status"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return release >= (5, 7) and "Seccomp:\t0" in tracing
