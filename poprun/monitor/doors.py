"""Opening the doors through which others look at a job, and finding those of other jobs."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from poprun.cli.log import Log
from poprun.errors import PopRunError, UsageError
from poprun.ipc.local_sockets import open_socket
from poprun.monitor.greeting import TOKEN_VARIABLE
from poprun.monitor.viewers import Door

_PURPOSE = "poprun-top-{user}"
_BACKLOG = 16
_ADDRESS = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_ENTRY = re.compile(r" @(poprun-top-(\d+)-(\d+)-[0-9a-f]{12})$", re.MULTILINE)


def open_doors(address: str | None, environ: Mapping[str, str], log: Log) -> list[Door]:
    """The doors of a job: one for this user on this machine, and one at an address that is asked for.

    Args:
        address: `HOST:PORT`; None: none.
        environ: has the token.
        log: says where it is, at `-v`.

    Raises:
        PopRunError: there is no token, or nobody can listen at the address.
    """
    doors = [] if address is None else [_open_remote(address, environ, log)]
    try:
        listening, _ = open_socket(_PURPOSE.format(user=os.geteuid()))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        doors.append(Door(listening))
    except OSError as error:
        log.info(f"poprun top will not find this job: {error.strerror}")
    return doors


def read_address(text: str, option: str) -> tuple[str, int]:
    """The host and the port in `HOST:PORT`, `1.2.3.4:PORT` or `[::1]:PORT`.

    Raises:
        UsageError: it is none of these.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{option} is {text!r}; write HOST:PORT or [IPv6]:PORT")
    return found["bracketed"] or found["plain"], int(found["port"])


def token_from(environ: Mapping[str, str], option: str) -> str:
    """The token of the job.

    Raises:
        UsageError: there is none.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise UsageError(
            f"{option} lets only those look who know the job's token, and {TOKEN_VARIABLE} is not set; set it for "
            f"poprun and for poprun top alike: export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
        )
    return token


def doors_in(listed: str, user: int) -> list[tuple[int, str]]:
    """The jobs of a user on this machine: the pid of each poprun, and the name of its door.

    Args:
        listed: what is in /proc/net/unix, see proc(5).
        user: whose.
    """
    found = {(int(pid), name) for name, owner, pid in _ENTRY.findall(listed) if int(owner) == user}
    return sorted(found)


def _open_remote(address: str, environ: Mapping[str, str], log: Log) -> Door:
    option = "--top-address"
    host, port = read_address(address, option)
    token = token_from(environ, option)
    try:
        listening = _listen(host, port)
    except OSError as error:
        raise PopRunError(
            f"{option} {address}: nobody can listen there: {error.strerror}; name an address of this machine, and a "
            "port that is free"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    log.info(f"poprun top --address {shown}:{listening.getsockname()[1]} shows this job, to those who have its token")
    return Door(listening, token)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
