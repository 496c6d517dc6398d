"""A cable with delay, for kernels without netem: what arrives at one interface leaves at the other one later.

usage: slow_wire.py DELAY_S INTERFACE INTERFACE     (as root; ends when its standard input does)

Frames keep the form in which the kernel hands them over, up to 64 KiB each and checksums not filled in yet
(PACKET_VNET_HDR, see packet(7)); so 200 Mbit/s both ways are about 2000 frames per second.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

# Of linux/if_packet.h and asm-generic/socket.h, as Python's socket module does not have them.
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
LARGEST_FRAME = 1 << 17
WAITING_BYTES = 8 << 20


@dataclass
class Direction:
    """From one interface to the other; frames leave in the order in which they came."""

    source: socket.socket
    target: socket.socket
    delay_s: float
    on_the_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """Take in what has arrived."""
        with suppress(BlockingIOError):
            while True:
                frame = self.source.recv(LARGEST_FRAME)
                self.on_the_way.append((time.monotonic() + self.delay_s, frame))

    def deliver(self) -> None:
        """Send on what has been on its way for long enough."""
        while self.on_the_way and self.on_the_way[0][0] <= time.monotonic():
            with suppress(OSError):  # no memory for it, or the interface is down: lost, as on a cable
                self.target.send(self.on_the_way.popleft()[1])


def main() -> None:
    delay_s, *interfaces = sys.argv[1:]
    one, other = (open_interface(name) for name in interfaces)
    with suppress(PermissionError):  # a cable does not wait for a processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    carry([Direction(one, other, float(delay_s)), Direction(other, one, float(delay_s))])


def open_interface(name: str) -> socket.socket:
    """A socket that receives and sends whole frames at an interface, those of all protocols."""
    interface = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    interface.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    interface.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    interface.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, WAITING_BYTES)
    interface.bind((name, ETH_P_ALL))
    interface.setblocking(False)
    return interface


def carry(directions: Sequence[Direction]) -> None:
    """Carry frames until standard input ends."""
    by_source = {direction.source: direction for direction in directions}
    while True:
        ready = select.select([sys.stdin, *by_source], [], [], next_due_in_s(directions))[0]
        if sys.stdin in ready:
            return
        for source, direction in by_source.items():
            if source in ready:
                direction.take()
        for direction in directions:
            direction.deliver()


def next_due_in_s(directions: Sequence[Direction]) -> float | None:
    """Until the next frame has to leave; None where there is none."""
    due = [direction.on_the_way[0][0] for direction in directions if direction.on_the_way]
    return max(0.0, min(due) - time.monotonic()) if due else None


if __name__ == "__main__":
    main()
