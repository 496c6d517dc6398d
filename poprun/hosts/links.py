"""Measurements of the links between hosts, made by a helper process on each host."""

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

CONNECT_LIMIT_S = 2.0
DURATION_S = 0.3
"""The duration of the bandwidth measurement of one link."""

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
        limit_s: Time limit of an answer, if a command has no other one.
    """

    def __init__(self, host: str, python: str, ssh: Sequence[str], limit_s: float = _ANSWER_LIMIT_S) -> None:
        self.host = host
        self._limit_s = limit_s
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

    def ask(self, do: str, limit_s: float | None = None, **arguments: object) -> LinkAnswer:
        """Run a command of `link_script.py` on the host, and return the answer.

        Raises:
            HelperError: The helper gave no answer within the limit, or ended.
        """
        self._tell(json.dumps({"do": do, **arguments}).encode() + b"\n")
        limit_s = self._limit_s if limit_s is None else limit_s
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


@dataclass(frozen=True)
class MeasuredLink:
    """The measurements of the link from one host to another.

    Attributes:
        source: The host that sends.
        target: The host that receives.
        round_trip_s: Median time for 8 bytes there and back.
        bytes_per_s: Bandwidth of one TCP stream.
        fault: The reason why the measurement failed; empty on success.
    """

    source: str
    target: str
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    fault: str = ""


@dataclass(frozen=True)
class ClockOffset:
    """The lead of a host's clock over ours, and its uncertainty."""

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class HostMeasurements:
    """The measurements of one helper.

    Attributes:
        host: The host, as the user wrote it.
        fault: The reason why the helper measured nothing; empty on success.
        clock: The host's clock, compared with this machine's.
        attach_fault: The reason why a process may not read another one's memory; empty if it may.
        addresses: The addresses that this host knows for each name.
    """

    host: str
    fault: str = ""
    clock: ClockOffset = ClockOffset(0.0, 0.0)
    attach_fault: str = ""
    addresses: Mapping[str, Sequence[str]] | None = None


def measure(
    addresses: Mapping[str, str],
    names: Sequence[str],
    python: str,
    ssh: Sequence[str],
    limit_s: float = _ANSWER_LIMIT_S,
) -> tuple[list[HostMeasurements], list[MeasuredLink]]:
    """Measure each host, then the links of the ring through all hosts in this order.

    Args:
        addresses: Each host's address in the chosen network.
        names: Names to look up on every host.
        python: Path of the interpreter, the same on every host.
        ssh: The words of ssh before the host.
        limit_s: Seconds after which a host that does not answer is a fault; at least 5.
    """
    with ExitStack() as stack:
        limit_s = max(limit_s, _ANSWER_LIMIT_S)
        helpers = [stack.enter_context(LinkHelper(host, python, ssh, limit_s)) for host in addresses]
        with ThreadPoolExecutor(max(1, len(helpers))) as pool:
            found = list(pool.map(lambda helper: _look_around(helper, names), helpers))
        working = [helper for helper, each in zip(helpers, found, strict=True) if not each.fault]
        return found, _measure_ring(working, addresses)


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


def ring_of(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the links to measure, one from each host to the next; none for a single host."""
    return list(zip(hosts, [*hosts[1:], *hosts[:1]], strict=True)) if len(hosts) > 1 else []


def all_reduce_bound_s(links: Sequence[MeasuredLink], size_bytes: int) -> float:
    """Return a lower bound for an all-reduce: every host sends 2 (h - 1) / h of the data (docs: collectives.md)."""
    hosts = len(links)
    return 2 * (hosts - 1) / hosts * size_bytes / min(link.bytes_per_s for link in links)


def _look_around(helper: LinkHelper, names: Sequence[str]) -> HostMeasurements:
    try:
        attach_fault = str(helper.ask("attach").get("fault", ""))
        known = helper.ask("look_up", names=list(names))["addresses"]
        return HostMeasurements(helper.host, "", _compare_clocks(helper), attach_fault, known)
    except HelperError as error:
        return HostMeasurements(helper.host, str(error))


def _compare_clocks(helper: LinkHelper) -> ClockOffset:
    """Return the offset as NTP estimates it, from the quickest of eight round trips."""
    clocks = []
    for _ in range(8):
        asked_s = time.time()
        there_s = float(helper.ask("clock")["clock_s"])
        answered_s = time.time()
        clocks.append(ClockOffset(there_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2))
    return min(clocks, key=lambda clock: clock.uncertainty_s)


def rounds_of(links: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Divide the links of a ring into two or three rounds; in a round, a host sends or receives, but never both."""
    paired = len(links) // 2 * 2
    return [list(each) for each in (links[:paired:2], links[1:paired:2], links[paired:]) if each]


def _measure_ring(helpers: Sequence[LinkHelper], addresses: Mapping[str, str]) -> list[MeasuredLink]:
    by_host = {helper.host: helper for helper in helpers}
    ports = {helper.host: _listen(helper, addresses[helper.host]) for helper in helpers}

    def measure_one(link: tuple[str, str]) -> MeasuredLink:
        source, target = link
        return _measure_link(by_host[source], target, addresses[target], ports[target])

    ring = ring_of(list(by_host))
    found: dict[tuple[str, str], MeasuredLink] = {}
    with ThreadPoolExecutor(max(1, len(helpers))) as pool:
        for links in rounds_of(ring):
            found |= zip(links, pool.map(measure_one, links), strict=True)
    return [found[link] for link in ring]


def _listen(helper: LinkHelper, address: str, limit_s: float | None = None) -> int:
    with suppress(HelperError):
        return int(helper.ask("listen", limit_s, address=address).get("port", 0))
    return 0


def _measure_link(helper: LinkHelper, target: str, address: str, port: int) -> MeasuredLink:
    if not port:
        return MeasuredLink(helper.host, target, fault=f"{target} cannot listen at {address}")
    try:
        answer = helper.ask("measure", address=address, port=port, duration_s=DURATION_S, connect_s=CONNECT_LIMIT_S)
    except HelperError as error:
        return MeasuredLink(helper.host, target, fault=str(error))
    if "fault" in answer:
        return MeasuredLink(helper.host, target, fault=f"no connection to {address}: {answer['fault']}")
    if not answer["bytes_per_s"]:
        return MeasuredLink(helper.host, target, fault=f"nothing arrives at {address} within {DURATION_S:g} s")
    return MeasuredLink(helper.host, target, float(answer["round_trip_s"]), float(answer["bytes_per_s"]))
