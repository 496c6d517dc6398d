"""The launching process's end of all connections: it hands out the function, and collects the reports."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from popdist.environments.poprun import ADDRESS_VARIABLE, TOKEN_VARIABLE
from popdist.launching.channel import LaunchChannel, LaunchMessage, MessageKind, Part, admit
from popdist.launching.reports import InstanceReport, read_report
from popdist.launching.travelling import search_path, sources_of_main

MOST_GREETINGS = 64
"""The most callers at a time that have not proved yet that they know the token."""
PAUSE_S = 0.5
"""Pause in accepting callers after descriptors have run out."""
LAST_REPORT_LIMIT_S = 30.0
"""Time limit for the rest of the reports to arrive after poprun has ended."""


class FunctionReception:
    """The sockets of a launch and the threads that serve them; leaving the context closes all.

    Args:
        call: The packed call.

    Attributes:
        variables: The variables by which instances find this process.
    """

    def __init__(self, call: Sequence[Part]) -> None:
        setup = {"path": search_path(), "argv": sys.argv, "sources": sources_of_main()}
        self._function = LaunchMessage(MessageKind.FUNCTION, [json.dumps(setup).encode(), *call])
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._is_closed = False
        self._listening: list[socket.socket] = []
        self._channels: list[LaunchChannel] = []
        self._reports: list[InstanceReport] = []
        self._greetings = threading.BoundedSemaphore(MOST_GREETINGS)
        name = f"popdist-launch-{os.getpid()}-{secrets.token_hex(6)}"
        self.variables = {ADDRESS_VARIABLE: name, TOKEN_VARIABLE: self._token}
        self._listen(socket.AF_UNIX, f"\0{name}")

    def __enter__(self) -> FunctionReception:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._changed:
            self._is_closed = True
        for listening in self._listening:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listening.close()
        for channel in list(self._channels):
            channel.close()

    def last_reports(self) -> list[InstanceReport]:
        """Return the reports after the end of the job, in the order in which they came."""
        until_s = time.monotonic() + LAST_REPORT_LIMIT_S
        with self._changed:
            self._changed.wait_for(lambda: not self._channels, until_s - time.monotonic())
            return list(self._reports)

    def _listen(self, family: socket.AddressFamily, place: str | tuple[str, int]) -> socket.socket:
        listening = socket.socket(family)
        try:
            listening.bind(place)
            listening.listen(MOST_GREETINGS)
        except OSError:
            listening.close()
            raise
        with self._changed:
            self._listening.append(listening)
        self._start(self._accept, listening)
        return listening

    def _start(self, serve: object, connection: socket.socket) -> None:
        threading.Thread(target=serve, args=(connection,), name="popdist-launch", daemon=True).start()  # type: ignore[arg-type]

    def _accept(self, listening: socket.socket) -> None:
        while not self._is_closed:
            self._greetings.acquire()
            try:
                connection = listening.accept()[0]
            except OSError:
                self._greetings.release()
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, PAUSE_S)
                continue
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = admit(connection, self._token)
        except OSError:
            connection.close()
            return
        finally:
            self._greetings.release()
        with self._changed:
            self._channels.append(channel)
        try:
            while not self._is_closed:
                self._answer(channel, channel.receive())
        except (OSError, ValueError):
            pass  # poprun knows why an instance has ended
        finally:
            channel.close()
            with self._changed:
                self._channels.remove(channel)
                self._changed.notify_all()

    def _answer(self, channel: LaunchChannel, message: LaunchMessage) -> None:
        if message.kind is MessageKind.READY:
            channel.send(self._function)
        elif message.kind is MessageKind.LISTEN:
            address = bytes(message.parts[0]).decode()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = self._listen(family, (address, 0))
            channel.send(LaunchMessage(MessageKind.LISTENING, [str(listening.getsockname()[1]).encode()]))
        else:
            report = read_report(message)
            with self._changed:
                self._reports.append(report)
