"""The choice of the network that connects the hosts of a job, made once, for daemons and data alike."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from poprun.errors import PopRunError, UsageError
from poprun.hosts.host_facts import Interface
from poprun.hosts.survey_script import interfaces

_Net = IPv4Network | IPv6Network
_FAMILIES = (4, 6)  # IPv4 first, because Open MPI supports it better
_ANY_PORT = 9  # connecting a UDP socket sends nothing


@dataclass(frozen=True)
class HostNetwork:
    """The network that connects all hosts of a job.

    Attributes:
        cidr: The network, such as `10.77.0.0/24`, with an address of every host. Open MPI's `if_include` takes it.
        address: This machine's address in the network.
        interface: Name of this machine's interface in the network.
    """

    cidr: str
    address: str
    interface: str

    def includes(self, address: str) -> bool:
        """Return whether an address belongs to the network."""
        return ip_address(address) in ip_network(self.cidr)

    def address_among(self, addresses: Sequence[str]) -> str:
        """Return the first address that belongs to the network; empty if none does."""
        return next(filter(self.includes, addresses), "")


def read_interfaces() -> tuple[Interface, ...]:
    """Return the addresses of this machine."""
    return tuple(Interface(*each) for each in interfaces())


def source_address(destination: str) -> str | None:
    """Return the address from which this machine sends to another; None without a route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((destination, _ANY_PORT))
        return str(asked.getsockname()[0])
    return None


def choose_network(
    ours: Sequence[Interface],
    hosts: Mapping[str, Sequence[str]],
    host_subnet: str | None = None,
    route: Callable[[str], str | None] = source_address,
) -> HostNetwork:
    """Choose the network that connects the hosts.

    Args:
        ours: The addresses of this machine.
        hosts: The addresses of each other host, beginning with the one by which the host is known.
        host_subnet: The user's choice: the name of an interface, or an address mask. None: follow the routes.
        route: Function that returns the address from which this machine sends packets to another address.

    Raises:
        UsageError: This machine has no interface or network `host_subnet`.
        PopRunError: No network, or more than one, leads to the hosts.
    """
    if host_subnet:
        return _named_network(ours, hosts, host_subnet)
    if not hosts:
        return HostNetwork("127.0.0.0/8", "127.0.0.1", "lo")
    targets = _targets(hosts)
    sources = {host: route(address) for host, address in targets.items()}
    for host, source in sources.items():
        if source is None:
            raise PopRunError(
                f"no route to host {host} ({targets[host]}); this machine has {_list(ours)}; "
                "check the network, or name one with --host-subnet"
            )
        if ip_address(targets[host]).is_loopback:
            raise PopRunError(
                f"this machine resolves host {host} to {targets[host]}, which other machines cannot reach; "
                "give the name its address in the network (/etc/hosts)"
            )
    if len(set(sources.values())) > 1:
        ways = ", ".join(f"{host} from {source}" for host, source in sources.items())
        raise PopRunError(f"the hosts are reached over different networks: {ways}; name one with --host-subnet")
    return _covering(_interface_with(ours, str(next(iter(sources.values())))), list(targets.values()))


def parse_mask(text: str) -> IPv4Network | IPv6Network | None:
    """Return the network of a mask such as `10.77.0.0/24` or of an address; None if the text may name an interface.

    Raises:
        UsageError: The text looks like a mask, but is not a valid one.
    """
    if "/" not in text and not _is_address(text):
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError as error:
        raise UsageError(f"--host-subnet is {text}: {error}; use a mask such as 10.77.0.0/24, or eth0") from None


def _named_network(ours: Sequence[Interface], hosts: Mapping[str, Sequence[str]], subnet: str) -> HostNetwork:
    mask = parse_mask(subnet)
    if mask is not None:
        inside = [each for each in ours if each.ip.ip in mask]
        if not inside:
            raise UsageError(f"--host-subnet is {subnet}, but this machine has no address there; it has {_list(ours)}")
        return HostNetwork(str(mask), inside[0].address, inside[0].name)
    named = [each for each in ours if each.name == subnet]
    if not named:
        raise UsageError(
            f"--host-subnet is {subnet}, which is no address mask or interface of this machine; it has {_list(ours)}"
        )
    first = min(named, key=lambda each: each.ip.version)
    return _covering(first, _addresses_near(first, hosts))


def _addresses_near(interface: Interface, hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each host's address in the interface's network, else the address by which the host is known."""
    near = []
    for addresses in hosts.values():
        same = [address for address in addresses if ip_address(address).version == interface.ip.version]
        inside = [address for address in same if ip_address(address) in interface.ip.network]
        near += inside[:1] or same[:1]
    return near


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ip_address(text)
        return True
    return False


def _targets(hosts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return one address of each host, all IPv4 or all IPv6."""
    for host, addresses in hosts.items():
        if not addresses:
            raise PopRunError(f"host {host} has no address; check its spelling, or give it one in /etc/hosts")
    for version in _FAMILIES:
        chosen = {
            host: next((each for each in addresses if ip_address(each).version == version), "")
            for host, addresses in hosts.items()
        }
        if all(chosen.values()):
            return chosen
    listed = ", ".join(f"{host} {addresses[0]}" for host, addresses in hosts.items())
    raise PopRunError(f"some hosts have only IPv4 addresses, others only IPv6: {listed}; give all of them one kind")


def _interface_with(ours: Sequence[Interface], address: str) -> Interface:
    found = next((each for each in ours if each.ip.ip == ip_address(address)), None)
    if found is None:
        raise PopRunError(
            f"packets leave from {address}, but no interface has it; name one of {_list(ours)} with --host-subnet"
        )
    return found


def _covering(interface: Interface, addresses: Sequence[str]) -> HostNetwork:
    """Return the interface's network, widened until it contains all addresses; in a routed network it may be a /32."""
    network: _Net = reduce(_widen, map(ip_address, addresses), interface.ip.network)
    return HostNetwork(str(network), interface.address, interface.name)


def _widen(network: _Net, address: IPv4Address | IPv6Address) -> _Net:
    while address not in network:
        network = network.supernet()
    return network


def _list(ours: Sequence[Interface]) -> str:
    outside = [each for each in ours if not each.is_loopback]
    return ", ".join(f"{each.name} {each.ip.network}" for each in outside) or "no network"
