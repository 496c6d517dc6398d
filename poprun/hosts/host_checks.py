"""The checks of hosts before a launch, made from the facts that the hosts tell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from poprun.cli.wording import count
from poprun.hosts.host_facts import COMPARED_PACKAGES, HostFacts, HostFault
from poprun.hosts.interfaces import HostNetwork

SHM_BYTES_PER_INSTANCE = 16 << 20
"""Open MPI 5 keeps a segment of this size for each instance that shares a host with others."""

COPY_IT = "or on a shared file system, or let poprun copy it (--synchronise-python-venv yes)"
"""The ways out that all differences between environments have in common."""

_FILES_PER_INSTANCE = 32
_NAMES = {"python": "Python", "openmpi": "Open MPI", "project": "popdist-everywhere"}


@dataclass(frozen=True)
class HostNeeds:
    """The needs of a launch, with which each host's facts are compared.

    Attributes:
        here: The facts of the machine that runs poprun; the other hosts are compared with them.
        program: The program, as the user wrote it.
        instances: Number of instances for each host.
        network: The network that connects the hosts. None with a single host.
        shm_bytes_per_instance: Bytes of /dev/shm that each instance needs if several share a host.
    """

    here: HostFacts
    program: str
    instances: Mapping[str, int]
    network: HostNetwork | None = None
    shm_bytes_per_instance: int = SHM_BYTES_PER_INSTANCE


@dataclass(frozen=True)
class Finding:
    """The result of one check of one host.

    Attributes:
        check: The subject of the check, one or two words.
        host: The host, as the user wrote it.
        fact: The result.
        way_out: The advice or remedy. Empty: all is well.
        is_fault: Whether a launch would fail or give wrong results. Otherwise a way out is only advice.
    """

    check: str
    host: str
    fact: str
    way_out: str = ""
    is_fault: bool = False

    @property
    def is_advice(self) -> bool:
        """Whether the launch works, but probably not as intended."""
        return bool(self.way_out) and not self.is_fault

    @property
    def line(self) -> str:
        """The finding as a message: host, fact, way out."""
        return f"host {self.host}: {self.fact}" + (f"; {self.way_out}" if self.way_out else "")


def findings_of(facts: Mapping[str, HostFacts | HostFault], wanted: HostNeeds) -> list[Finding]:
    """Run every check on every host, in the order of the hosts."""
    found: list[Finding] = []
    for host, known in facts.items():
        if isinstance(known, HostFault):
            found.append(Finding("ssh", host, known.fact, known.way_out, is_fault=True))
        else:
            found.append(Finding("ssh", host, "answers" if known.reached_at else "this machine"))
            found += [finding for check in _CHECKS for finding in check(known, wanted)]
    return found + list(
        _check_difference([each for each in facts.values() if isinstance(each, HostFacts)], wanted.here)
    )


def _check_versions(facts: HostFacts, wanted: HostNeeds) -> Iterator[Finding]:
    ours, theirs = wanted.here.versions, facts.versions
    names = ("python", "project", *COMPARED_PACKAGES)
    different = [name for name in names if ours.get(name, "") != theirs.get(name, "")]
    for name in different:
        fact = f"has {_version(facts, name)}, here is {_version(wanted.here, name)}"
        yield Finding("versions", facts.host, fact, _align(name, ours.get(name, "")), is_fault=True)
    if "project" not in different and facts.sources != wanted.here.sources:
        fact = "has other sources of popdist-everywhere at the same path"
        yield Finding("versions", facts.host, fact, f"copy the project there again, {COPY_IT}", is_fault=True)
    elif not different:
        yield Finding("versions", facts.host, ", ".join(_version(facts, name) for name in names if theirs.get(name)))


def _version(facts: HostFacts, name: str) -> str:
    label, number = _NAMES.get(name, name), facts.versions.get(name, "")
    return f"{label} {number}" if number else f"no {label}"


def _align(name: str, version: str) -> str:
    if name == "project":
        return f"install the project at the same path there, {COPY_IT}"
    if name == "python" or not version:
        return f"use the same environment on every host, at the same path, {COPY_IT}"
    return f"install {name}=={version} there"


def _check_program(facts: HostFacts, wanted: HostNeeds) -> Iterator[Finding]:
    if facts.program:
        yield Finding("program", facts.host, facts.program)
    else:
        where = (
            "is not in PATH"
            if facts.program_fault == "missing" and "/" not in wanted.program
            else "is " + facts.program_fault
        )
        way_out = (
            "make it executable with `chmod +x`"
            if facts.program_fault == "not executable"
            else "copy it there, or name its path there"
        )
        yield Finding("program", facts.host, f"program {wanted.program!r} {where}", way_out, is_fault=True)
    if not facts.has_directory:
        fact = "the working directory does not exist"
        yield Finding(
            "program", facts.host, fact, "create it, or launch from a folder that all hosts share", is_fault=True
        )


def _check_cores(facts: HostFacts, wanted: HostNeeds) -> Iterator[Finding]:
    instances, cores = wanted.instances.get(facts.host, 0), len(facts.cores)
    fact = f"{count(cores, 'core')} for {count(instances, 'instance')}" if instances else count(cores, "core")
    if instances <= cores:
        yield Finding("cores", facts.host, fact)
    else:
        yield Finding("cores", facts.host, fact, "use fewer instances or more hosts")


def _check_shared_memory(facts: HostFacts, wanted: HostNeeds) -> Iterator[Finding]:
    instances = wanted.instances.get(facts.host, 0)
    needed = instances * wanted.shm_bytes_per_instance if instances > 1 else 0
    fact = f"{facts.shm_free_bytes >> 20} MiB free in /dev/shm"
    if facts.shm_free_bytes >= needed:
        yield Finding("/dev/shm", facts.host, fact)
    else:
        fact += f", but {count(instances, 'instance')} need {needed >> 20} MiB"
        way_out = "remove unused files there, or make it larger (mount -o remount,size=, docker --shm-size)"
        yield Finding("/dev/shm", facts.host, fact, way_out, is_fault=True)


def _check_network(facts: HostFacts, wanted: HostNeeds) -> Iterator[Finding]:
    if wanted.network is None:
        return
    own = [each for each in facts.interfaces if wanted.network.includes(each.address)]
    if own:
        yield Finding("network", facts.host, f"{own[0].name} {own[0].address}, MTU {own[0].mtu}")
    else:
        has = ", ".join(f"{each.name} {each.ip}" for each in facts.interfaces if not each.is_loopback) or "no address"
        fact = f"no address in the chosen network {wanted.network.cidr}; it has {has}"
        yield Finding(
            "network", facts.host, fact, "name a network that all hosts share with --host-subnet", is_fault=True
        )


def _check_limits(facts: HostFacts, wanted: HostNeeds) -> Iterator[Finding]:
    needed = 256 + _FILES_PER_INSTANCE * max(wanted.instances.values(), default=1) * len(wanted.instances)
    files = facts.open_files
    enough = files < 0 or files >= needed
    fact = f"{'unlimited' if files < 0 else files} open files" + ("" if enough else f", but {needed} would be safe")
    yield Finding("limits", facts.host, fact, "" if enough else f"raise the limit: `ulimit -n {needed}`")


def _check_difference(facts: Sequence[HostFacts], here: HostFacts) -> Iterator[Finding]:
    """Report equal host names, because Open MPI 5 hangs, and names of one machine, because they share its cores."""
    machines: dict[str, HostFacts] = {}
    names: dict[str, HostFacts] = {} if here.identity in {each.identity for each in facts} else {here.name: here}
    for each in facts:
        same, namesake = machines.setdefault(each.identity, each), names.setdefault(each.name, each)
        if same is not each:
            fact = f"is the same machine as {same.host}"
            yield Finding("names", each.host, fact, "name it once, and give it all the instances", True)
        elif namesake is not each:
            fact = f"has the host name {each.name}, as {namesake.host} has"
            yield Finding(
                "names", each.host, fact, "Open MPI would hang; name it anew with `hostnamectl set-hostname`", True
            )
        else:
            yield Finding("names", each.host, "no other host has its name")


_CHECKS: tuple[Callable[[HostFacts, HostNeeds], Iterator[Finding]], ...] = (
    _check_program,
    _check_versions,
    _check_cores,
    _check_shared_memory,
    _check_network,
    _check_limits,
)
