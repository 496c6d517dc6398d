"""The shim: runs the program of one instance, forwards its output, and leaves no process of it behind.

It answers to poprun over a socket. When that closes, poprun is gone and the instance is ended. It runs in an
isolated interpreter and has to start fast, so it imports little, all of it from the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from poprun import wire
from poprun.lines import LineBuffer
from poprun.processes import adopt_orphans, descendants, die_with_parent, send, start
from poprun.standard_input import Feed
from poprun.terminals import open_outputs

CONTROL_VARIABLE = "POPRUN_CONTROL"
PROGRESS_VARIABLE = "POPRUN_PROGRESS_FD"
PAGE_BYTES = 4096
NEW_PAGE = b"POPRUN1\0" + bytes(PAGE_BYTES - 8)
RELEASED_OFFSET = 64

ABORT_GRACE_S = 0.15
"""After mpirun has said stop: the instance that called MPI_Abort ends by itself, and its status is wanted."""
LINGER_S = 0.1
"""After the program has ended: helpers such as Python's resource tracker clean up and end by themselves."""
SWEEP_S = 0.003
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)
_NEVER = float("inf")


def guard_program(cpus: str, words: list[str], environ: dict[str, str]) -> int:
    """Run a program until it and all its descendants have ended; the exit status is that of the shim, 0.

    Args:
        cpus: what to pin the program to, such as `0-3,8`, or `any`.
        words: the program and its arguments.
        environ: the environment; what is meant for the shim is not passed on.
    """
    wakeup = _catch_signals()
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    address, _, terminals = environ.pop(CONTROL_VARIABLE).rpartition(" ")
    rank = int(environ["OMPI_COMM_WORLD_RANK"])
    page = _new_page(environ)
    outputs = open_outputs(terminals)
    stdin, feed = os.pipe() if rank == 0 else (os.open(os.devnull, os.O_RDONLY), -1)
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)  # out of the reach of what mpirun sends to its own group
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        os.dup2(stdin, 0)
        for target, (_, writer) in outputs.items():
            os.dup2(writer, target)
        if cpus != "any":
            os.sched_setaffinity(0, _parse_cpus(cpus))

    pid = start(words, environ, prepare)
    os.close(stdin)
    for _, writer in outputs.values():
        os.close(writer)
    link = Link(address)
    link.send(wire.pack_hello(rank, pid, os.uname().nodename))
    Guard(pid, page, link, wakeup, [outputs[1][0], outputs[2][0]], Feed(feed)).run()
    return 0


class Link:
    """The socket to poprun; once it has failed, everything sent is dropped."""

    def __init__(self, address: str) -> None:
        import socket  # the program has been started by now, so this costs no time

        scheme, _, path = address.partition(":")
        if scheme != "unix":
            raise ValueError(f"the control address {address!r} is not a unix: address")
        self.is_open = True
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reader = wire.MessageReader()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message, waiting while poprun is behind with its reading."""
        if self.is_open:
            try:
                self._socket.sendall(message)
            except OSError:
                self.is_open = False

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have come; sets `is_open` to false at the end."""
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        self.is_open = self.is_open and bool(data)
        if not self.is_open:
            self._tidy()
        return self._reader.feed(data)

    def _tidy(self) -> None:
        """Remove the socket that a poprun killed during the start could not remove."""
        for remove, path in ((os.unlink, self._path), (os.rmdir, os.path.dirname(self._path))):
            try:
                remove(path)
            except OSError:
                return


