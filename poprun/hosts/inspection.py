"""The inspection of hosts before a launch: hosts are asked, or their recent answers are used, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from popdist.instance import this_host
from poprun.errors import PopRunError, UsageError
from poprun.hosts.host_checks import HostNeeds, findings_of
from poprun.hosts.host_facts import HostFacts, HostFault, HostQuestion
from poprun.hosts.interfaces import HostNetwork, choose_network, read_interfaces, source_address
from poprun.hosts.ssh import name_behind, ssh_words
from poprun.hosts.survey import SurveyCache, cache_folder, limit_from, stamp_of, survey_starting
from poprun.hosts.this_machine import is_this_machine, look_up


@dataclass(frozen=True)
class Inspected:
    """The facts that a launch may rely on.

    Attributes:
        facts: The facts of every host, in the order of the hosts.
        network: The network that connects the hosts.
        warnings: Messages for the user.
    """

    facts: Mapping[str, HostFacts]
    network: HostNetwork
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """The hosts to check, and the launch that they are for.

    Attributes:
        instances: Number of instances for each host, under the name that the user wrote.
        question: The question to the hosts.
        host_subnet: The network that the user chose. None: it is found from the routes.
        shell: The words of the command that replaces ssh. Empty: ssh.
        starting_s: Seconds for which hosts may still be starting, and are asked again.
    """

    instances: Mapping[str, int]
    question: HostQuestion
    host_subnet: str | None = None
    shell: tuple[str, ...] = ()
    starting_s: float = 0.0


def inspect_hosts(inspection: Inspection, environ: Mapping[str, str]) -> Inspected:
    """Check all hosts; recent good answers are used instead of asking again.

    Args:
        inspection: The hosts and the launch.
        environ: Environment variables; POPRUN_SSH_ARGS, POPRUN_CHECK_TIMEOUT_S and the cache's place are read.

    Raises:
        PopRunError: A host does not fit; one line for each fault.
        UsageError: This machine has no interface or network `host_subnet`.
    """
    ssh = inspection.shell or ssh_words(environ)
    cache = SurveyCache(cache_folder(environ), inspection.question, ssh, stamp_of(inspection.question))
    hosts = with_this_machine(list(inspection.instances))
    # A host that starts anew under its old name, such as a pod, may have another address.
    known = {} if inspection.starting_s else {host: facts for host in hosts if (facts := cache.load(host))}
    if len(known) == len(hosts):
        # Remembered answers may save time, but must not refuse a launch.
        with suppress(PopRunError):
            return _judge(known, inspection)
    asked = survey_starting(hosts, inspection.question, ssh, limit_from(environ), inspection.starting_s)
    inspected = _judge(asked, inspection)
    _check_connections(asked, inspected.network, inspection, ssh, limit_from(environ))
    for each in asked.values():
        if isinstance(each, HostFacts):
            cache.store(each)
    return inspected


def find_network(facts: Mapping[str, HostFacts], here: HostFacts, host_subnet: str | None) -> HostNetwork:
    """Return the network that connects the hosts, found from their facts.

    Raises:
        PopRunError: No network, or more than one, leads to the hosts.
    """
    others = {host: each.addresses for host, each in facts.items() if each.identity != here.identity}
    return choose_network(here.interfaces, others, host_subnet, source_address)


def guess_network(hosts: Sequence[str], host_subnet: str | None, environ: Mapping[str, str]) -> HostNetwork:
    """Return the network that connects the hosts, found from their names; for a launch without checks.

    Raises:
        PopRunError: No network, or more than one, leads to the hosts.
    """
    others = [host for host in hosts if not is_this_machine(host)]
    found = look_up(others)
    ssh = ssh_words(environ)
    aliases = {host: name_behind(host, ssh) for host, addresses in found.items() if not addresses}
    behind = look_up(list(aliases.values()))
    found |= {host: behind[name] for host, name in aliases.items()}
    return choose_network(read_interfaces(), found, host_subnet, source_address)


def with_this_machine(hosts: Sequence[str]) -> list[str]:
    """Return the hosts and this machine, with which the other hosts are compared."""
    return list(hosts) if any(map(is_this_machine, hosts)) else [*hosts, this_host()]


LET_PASS = "let all TCP ports pass between the hosts (firewalls), or name another network with --host-subnet"
"""The way out for hosts that cannot connect to each other: Open MPI uses any port that the kernel gives it."""


def addresses_in(network: HostNetwork, facts: Mapping[str, HostFacts]) -> dict[str, str]:
    """Return the address in a network of each host that has an address there."""
    found = {host: network.address_among(each.addresses) for host, each in facts.items()}
    return {host: address for host, address in found.items() if address}


def _check_connections(
    facts: Mapping[str, HostFacts | HostFault],
    network: HostNetwork,
    inspection: Inspection,
    ssh: Sequence[str],
    limit_s: float,
) -> None:
    """Refuse hosts that cannot connect to each other or to this machine: a launch would wait for minutes in vain."""
    known = {host: each for host, each in facts.items() if isinstance(each, HostFacts)}
    addresses = addresses_in(network, known)
    if len(addresses) < 2:
        return
    from poprun.hosts.links import find_blocked  # takes some milliseconds to load, and only asking hosts needs it

    blocked = find_blocked(addresses, inspection.question.python, ssh, limit_s)
    if blocked:
        raise PopRunError("\n".join(f"host {each.target}: {each.fact}; {LET_PASS}" for each in blocked))


def _judge(facts: Mapping[str, HostFacts | HostFault], inspection: Inspection) -> Inspected:
    here = next(each for host, each in facts.items() if is_this_machine(host))
    if isinstance(here, HostFault):
        raise PopRunError(f"host {here.host}: {here.fact}; {here.way_out}")
    asked = {host: facts[host] for host in inspection.instances}
    good = {host: each for host, each in asked.items() if isinstance(each, HostFacts)}
    faults: list[str] = []
    network = None
    try:
        network = find_network(good, here, inspection.host_subnet)
    except UsageError:
        raise
    except PopRunError as error:
        faults.append(str(error))
    wanted = HostNeeds(here, inspection.question.program, inspection.instances, network)
    findings = findings_of(asked, wanted)
    faults += [each.line for each in findings if each.is_fault]
    if faults or network is None:
        raise PopRunError("\n".join(faults))
    return Inspected(good, network, tuple(each.line for each in findings if each.is_advice))
