"""The identity of a worker: its user, and the hosts that its certificate names."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import pwd
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FIRST_OF_PEOPLE = 1000  # smaller user numbers belong to services, see login.defs(5)
_NOBODY = 65534
_WITHOUT_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")
_MOST = 60  # maximum length of a name
_DNS, _IP, _ANY, _COMMON = "peer_dns", "peer_ip", "x509_subject_alternative_name", "x509_common_name"  # keys of gRPC


@dataclass(frozen=True)
class Runner:
    """A process in the words of its users.

    Attributes:
        program: File name of the program, without its folder.
        user: Name of its user.
        user_id: Number of that user.
        process: Process id.
        host: Name of its host.
    """

    program: str
    user: str
    user_id: int
    process: int
    host: str

    @property
    def title(self) -> str:
        """The description of the process: `train.py of alice, process 4711 on node-a`."""
        return f"{self.program} of {self.user}, process {self.process} on {self.host}"


def this_runner() -> Runner:
    """Return the runner of this process."""
    arguments = getattr(sys, "argv", None) or [""]
    program, user_id = Path(arguments[0]).name or "python", os.getuid()
    return Runner(program[:_MOST], _name_of(user_id)[:_MOST], user_id, os.getpid(), platform.node()[:_MOST])


def _name_of(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def other_users() -> list[str]:
    """Return the names of other people on this machine: with a login account or a running process."""
    return people(pwd.getpwall(), _owners(), os.getuid())


def people(accounts: Sequence[pwd.struct_passwd], owners: Iterable[int], own: int) -> list[str]:
    """Return the names of all people except one.

    Args:
        accounts: Accounts as in passwd(5). Accounts without a login belong to services.
        owners: User numbers of running processes; they may lack an account here.
        own: User number to leave out. root is always left out, because root can do anything anyway.
    """
    services = {account.pw_uid for account in accounts if Path(account.pw_shell).name in _WITHOUT_LOGIN}
    names = {account.pw_uid: account.pw_name for account in accounts}
    candidates = {*names, *owners} - services - {own, _NOBODY}
    return [names.get(number, f"user {number}") for number in sorted(candidates) if number >= _FIRST_OF_PEOPLE]


def _owners() -> set[int]:
    owners = set()
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # the process has just ended
                    owners.add(entry.stat().st_uid)
    return owners


@dataclass(frozen=True)
class Bearer:
    """The bearer of a certificate that one of our authorities has signed.

    Attributes:
        names: Host names in the certificate; the first label may be `*`.
        numbers: IP addresses in the certificate.
    """

    names: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @classmethod
    def of(cls, context: Mapping[str, Sequence[bytes]]) -> Bearer:
        """Read the bearer from gRPC's authentication context.

        Without alternative names the common name counts, as it does when gRPC's client checks the server's certificate.
        """
        names = context.get(_DNS, ()) if context.get(_ANY) else context.get(_COMMON, ())
        return cls(*(tuple(each.decode(errors="replace") for each in every) for every in (names, context.get(_IP, ()))))

    @property
    def hosts(self) -> str:
        """All names and addresses, for messages."""
        return ", ".join((*self.names, *self.numbers)) or "no host"

    def is_for(self, host: str) -> bool:
        """Return whether the certificate covers a worker at this host, a name or address (RFC 9525, section 6)."""
        number = _number(host)
        if number is not None:
            return number in map(_number, self.numbers)
        return any(_fits(name, host) for name in self.names)


def _number(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _fits(name: str, host: str) -> bool:
    name, host = (each.rstrip(".").lower() for each in (name, host))
    label, _, rest = name.partition(".")
    if label == "*":  # at least two labels must follow, so it never covers a top-level domain
        return "." in rest and rest == host.partition(".")[2] and bool(host.partition(".")[0])
    return bool(name) and name == host
