"""Which names mean the machine on which poprun runs. No name is looked up, which could take long."""

from __future__ import annotations

import re
from collections.abc import Collection

from popdist.instance import this_host

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "ip6-localhost"))
"""Names that every machine takes for itself."""

_IPV4 = re.compile(r"(?!0+\.)\d{1,3}(\.\d{1,3}){3}")


def is_this_machine(host: str) -> bool:
    """Whether a host, as the user wrote it, is a name or an IPv4 address that this machine has for itself.

    An alias in /etc/hosts or ~/.ssh/config is not known; the answer of the host tells it instead.
    """
    return is_named(host, {this_host(), *LOCAL_NAMES}) or _is_own_address(host)


def is_named(host: str, own_names: Collection[str]) -> bool:
    """Whether a name is among others; a short name and a full one that begins with it agree, as do `A` and `a`."""
    return any(_is_same_name(host.lower(), own.lower()) for own in own_names)


def _is_same_name(one: str, other: str) -> bool:
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    return long.startswith(f"{short}.") and not long.replace(".", "").isdecimal()


def _is_own_address(name: str) -> bool:
    """Whether an IPv4 address is one of this machine: only then a socket can be bound to it."""
    if not _IPV4.fullmatch(name):
        return False
    import socket  # costs some milliseconds, needed only where hosts are given by address

    try:
        with socket.socket() as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
