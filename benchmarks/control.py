"""A coordinator that gives turns to worker processes, which wait at a socket and take no processor time.

A thread of Horovod never waits: it keeps asking the other ranks for work. Its processes are stopped (SIGSTOP) between
their turns.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

TETHERED = Path(__file__).with_name("tethered.py")
_POLL_S = 1.0
_END_S = 20.0


class Conversation:
    """JSON messages, one per line, over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("r", encoding="utf-8")

    def tell(self, message: Any) -> None:
        """Send a message without waiting for an answer."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, who: str = "the coordinator") -> Any:
        """Return the next message, or None at the end."""
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise SystemExit(f"{who} has not answered within {self._socket.gettimeout():g} s") from error
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the conversation; the other side then hears None."""
        self._lines.close()
        self._socket.close()


def serve(path: str, group: str, rank: int, handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer requests `{"do": handler, ...arguments}` with the handlers' results, until the coordinator ends."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        conversation = Conversation(connected)
        conversation.tell({"group": group, "rank": rank, "pid": os.getpid()})
        while (request := conversation.hear()) is not None:
            conversation.tell(handlers[request.pop("do")](**request))
        conversation.close()


@dataclass
class Group:
    """Workers that do the same work at the same time.

    Attributes:
        name: Name of the group.
        ranks: Number of workers.
        processes: Started processes.
        is_restless: Whether the workers compute between requests, so that they must be stopped.
        conversations: Conversations with the workers, by rank.
        pids: Process IDs of the workers, by rank.
    """

    name: str
    ranks: int
    processes: list[subprocess.Popen[bytes]]
    is_restless: bool = False
    conversations: dict[int, Conversation] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)

    def ask(self, **request: Any) -> list[Any]:
        """Send a request to all workers, and return their answers in the order of ranks.

        Raises:
            SystemExit: If a worker has ended, or does not answer in time.
        """
        self.resume()
        everybody = [self.conversations[rank] for rank in range(self.ranks)]
        for conversation in everybody:
            conversation.tell(request)
        answers = [conversation.hear(f"{self.name} {rank}") for rank, conversation in enumerate(everybody)]
        if None in answers:
            raise SystemExit(f"{self.name} {answers.index(None)} has ended; the reason is above")
        self.rest()
        return answers

    def rest(self) -> None:
        """Stop the workers if they do not sleep by themselves; all of them must have answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume stopped workers."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids.values() if self.is_restless else ():
            with suppress(ProcessLookupError):  # the worker has ended; the next request to it reports that
                os.kill(pid, number)


class Coordinator:
    """A coordinator that starts groups of workers, and ends them when its `with` block ends.

    Args:
        folder: Folder for the socket.
        limit_s: Time limit for a worker to start or answer, in seconds.
        answer_s: Time limit for an answer, in seconds; `limit_s` by default.
    """

    def __init__(self, folder: str | Path, limit_s: float, answer_s: float | None = None) -> None:
        self.path = str(Path(folder) / "control")
        self._limit_s = limit_s
        self._answer_s = limit_s if answer_s is None else answer_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(_POLL_S)
        self._groups: list[Group] = []

    def start(
        self,
        name: str,
        ranks: int,
        commands: Sequence[Sequence[str]],
        environ: dict[str, str],
        is_restless: bool = False,
    ) -> Group:
        """Start the processes of a group, and wait until all its workers have connected."""
        group = Group(name, ranks, [], is_restless)
        self._groups.append(group)
        if is_restless:  # a stopped worker would not notice that this process was killed
            commands = [[sys.executable, str(TETHERED), str(os.getpid()), *command] for command in commands]
        for command in commands:
            group.processes.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL))
        give_up = time.monotonic() + self._limit_s
        while len(group.conversations) < ranks:
            self._accept(group)
            ended = [process for process in group.processes if process.poll() is not None]
            if ended:
                raise SystemExit(f"{name} ended with {ended[0].returncode} before it began; the reason is above")
            if time.monotonic() > give_up:
                raise SystemExit(f"{name} has not started within {self._limit_s:g} s")
        group.rest()
        return group

    def _accept(self, group: Group) -> None:
        try:
            connected, _ = self._listener.accept()
        except TimeoutError:
            return
        connected.settimeout(self._limit_s)
        conversation = Conversation(connected)
        hello = conversation.hear(group.name)
        connected.settimeout(self._answer_s)
        group.conversations[hello["rank"]] = conversation
        group.pids[hello["rank"]] = hello["pid"]

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for group in self._groups:
            for conversation in group.conversations.values():
                conversation.close()
            group.resume()
            for process in group.processes:
                if error is not None:
                    process.terminate()
                _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
