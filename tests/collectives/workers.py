"""Processes of `worker_job.py`: their start, their output, and commands to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from grpc_jobs import environ_with
from mpi_jobs import HERE

from collectives.network.addresses import Address

PROGRAM = HERE / "worker_job.py"
LIMIT_S = 60.0
PORTS_OF_PROCESS = 2500
LOST_LIMIT_S = 10.0  # the time after which all workers end that have lost another


class Worker:
    """A process, its lines of output, and its end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._open = 2
        self._readers = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    @property
    def text(self) -> str:
        """Return all output so far, of both streams."""
        return "\n".join(self.lines)

    def containing(self, *words: str, without: str = "") -> list[str]:
        """Return the lines that contain all the words, and not the other one."""
        lines = [line for line in list(self.lines) if all(word in line for word in words)]
        return [line for line in lines if not without or without not in line]

    def wait_for(self, *words: str, count: int = 1, without: str = "", limit_s: float = LIMIT_S) -> str:
        """Return the `count`-th line `containing` the words as soon as it has been written."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.containing(*words, without=without)) >= count or not self._open, limit_s
            )
        found = self.containing(*words, without=without)
        assert len(found) >= count, f"no {count} lines with {words} came, but:\n{self.text}"
        return found[count - 1]

    def tell(self, order: str) -> None:
        """Write a line to the worker's standard input."""
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Close the worker's standard input, which ends its task in order."""
        self.process.stdin.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait until the process has ended, and return its exit status."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it still runs after {limit_s:g} s:\n{self.text}") from error
        for reader in self._readers:
            reader.join(limit_s)
        return status

    def kill(self) -> None:
        """Kill the process, even if it is stopped."""
        self.process.kill()
        self.end()

    def dispose(self) -> None:
        """End the process and its streams."""
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.end()


@dataclass(frozen=True)
class Job:
    """The common settings of the workers of a group.

    Attributes:
        addresses: The addresses of all workers.
        arguments: Arguments of the program, after its task, rank and addresses.
        environ: Variables that are set or changed for all of them.
    """

    addresses: Sequence[str]
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] | None = None

    def start(
        self,
        task: str,
        rank: int,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        addresses: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> Worker:
        """Start one worker; the arguments are added to, or replace, the common ones."""
        places = [task, str(rank), *(addresses or self.addresses)]
        process = subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAM), *places, *self.arguments, *arguments],
            env=environ_with({**(self.environ or {}), **(environ or {})}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return Worker(process)


@contextlib.contextmanager
def disposed_of() -> Iterator[list[Worker]]:
    """Provide a list of workers, and end all of them after the block."""
    workers: list[Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.dispose()


@contextlib.contextmanager
def running(job: Job, task: str) -> Iterator[list[Worker]]:
    """Start all workers of a job together, and provide them in a new list."""
    with disposed_of() as workers:
        for rank in range(len(job.addresses)):
            workers.append(job.start(task, rank))
        yield workers.copy()


def assert_end_well(workers: Sequence[Worker]) -> None:
    """End the task of running workers, and assert that all their results were right."""
    for worker in workers:
        worker.finish()
    for worker in workers:
        assert worker.end() == 0, worker.text
        assert worker.containing("rounds were right"), worker.text


def assert_still_right(workers: Sequence[Worker]) -> None:
    """Assert that all workers complete one more all-reduce, with the right result."""
    before = [len(worker.containing("report: ")) for worker in workers]
    for worker in workers:
        worker.tell("report")
    for worker, count in zip(workers, before, strict=True):
        worker.wait_for("report: ", count=count + 1)


def last_line(worker: Worker) -> str:
    """Return the error at the end of a worker."""
    lines = [line for line in worker.lines if re.match(r"[\w.]+(Error|Exit|Exception)\b", line)]
    return lines[-1] if lines else ""


def free_ports(count: int, host: str = "127.0.0.1", family: socket.AddressFamily = socket.AF_INET) -> list[int]:
    """Return free ports of this machine outside the ranges of the kernel and of parallel tests."""
    free: list[int] = []
    for _ in range(PORTS_OF_PROCESS):
        if len(free) == count:
            break
        port = next(_ports)
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            free.append(port)
    if len(free) < count:
        raise OSError(f"no {count} ports of {host} are free")
    return free


def _ports_of_this_process() -> Iterator[int]:
    """Yield the ports of this worker of pytest-xdist repeatedly, below the ephemeral ports of kernels."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw") or "0"
    first = 12_000 + int(number) % 3 * PORTS_OF_PROCESS
    start = os.getpid() % PORTS_OF_PROCESS  # apart from other runs on this machine
    while True:
        yield from range(first + start, first + PORTS_OF_PROCESS)
        start = 0


_ports = _ports_of_this_process()


def port_addresses(workers: int, host: str = "127.0.0.1") -> list[str]:
    """Addresses of free ports on the loopback interface."""
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    ports = free_ports(workers, "::1" if host == "[::1]" else "127.0.0.1", family)
    return [f"{host}:{port}" for port in ports]


def until_listening(address: str) -> None:
    """Return when a process accepts connections at the address."""
    give_up = time.monotonic() + LIMIT_S
    while True:
        try:
            Address.parse(address).reach(LIMIT_S)
        except OSError:
            assert time.monotonic() < give_up, f"nobody listens at {address}"
            time.sleep(0.02)
        else:
            return


def facts_of_process(worker: Worker) -> dict[str, str]:
    """Return the kernel's facts about a worker: VmRSS, VmHWM, Threads, ..."""
    lines = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def mebibytes_of(worker: Worker, fact: str = "VmHWM") -> float:
    """Return a size from `facts_of_process` in MiB."""
    return int(facts_of_process(worker)[fact].split()[0]) / 1024


def until_few_threads(worker: Worker, most: int) -> None:
    """Return when a worker has at most that many threads; threads of ended streams need a moment to go."""
    give_up = time.monotonic() + LIMIT_S
    while (threads := threads_of(worker)) > most:
        assert time.monotonic() < give_up, f"{threads} threads are left, more than {most}"
        time.sleep(0.02)


def threads_of(worker: Worker) -> int:
    """Return the number of threads of a worker."""
    return int(facts_of_process(worker)["Threads"])


def seconds_since(started: float) -> float:
    """Return the seconds since a time on the monotonic clock."""
    return time.monotonic() - started


def is_root() -> bool:
    """Return whether this process may set up networks."""
    return os.geteuid() == 0
