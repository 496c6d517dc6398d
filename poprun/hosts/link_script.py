"""A script that tries the links between hosts; each host receives it as text, so it imports nothing of poprun.

The script reads commands from standard input, one JSON object a line, and answers each with one line.
"""

import contextlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

MARK = "poprun-link "
"""The beginning of every answer; other lines, such as those of a login shell, are ignored."""

_NAMES_LIMIT_S = 1.0


def serve(limit_s: int) -> None:
    """Answer commands until standard input ends, for at most `limit_s` seconds."""
    signal.alarm(limit_s)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = _COMMANDS[command.pop("do")](**command)
        except OSError as error:
            answer = {"fault": error.strerror or str(error)}
        print(MARK + json.dumps(answer), flush=True)


def look_up(names: list[str]) -> dict[str, object]:
    """Return the addresses of names; none if a name is unknown, or not found within 1 s."""
    found: dict[str, list[str]] = {name: [] for name in names}

    def find(name: str) -> None:
        with contextlib.suppress(OSError):
            found[name] = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})

    threads = [threading.Thread(target=find, args=(name,), daemon=True) for name in names]
    deadline_s = time.monotonic() + _NAMES_LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return {"addresses": dict(found)}


def listen(address: str) -> dict[str, object]:
    """Listen at an address of this host for other hosts, and return the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=64)
    threading.Thread(target=_accept, args=(listening,), daemon=True).start()
    return {"port": listening.getsockname()[1]}


def reach(places: list[tuple[str, int]], connect_s: float) -> dict[str, object]:
    """Connect to all listening hosts at the same time; return the fault of each connection, empty on success."""
    faults = ["no connection within the limit"] * len(places)

    def connect(number: int, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), timeout=connect_s).close()
            faults[number] = ""
        except OSError as error:
            faults[number] = error.strerror or str(error)

    threads = [
        threading.Thread(target=connect, args=(number, *place), daemon=True) for number, place in enumerate(places)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(connect_s + 1)
    return {"faults": list(faults)}


def _accept(listening: socket.socket) -> None:
    while True:
        listening.accept()[0].close()


_COMMANDS: dict[str, Callable[..., dict[str, object]]] = {"look_up": look_up, "listen": listen, "reach": reach}
