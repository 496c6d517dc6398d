"""Facts about a process for its supervisor: the time it has waited for others, and its stacks."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collectives.calls import Call


STACK_VARIABLE = "POPRUN_STACK"
"""`descriptor:signal`: the memory file for the Python stacks of a stuck instance, and the signal that requests them."""


@final
class Waits:
    """An instrument that sums up the time from each collective's begin until all instances have come.

    Args:
        now_s: Clock.

    Attributes:
        waited_s: Sum of these times.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.waited_s = 0.0
        self._now_s = now_s
        self._began_s = 0.0

    def operation_begins(self, number: int, call: Call) -> None:
        self._began_s = self._now_s()

    def data_moves(self, nbytes: int) -> None:
        self.waited_s += self._now_s() - self._began_s


def show_stack_when_asked(environ: Mapping[str, str]) -> None:
    """Write the stacks of all threads whenever the supervisor asks for them; does nothing without a supervisor.

    The handler of the signal writes them, so this works even if the program never returns to the interpreter.
    """
    descriptor, _, number = environ.get(STACK_VARIABLE, "").partition(":")
    if not (descriptor.isdecimal() and number.isdecimal()):
        return
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:poprun-stack"):
            return  # a child without the memory file; this descriptor is another file
        faulthandler.register(int(number), file=int(descriptor), all_threads=True)
        os.write(int(descriptor), b"\n")  # tells the supervisor that the signal will not end this process
    except OSError:
        return
