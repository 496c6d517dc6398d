"""The choice of the network between the hosts of a job."""

from __future__ import annotations

import threading

import pytest

from poprun.errors import PopRunError, UsageError
from poprun.hosts.host_facts import Interface
from poprun.hosts.interfaces import HostNetwork, choose_network, read_interfaces, source_address
from poprun.hosts.this_machine import look_up

OURS = (
    Interface("lo", "127.0.0.1", 8),
    Interface("eth0", "10.77.0.10", 24),
    Interface("ib0", "10.99.0.10", 16),
    Interface("docker0", "172.17.0.1", 16),
    Interface("eth0", "fd77::10", 64),
)
ETHERNET = HostNetwork("10.77.0.0/24", "10.77.0.10", "eth0")
ROUTES = {
    "10.77.0.11": "10.77.0.10",
    "10.77.0.12": "10.77.0.10",
    "10.99.0.12": "10.99.0.10",
    "10.88.0.5": "10.77.0.10",
    "fd77::11": "fd77::10",
    "127.0.1.1": "127.0.0.1",
}


def choose(hosts, subnet=None, ours=OURS):
    return choose_network(ours, hosts, subnet, ROUTES.get)


def test_the_route_to_the_hosts_decides_the_network():
    assert choose({"h1": ["10.77.0.11"], "h2": ["10.77.0.12"]}) == ETHERNET


def test_the_first_address_of_a_host_decides_the_network():
    assert choose({"h1": ["10.77.0.11", "10.99.0.11"], "h2": ["10.77.0.12", "172.17.0.1"]}) == ETHERNET


@pytest.mark.parametrize(
    ("subnet", "network"),
    [
        ("ib0", HostNetwork("10.99.0.0/16", "10.99.0.10", "ib0")),
        ("10.99.0.0/16", HostNetwork("10.99.0.0/16", "10.99.0.10", "ib0")),
        ("10.77.0.0/24", ETHERNET),
        ("10.77.0.10/24", ETHERNET),
        ("eth0", ETHERNET),
        ("fd77::/64", HostNetwork("fd77::/64", "fd77::10", "eth0")),
    ],
)
def test_an_interface_or_an_address_mask_selects_the_network(subnet, network):
    assert choose({"h1": ["10.77.0.11", "10.99.0.11", "fd77::11"]}, subnet) == network


def test_ipv6_is_used_if_a_host_has_no_ipv4_address():
    assert choose({"h1": ["fd77::11"]}) == HostNetwork("fd77::/64", "fd77::10", "eth0")
    assert choose({"h1": ["fd77::11", "10.77.0.11"]}) == ETHERNET


def test_a_routed_network_is_widened_to_all_hosts():
    """Some clouds give every machine a network with one address."""
    alone = (Interface("ens4", "10.128.0.2", 32),)
    hosts = {"h1": ["10.128.0.3"], "h2": ["10.128.0.6"]}
    network = choose_network(alone, hosts, None, lambda _: "10.128.0.2")
    assert network == HostNetwork("10.128.0.0/29", "10.128.0.2", "ens4")
    assert choose_network(alone, hosts, "ens4") == network


def test_a_single_machine_uses_the_loopback_interface():
    assert choose({}) == HostNetwork("127.0.0.0/8", "127.0.0.1", "lo")


@pytest.mark.parametrize(
    ("hosts", "subnet", "error", "message"),
    [
        (
            {"h1": ["10.77.0.11"]},
            "eth9",
            UsageError,
            "no address mask or interface.*eth0 10.77.0.0/24",
        ),
        ({"h1": ["10.77.0.11"]}, "10.1.0.0/16", UsageError, "but this machine has no address there; it has eth0"),
        ({"h1": ["10.77.0.11"]}, "10.1.0.0/99", UsageError, "use a mask such as 10.77.0.0/24, or eth0"),
        ({"h1": []}, None, PopRunError, "host h1 has no address; check its spelling"),
        ({"h1": ["192.0.2.1"]}, None, PopRunError, r"no route to host h1 \(192.0.2.1\); this machine has eth0"),
        (
            {"h1": ["127.0.1.1"]},
            None,
            PopRunError,
            "this machine resolves host h1 to 127.0.1.1, which other machines cannot reach",
        ),
        (
            {"h1": ["10.77.0.11"], "h2": ["10.99.0.12"]},
            None,
            PopRunError,
            "over different networks: h1 from 10.77.0.10, h2 from 10.99.0.10; name one with --host-subnet",
        ),
        (
            {"h1": ["10.77.0.11"], "h2": ["fd77::11"]},
            None,
            PopRunError,
            "some hosts have only IPv4 addresses, others only IPv6: h1 10.77.0.11, h2 fd77::11",
        ),
    ],
)
def test_an_impossible_choice_is_refused_with_the_reason(hosts, subnet, error, message):
    with pytest.raises(error, match=message):
        choose(hosts, subnet)


def test_a_network_includes_its_addresses():
    assert ETHERNET.includes("10.77.0.200")
    assert not ETHERNET.includes("10.78.0.1")
    assert not ETHERNET.includes("fd77::1")
    assert ETHERNET.address_among(["172.17.0.1", "10.77.0.11"]) == "10.77.0.11"
    assert ETHERNET.address_among([]) == ""


def test_the_loopback_interface_and_its_route_are_found():
    loopback = [each for each in read_interfaces() if each.is_loopback]
    assert "127.0.0.1" in [each.address for each in loopback]
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_look_up_resolves_several_names():
    assert "127.0.0.1" in look_up(["localhost"], limit_s=60)["localhost"]
    assert look_up(["no.such.host.invalid"], limit_s=10) == {"no.such.host.invalid": ()}


def test_one_limit_holds_for_all_lookups(monkeypatch):
    """Each wait for a thread has a limit, and all waits together respect it."""
    answer = threading.Event()
    clock = FakeClock()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [answer.wait(60)][:0])
    monkeypatch.setattr("poprun.hosts.this_machine.time", clock)
    monkeypatch.setattr(threading.Thread, "join", lambda _, limit_s: clock.pass_by(limit_s))
    names = [f"h{index}" for index in range(60)]
    assert look_up(names, limit_s=0.5) == dict.fromkeys(names, ())
    assert clock.monotonic() == 0.5
    monkeypatch.undo()
    answer.set()


class FakeClock:
    """A clock that stands still unless somebody waits."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds
