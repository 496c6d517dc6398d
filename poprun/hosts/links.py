"""Trials of the links between hosts, made by a helper process on each host."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from poprun.hosts.link_script import MARK
from poprun.hosts.ssh import last_line, program_words, remote_words
from poprun.hosts.this_machine import is_this_machine

LinkAnswer = dict[str, Any]
"""A JSON object that `link_script.py` prints; its keys depend on the command."""

KnownAddresses = dict[str, list[str]]
"""The addresses that a host knows for each name."""

CONNECT_LIMIT_S = 2.0
_ANSWER_LIMIT_S = 5.0
_LIFE_LIMIT_S = 120
_GOODBYE_S = 1.0
_SCRIPT = Path(__file__).with_name("link_script.py")


class HelperError(Exception):
    """A helper that gave no answer; the text is the reason."""


class LinkHelper:
    """A process on a host that runs `link_script.py` until the end of a `with` block.

    Args:
        host: The host, as the user wrote it; this machine needs no ssh.
        python: Path of the interpreter on the host.
        ssh: The words of ssh before the host.
    """

    def __init__(self, host: str, python: str, ssh: Sequence[str]) -> None:
        self.host = host
        program = f"{_SCRIPT.read_text()}\n\nserve({_LIFE_LIMIT_S})\n".encode()
        command = program_words(python, program)
        self._process = subprocess.Popen(
            command if is_this_machine(host) else remote_words(ssh, host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._said = b""
        self._tell(program)

    def __enter__(self) -> LinkHelper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # ends the process on the host
        try:
            self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()

    def ask(self, do: str, limit_s: float, **arguments: object) -> LinkAnswer:
        """Run a command of `link_script.py` on the host, and return the answer.

        Raises:
            HelperError: The helper gave no answer within the limit, or ended.
        """
        self._tell(json.dumps({"do": do, **arguments}).encode() + b"\n")
        deadline_s = time.monotonic() + limit_s
        while True:
            line = self._read_line(deadline_s, limit_s).decode(errors="replace")
            if line.startswith(MARK):
                answer: LinkAnswer = json.loads(line.removeprefix(MARK))
                return answer

    def _tell(self, data: bytes) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # `_read_line` reports why the helper has ended
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _read_line(self, deadline_s: float, limit_s: float) -> bytes:
        assert self._process.stdout
        while b"\n" not in self._said:
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0 or not select.select([self._process.stdout], [], [], rest_s)[0]:
                raise HelperError(f"gave no answer within {limit_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise HelperError(self._why_it_ended())
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _why_it_ended(self) -> str:
        assert self._process.stderr
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        os.set_blocking(self._process.stderr.fileno(), False)
        complaint = last_line((self._process.stderr.read() or b"").decode(errors="replace"))
        return complaint or f"ended with exit status {self._process.returncode}"


def look_up_names(
    hosts: Sequence[str], names: Sequence[str], python: str, ssh: Sequence[str], limit_s: float
) -> dict[str, KnownAddresses | HelperError]:
    """Return the addresses that each host knows for each name, or the reason why it has not answered.

    Args:
        hosts: Hosts, as the user wrote them.
        names: Names to look up on every host.
        python: Path of the interpreter, the same on every host.
        ssh: The words of ssh before the host.
        limit_s: Seconds after which a host that does not answer is given up; at least 5.
    """

    def ask(helper: LinkHelper) -> KnownAddresses | HelperError:
        try:
            known: KnownAddresses = helper.ask("look_up", max(limit_s, _ANSWER_LIMIT_S), names=list(names))["addresses"]
        except HelperError as error:
            return error
        return known

    with ExitStack() as stack:
        helpers = [stack.enter_context(LinkHelper(host, python, ssh)) for host in hosts]
        with ThreadPoolExecutor(max(1, len(helpers))) as pool:
            return dict(zip(hosts, pool.map(ask, helpers), strict=True))


@dataclass(frozen=True)
class Blocked:
    """A host to which other hosts cannot connect, though this machine may reach all of them.

    Attributes:
        target: The host that listens.
        address: The host's address in the network.
        sources: The hosts that tried to connect.
        fault: The kernel's error on the first of these hosts.
    """

    target: str
    address: str
    sources: tuple[str, ...]
    fault: str

    @property
    def fact(self) -> str:
        """The failure, as a text that follows the name of the listening host."""
        return f"cannot be reached from {', '.join(self.sources)} at {self.address} by TCP: {self.fault}"


def find_blocked(addresses: Mapping[str, str], python: str, ssh: Sequence[str], limit_s: float) -> list[Blocked]:
    """Connect every host to every other host, and return the hosts to which connections failed.

    Args:
        addresses: Each host's address in the chosen network.
        python: Path of the interpreter, the same on every host.
        ssh: The words of ssh before the host.
        limit_s: Seconds after which a host that does not answer is left out.
    """
    with ExitStack() as stack:
        helpers = [stack.enter_context(LinkHelper(host, python, ssh)) for host in addresses]
        with ThreadPoolExecutor(max(1, len(helpers))) as pool:
            ports = list(pool.map(lambda helper: _listen(helper, addresses[helper.host], limit_s), helpers))
            places = {helper.host: port for helper, port in zip(helpers, ports, strict=True) if port}
            faults = list(pool.map(lambda helper: _reach(helper, places, addresses), helpers))
    tried = {helper.host: found for helper, found in zip(helpers, faults, strict=True)}
    blocked = []
    for target in places:
        said = {source: found[target] for source, found in tried.items() if found.get(target)}
        if said:
            blocked.append(Blocked(target, addresses[target], tuple(said), next(iter(said.values()))))
    return blocked


def _reach(helper: LinkHelper, ports: Mapping[str, int], addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the faults of this host's connections to each other host; empty if this host does not answer."""
    others = [host for host in ports if host != helper.host]
    places = [(addresses[host], ports[host]) for host in others]
    if helper.host not in ports or not places:
        return {}
    with suppress(HelperError):
        answer = helper.ask("reach", 2 * CONNECT_LIMIT_S + _ANSWER_LIMIT_S, places=places, connect_s=CONNECT_LIMIT_S)
        return dict(zip(others, answer["faults"], strict=True))
    return {}


def _listen(helper: LinkHelper, address: str, limit_s: float) -> int:
    with suppress(HelperError):
        return int(helper.ask("listen", limit_s, address=address).get("port", 0))
    return 0
