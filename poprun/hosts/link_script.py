"""A script that measures the links between hosts; each host receives it as text, so it imports nothing of poprun.

The script reads commands from standard input, one JSON object a line, and answers each with one line.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from statistics import median

MARK = "poprun-link "
"""The beginning of every answer; other lines, such as those of a login shell, are ignored."""

ROUND_TRIPS = 40
_NAMES_LIMIT_S = 1.0
_ECHO, _SINK = b"e", b"s"
_WARM_UP = 0.3  # unmeasured share of the duration: TCP's slow start, and a traffic shaper's bucket
_RESULT = struct.Struct("!Qd")
_BLOCK_BYTES = 1 << 16


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


def tell_clock() -> dict[str, object]:
    """Return the time of this host."""
    return {"clock_s": time.time()}


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


def attach() -> dict[str, object]:
    """Test whether a process may read the memory of a sibling process of the same user, as Open MPI does."""
    data = ctypes.create_string_buffer(b"before")
    ready, done = os.pipe(), os.pipe()
    owner = os.fork()
    if owner == 0:
        data.value = b"after!"
        os.write(ready[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)  # ends when the parent closes its end
        os._exit(0)
    os.read(ready[0], 1)
    reader = os.fork()
    if reader == 0:
        os._exit(_read_memory(owner, data))
    fault = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    for descriptor in (*ready, *done):
        os.close(descriptor)
    return {"fault": os.strerror(fault)} if fault else {}


def listen(address: str) -> dict[str, object]:
    """Listen at an address of this host for other hosts, and return the port."""
    listening = socket.create_server((address, 0), family=_family(address), backlog=64)
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


def measure(address: str, port: int, duration_s: float, connect_s: float) -> dict[str, object]:
    """Measure round trip and bandwidth from this host to another host that listens."""
    with socket.create_connection((address, port), timeout=connect_s) as connection:
        round_trip_s = _time_echo(connection)
    with socket.create_connection((address, port), timeout=connect_s) as connection:
        received_bytes, seconds = _send_for(connection, duration_s)
    return {"round_trip_s": round_trip_s, "bytes_per_s": received_bytes / seconds}


def _read_memory(pid: int, data: ctypes.Array[ctypes.c_char]) -> int:
    """Read another process's memory at the address of `data`; return 0 or the error number."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    size = len(data)
    copy = ctypes.create_string_buffer(size)
    here, there = (Vector(ctypes.addressof(each), size) for each in (copy, data))
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        return 38  # ENOSYS
    read.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    if read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == size and copy.value == b"after!":
        return 0
    return ctypes.get_errno() or 5  # EIO


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _accept(listening: socket.socket) -> None:
    while True:
        connection = listening.accept()[0]
        threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


def _serve_one(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = connection.recv(1)
        if kind == _ECHO:
            while data := connection.recv(64):
                connection.sendall(data)
        elif kind == _SINK:
            connection.sendall(_RESULT.pack(*_receive_for(connection)))
            while connection.recv(_BLOCK_BYTES):  # closing with unread data could discard the result
                pass


def _receive_for(connection: socket.socket) -> tuple[int, float]:
    """Count the bytes and seconds from the end of the warm-up to the end of the duration; later bytes do not count.

    If this process pauses until the end of the duration, count from the beginning.
    """
    (duration_s,) = struct.unpack("!d", connection.recv(8, socket.MSG_WAITALL))
    buffer = bytearray(_BLOCK_BYTES)
    began_s = last_s = time.perf_counter()
    total, early, first_s = 0, 0, 0.0
    while last_s < began_s + duration_s and (count := connection.recv_into(buffer)):
        last_s = time.perf_counter()
        if first_s:
            total += count
            continue
        early += count
        if last_s - began_s >= _WARM_UP * duration_s:
            first_s = last_s
    if not total:
        total, first_s = early, began_s
    return total, max(last_s - first_s, 1e-9)


def _time_echo(connection: socket.socket) -> float:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_ECHO)
    times = []
    for _ in range(ROUND_TRIPS):
        began_s = time.perf_counter()
        connection.sendall(b"8 bytes.")
        connection.recv(8, socket.MSG_WAITALL)
        times.append(time.perf_counter() - began_s)
    return median(times)


def _send_for(connection: socket.socket, duration_s: float) -> tuple[int, float]:
    connection.sendall(_SINK + struct.pack("!d", duration_s))
    block = bytes(_BLOCK_BYTES)
    end_s = time.perf_counter() + duration_s
    with contextlib.suppress(TimeoutError):  # a very slow link; only the received bytes count
        while time.perf_counter() < end_s:
            connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    received_bytes, seconds = _RESULT.unpack(connection.recv(_RESULT.size, socket.MSG_WAITALL))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # drop unsent data
    return received_bytes, seconds


_COMMANDS: dict[str, Callable[..., dict[str, object]]] = {
    "clock": tell_clock,
    "look_up": look_up,
    "attach": attach,
    "reach": reach,
    "listen": listen,
    "measure": measure,
}
