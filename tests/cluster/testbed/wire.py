"""A switch with delay, jitter and loss as a process, for kernels without the netem qdisc.

    ip netns exec bed-switch python3 wire.py CONFIGURATION INTERFACE...      (SIGHUP: read the configuration again)

The configuration is JSON: {"vh1": {"delay": 0.001, "jitter": 0, "loss": 0.001, "up": 1}, ...}. The values of a host
apply to its outgoing frames, so a round trip h0-h1 takes delay(h0) + delay(h1). The interfaces are the switch's ends of
the hosts' veth pairs; they must not be in a bridge. Frames stay aggregated, so that up to 64 KiB move per system call.
LIFELINE in the environment names a descriptor; when its other end is closed, this process ends.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE, SO_SNDBUFFORCE = 33, 32
ALL_PROTOCOLS = 3
BUFFER_BYTES = 64 << 20
HEADER_BYTES = 10  # the size of virtio_net_hdr, the prefix of each frame
FRAMES_AT_ONCE = 64


def open_port(name):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.bind((name, ALL_PROTOCOLS))
    port.setblocking(False)
    return port


def segments_of(frame):
    """Return the number of frames on a real wire for an aggregated frame."""
    size = struct.unpack_from("<H", frame, 4)[0] if frame[1] else 0
    return max(1, -(-len(frame) // size)) if size else 1


class Switch:
    def __init__(self, path, names):
        self.path = path
        self.ports = {open_port(name): name for name in names}
        self.port_of_address = {}
        self.queue = []
        self.count = 0
        self.last_due_s = {}
        self.lifeline = [int(os.environ["LIFELINE"])] if os.environ.get("LIFELINE") else []
        self.read_configuration()

    def read_configuration(self, *_):
        with open(self.path) as file:
            self.values = json.load(file)

    def value(self, port, name, default=0):
        return self.values.get(self.ports[port], {}).get(name, default)

    def run(self):
        while True:
            wait_s = max(0.0, self.queue[0][0] - time.monotonic()) if self.queue else None
            for port in select.select([*self.lifeline, *self.ports], (), (), wait_s)[0]:
                if port in self.lifeline:
                    return
                self.take_from(port)
            self.send_due()

    def take_from(self, port):
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = port.recv(1 << 17)
            except OSError:  # nothing is left, or the interface is down
                return
            if self.passes(port, frame):
                self.enqueue(port, frame)

    def passes(self, port, frame):
        loss = self.value(port, "loss")
        return self.value(port, "up", 1) and not (loss and random.random() > (1 - loss) ** segments_of(frame))

    def enqueue(self, port, frame):
        target, source = frame[HEADER_BYTES : HEADER_BYTES + 6], frame[HEADER_BYTES + 6 : HEADER_BYTES + 12]
        self.port_of_address[source] = port
        due_s = time.monotonic() + self.value(port, "delay") + random.uniform(0, self.value(port, "jitter"))
        due_s = max(due_s, self.last_due_s.get(port, 0))  # keeps the order
        self.last_due_s[port] = due_s
        self.count += 1
        heapq.heappush(self.queue, (due_s, self.count, port, target, frame))

    def send_due(self):
        now_s = time.monotonic()
        while self.queue and self.queue[0][0] <= now_s:
            _, _, source, target, frame = heapq.heappop(self.queue)
            known = self.port_of_address.get(target)
            for port in [known] if known else self.ports:
                if port is not source and self.value(port, "up", 1):
                    self.send(port, frame)

    @staticmethod
    def send(port, frame):
        try:
            port.send(frame)
        except OSError:  # the queue is full or the interface is down: a real switch drops it too
            return


def main():
    switch = Switch(sys.argv[1], sys.argv[2:])
    signal.signal(signal.SIGHUP, switch.read_configuration)
    print("ready", flush=True)
    switch.run()


main()
