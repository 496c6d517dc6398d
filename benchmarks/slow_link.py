"""Two hosts on this machine with a slow link between them: network namespaces, `tc`, and a delay.

The hosts `a` and `b` are namespaces, each with one interface, which leads into a third one, the switch. What a host
sends is held to the rate by `tc tbf` in the host, and is delayed in the switch: by netem where the kernel has it, else
by `slow_wire.py`. Nothing outside these three namespaces is touched, or can be reached from them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

WIRE = Path(__file__).with_name("slow_wire.py")
TOOLS = ("ip", "tc")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PORTS = ("to-a", "to-b")
END_S = 5.0

# A burst holds one frame of 64 KiB, else the kernel cuts all frames into packets of 1500 bytes first. Beyond 50 ms of
# waiting data packets are dropped.
BUCKET = ("burst", "72kb", "latency", "50ms")

_numbers = itertools.count()


class SlowLinkError(RuntimeError):
    """This machine, or this user, cannot make a slow link."""


@dataclass(frozen=True)
class Host:
    """One end of the link.

    Attributes:
        namespace: its name.
        address: IPv4.
    """

    namespace: str
    address: str

    def command(self, program: Sequence[str]) -> list[str]:
        """The command that runs a program on this host."""
        return ["ip", "netns", "exec", self.namespace, *program]

    def sent_bytes(self) -> int:
        """What its interface has sent so far, with all headers."""
        shown = run(["ip", "-n", self.namespace, "-s", "-json", "link", "show", "eth0"])
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


@dataclass(frozen=True)
class SlowLink:
    """What `slow_link` made.

    Attributes:
        hosts: at its ends.
        bytes_per_s: in each direction, headers included.
        delay_s: in each direction.
        delayed_by: "netem", "slow_wire.py", or "nothing".
    """

    hosts: tuple[Host, Host]
    bytes_per_s: float
    delay_s: float
    delayed_by: str


@contextmanager
def slow_link(rate: str = "200mbit", delay_s: float = 0.001) -> Iterator[SlowLink]:
    """Two hosts and the link between them, which are gone when the block is left, also by an error or SIGTERM.

    Args:
        rate: of each direction, as `tc` writes it: a number with kbit, mbit or gbit.
        delay_s: of each direction; a round trip takes twice as long.

    Raises:
        SlowLinkError: if this user is not root, or a tool or a part of the kernel is missing.
        ValueError: for a rate that is none.
    """
    rate_bytes_per_s = bytes_per_s(rate)
    check_possible()
    prefix = f"slow-{os.getpid()}-{next(_numbers)}"
    hosts = Host(f"{prefix}-a", "10.99.0.1"), Host(f"{prefix}-b", "10.99.0.2")
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        switch = stack.enter_context(namespace(f"{prefix}-switch"))
        for host, port in zip(hosts, PORTS, strict=True):
            stack.enter_context(namespace(host.namespace))
            plug_in(host, switch, port, rate)
        delayed_by = stack.enter_context(connect_ports(switch, delay_s))
        yield SlowLink(hosts, rate_bytes_per_s, delay_s, delayed_by)


def bytes_per_s(rate: str) -> float:
    """What a rate such as "200mbit" means."""
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        bits_per_s = float(number) * UNITS[unit]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{rate!r} is not a rate; write a number with one of {', '.join(UNITS)}: 200mbit") from error
    if not 0 < bits_per_s < float("inf"):
        raise ValueError(f"the rate is {rate}; it has to be positive")
    return bits_per_s / 8


def check_possible() -> None:
    """Say what is missing, if something is.

    Raises:
        SlowLinkError: in that case.
    """
    if os.geteuid() != 0:
        raise SlowLinkError(f"network namespaces need root, this is user {os.geteuid()}; run it as root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise SlowLinkError(f"{' and '.join(missing)} cannot be found; install iproute2: apt install iproute2")


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as an exception, so that what has to be undone is undone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def namespace(name: str) -> Iterator[str]:
    """A network namespace; its interfaces go with it."""
    try:
        run(["ip", "netns", "add", name])
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def plug_in(host: Host, switch: str, port: str, rate: str) -> None:
    """Lead a host's interface to a port of the switch, and hold it to the rate."""
    run(
        [
            "ip",
            "-n",
            switch,
            "link",
            "add",
            "name",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            host.namespace,
        ]
    )
    for place, interface in ((switch, port), (host.namespace, "eth0")):  # no IPv6, so that nobody speaks unasked
        run(["ip", "-n", place, "link", "set", interface, "addrgenmode", "none", "up"])
    run(["ip", "-n", host.namespace, "link", "set", "lo", "up"])
    run(["ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0"])
    run(["tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, *BUCKET])


@contextmanager
def connect_ports(switch: str, delay_s: float) -> Iterator[str]:
    """Connect the ports of the switch; yields what delays."""
    if delay_s == 0 or has_netem(switch, delay_s):
        run(["ip", "-n", switch, "link", "add", "name", "bridge", "up", "type", "bridge"])
        for port in PORTS:
            run(["ip", "-n", switch, "link", "set", port, "master", "bridge"])
        yield "netem" if delay_s else "nothing"
        return
    with wire(switch, delay_s):
        yield WIRE.name


def has_netem(switch: str, delay_s: float) -> bool:
    """Delay what leaves the switch, if the kernel can."""
    commands = [
        ["tc", "-n", switch, "qdisc", "add", "dev", port, "root", "netem", "delay", f"{round(delay_s * 1e6)}us"]
        for port in PORTS
    ]
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


@contextmanager
def wire(switch: str, delay_s: float) -> Iterator[None]:
    """`slow_wire.py` between the ports; it also ends when this process does, as its standard input ends then."""
    command = ["ip", "netns", "exec", switch, sys.executable, str(WIRE), str(delay_s), *PORTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise SlowLinkError(f"{WIRE.name} has not begun; the reason is above")
            yield
        finally:
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def run(command: Sequence[str]) -> str:
    """What a tool prints.

    Raises:
        SlowLinkError: with what it said, if it fails.
    """
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SlowLinkError(f"{' '.join(command)} ended with {finished.returncode}: {finished.stderr.strip()}")
    return finished.stdout