class Guard:
    """The state of one instance, from its start until nothing of it is left and poprun has said so."""

    def __init__(self, pid: int, page: int, link: Link, wakeup: int, outputs: list[int], feed: Feed) -> None:
        self._pid = pid
        self._page = page
        self._link = link
        self._wakeup = wakeup
        self._feed = feed
        self._outputs = dict(zip(outputs, (wire.STDOUT, wire.STDERR), strict=True))
        self._lines = {descriptor: LineBuffer() for descriptor in outputs}
        self._is_running = True
        self._has_children = True
        self._is_dismissed = False
        self._told = 0
        self._kill_at_s = _NEVER  # the program itself
        self._sweep_at_s = _NEVER  # whatever is left of its descendants
        self._poll = select.poll()
        for descriptor in (wakeup, link.fileno(), *outputs):
            os.set_blocking(descriptor, descriptor == link.fileno())
            self._poll.register(descriptor, select.POLLIN)
        if feed.is_open:
            os.set_blocking(feed.descriptor, False)
            link.send(wire.pack(wire.WANT))

    def run(self) -> None:
        """Serve until the instance is gone and poprun, or its end, dismisses us."""
        while self._has_children or not self._is_dismissed:
            for descriptor, _ in self._poll.poll(self._timeout_ms()):
                self._serve(descriptor)
            self._hand_over_input()
            self._keep_time(time.monotonic())

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._wakeup:
            for number in os.read(descriptor, 512):
                self._take_signal(number)
        elif descriptor in self._outputs:
            self._forward(descriptor)
        elif descriptor == self._link.fileno():
            self._obey()

    def _take_signal(self, number: int) -> None:
        if number in _PASSED_ON:
            self._pass_on(number)
        elif number in _STOPPING and not self._told:
            self._told = number
            self._link.send(wire.pack_number(wire.TOLD, number))
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + ABORT_GRACE_S)

    def _pass_on(self, number: int) -> None:
        if self._is_running:
            send(self._pid, signal.SIGSTOP if number == signal.SIGTSTP else number)

    def _hand_over_input(self) -> None:
        """Write what the program takes of its standard input; ask for more when it has taken all."""
        if not self._feed.is_full:
            return
        descriptor = self._feed.descriptor
        self._feed.write()
        if self._feed.is_full:
            self._poll.register(descriptor, select.POLLOUT)
            return
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        if self._feed.is_open:
            self._link.send(wire.pack(wire.WANT))

    def _obey(self) -> None:
        for kind, content in self._link.receive():
            if kind == wire.REPORT:
                self._report()
            elif kind == wire.SIGNAL:
                self._pass_on(wire.unpack_number(content))
            elif kind == wire.RELEASE and self._page >= 0:
                os.pwrite(self._page, b"\1", RELEASED_OFFSET)
            elif kind == wire.STDIN:
                self._feed.put(content)
            elif kind == wire.STOP:
                self._dismiss()
        if not self._link.is_open:
            self._dismiss()
            self._poll.unregister(self._link.fileno())

    def _dismiss(self) -> None:
        self._is_dismissed = True
        self._told = self._told or int(signal.SIGKILL)
        self._kill_at_s = 0.0

    def _report(self) -> None:
        page = b""
        if self._page >= 0:
            page, again = os.pread(self._page, PAGE_BYTES, 0), b""
            for _ in range(3):  # a writer may be at it
                again = os.pread(self._page, PAGE_BYTES, 0)
                if again == page:
                    break
                page = again
        self._link.send(wire.pack_progress(time.monotonic(), page))

    def _forward(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose last writer has gone
            data = b""
        if not data:
            self._close_output(descriptor)
            return
        self._send_output(descriptor, self._lines[descriptor].feed(data, time.monotonic()))

    def _close_output(self, descriptor: int) -> None:
        self._send_output(descriptor, self._lines[descriptor].flush())
        self._poll.unregister(descriptor)
        os.close(descriptor)
        del self._outputs[descriptor], self._lines[descriptor]

    def _send_output(self, descriptor: int, data: bytes) -> None:
        if data:
            self._link.send(wire.pack(self._outputs[descriptor], data))

    def _drain(self) -> None:
        """Forward all output that is there now, and pieces of lines too."""
        ready = select.poll()
        for descriptor in list(self._outputs):
            ready.register(descriptor, select.POLLIN)
            while descriptor in self._outputs and any(fd == descriptor for fd, _ in ready.poll(0)):
                self._forward(descriptor)
                if descriptor not in self._outputs:
                    ready.unregister(descriptor)
            if descriptor in self._outputs:
                ready.unregister(descriptor)
                self._send_output(descriptor, self._lines[descriptor].flush())

    def _keep_time(self, now_s: float) -> None:
        for descriptor, lines in self._lines.items():
            self._send_output(descriptor, lines.expire(now_s))
        self._reap()
        if self._is_running and now_s >= self._kill_at_s:
            send(self._pid, signal.SIGKILL)
            self._kill_at_s = _NEVER
        if self._has_children and now_s >= self._sweep_at_s:
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)
            self._sweep_at_s = now_s + SWEEP_S

    def _reap(self) -> None:
        try:
            while self._has_children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._note_end(os.waitstatus_to_exitcode(status), time.monotonic())
        except ChildProcessError:
            self._has_children = False
            self._drain()
            self._link.send(wire.pack(wire.CLOSED))

    def _note_end(self, code: int, now_s: float) -> None:
        self._is_running = False
        self._sweep_at_s = now_s + LINGER_S
        self._drain()
        self._report()
        self._link.send(wire.pack_ended(code < 0, bool(self._told), abs(code), now_s))

    def _timeout_ms(self) -> int | None:
        deadlines = [lines.deadline_s() for lines in self._lines.values()]
        if self._is_running:
            deadlines.append(self._kill_at_s)
        if self._has_children:
            deadlines.append(self._sweep_at_s)
        soonest = min(deadlines, default=_NEVER)
        if soonest == _NEVER:
            return None
        return max(0, int((soonest - time.monotonic()) * 1000) + 1)


def _catch_signals() -> int:
    """Turn signals into bytes in a pipe; its reading end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*_STOPPING, *_PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


def _new_page(environ: dict[str, str]) -> int:
    """Make the memory file of the progress record and name it to the program; -1 where that is impossible."""
    environ.pop(PROGRESS_VARIABLE, None)
    try:
        page = os.memfd_create("poprun-progress", 0)
        os.write(page, NEW_PAGE)
    except OSError:
        return -1
    os.set_inheritable(page, True)
    environ[PROGRESS_VARIABLE] = str(page)
    return page


def _parse_cpus(text: str) -> tuple[int, ...]:
    bounds = (part.partition("-")[::2] for part in text.split(","))
    return tuple(cpu for low, high in bounds for cpu in range(int(low), int(high or low) + 1))
