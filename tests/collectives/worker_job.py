"""One worker of a group over gRPC, for tests that observe, disturb or end it: `worker_job.py TASK RANK ADDRESS...`.

It reports its actions on standard output and takes commands, one a line, from standard input. All workers of a
group end well together once the standard input of one of them ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue

import numpy as np

import collectives
from collectives import Communicator
from collectives.backends.grpc import connect_survivors

ORDINARY = collectives.Limits()


class Orders:
    """The commands of the test."""

    def __init__(self) -> None:
        self.lines: SimpleQueue[str] = SimpleQueue()
        self.is_over = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.lines.put(line.strip())
        self.is_over.set()
        self.lines.put("go")


def say(text: str) -> None:
    print(text, flush=True)


def reduce_again_and_again(communicator: Communicator, orders: Orders, options: argparse.Namespace) -> None:
    """Run all-reduces until one of the workers shall end; each `report` is answered after one more of them."""
    ranks = range(1, communicator.size + 1)
    buffer = np.empty(options.length + 1, np.float32)
    for number in count(1):
        value = number % 7 + 1
        is_asked = not orders.lines.empty() and not orders.is_over.is_set()
        buffer[:-1] = (communicator.rank + 1) * value
        buffer[-1] = orders.is_over.is_set()
        communicator.all_reduce(buffer, name="weights")
        wrong = int(np.count_nonzero(buffer[:-1] != sum(ranks) * value))
        if wrong:
            say(f"{wrong} elements are wrong in round {number}")
            sys.exit(3)
        if number == 1:
            say("round 1 was right")
        if is_asked:
            orders.lines.get()
            say(f"report: {number} rounds were right")
        if buffer[-1]:
            say(f"all {number} rounds were right")
            return
        time.sleep(options.pause_s)


def stay_away(communicator: Communicator, orders: Orders, options: argparse.Namespace) -> None:
    """Meet once; then the absent ranks wait for their commands, while the others call the next all-reduce."""
    communicator.barrier(name="begin")
    buffer = np.ones(options.length, np.float32)
    if communicator.rank in options.absent:
        say("is away")
        obey(orders.lines.get())
    else:
        say("waits")
    communicator.all_reduce(buffer, name="weights")
    say(f"all of {buffer.size} elements are {set(buffer.tolist())}")


def obey(order: str) -> None:
    """Obey a command of an absent rank, which may end the process before the all-reduce."""
    if order == "raise":
        raise RuntimeError("out of data")
    if order == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "exit":
        sys.exit(0)


def forget_to_close(communicator: Communicator, orders: Orders, options: argparse.Namespace) -> None:
    """Do as `stay_away`, but end the absent ranks without notice."""
    communicator.barrier(name="begin")
    if communicator.rank in options.absent:
        say("is away")
        orders.lines.get()
        FORGOTTEN.append(communicator)
        return
    say("waits")
    communicator.all_reduce(np.ones(options.length, np.float32), name="weights")


FORGOTTEN: list[Communicator] = []

TASKS: dict[str, Callable[[Communicator, Orders, argparse.Namespace], None]] = {
    "rounds": reduce_again_and_again,
    "away": stay_away,
    "forget": forget_to_close,
}


def main() -> None:
    warnings.simplefilter("error")
    logging.basicConfig(format="%(levelname)s %(message)s")
    options = read_options()
    orders = Orders()
    say("begins")
    limits = collectives.Limits(options.stall_warning_s, options.timeout_s, options.connect_timeout_s)
    settings = collectives.Settings(limits=limits)
    communicator = collectives.connect(
        "grpc",
        settings,
        addresses=options.addresses,
        rank=options.rank,
        description=options.description,
        shrinks=options.shrinks,
    )
    say("has met the others")
    if options.names_only_at_first:
        socket.getaddrinfo = never_answered
    if options.task == "forget":
        forget_to_close(communicator, orders, options)
        if not FORGOTTEN:
            communicator.close()
        return
    while options.shrinks:
        try:
            TASKS[options.task](communicator, orders, options)
            communicator.close()
            return
        except collectives.PeerLostError:
            lost, communicator = communicator, connect_survivors(settings, communicator)
            lost.abandon()
            say(f"goes on as rank {communicator.rank} of {communicator.size}")
    with communicator:
        TASKS[options.task](communicator, orders, options)


def never_answered(*question: object, **options: object) -> None:
    """Wait for ever, like a look-up by a name server behind a cut network."""
    threading.Event().wait()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("rank", type=int)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--length", type=int, default=1003)
    parser.add_argument("--absent", type=int, nargs="*", default=[])
    parser.add_argument("--description", default="")
    parser.add_argument("--shrinks", action="store_true")
    parser.add_argument("--names-only-at-first", action="store_true")
    parser.add_argument("--pause-s", type=float, default=0.0, help="between two rounds")
    parser.add_argument("--stall-warning-s", type=float, default=ORDINARY.stall_warning_s)
    parser.add_argument("--timeout-s", type=float, default=ORDINARY.timeout_s)
    parser.add_argument("--connect-timeout-s", type=float, default=ORDINARY.connect_timeout_s)
    return parser.parse_args()


if __name__ == "__main__":
    main()
