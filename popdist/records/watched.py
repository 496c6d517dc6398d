"""Facts about a process for its supervisor: how long it has waited for others, and its stacks."""

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
    """An instrument that adds up the time from the beginning of each collective until all instances have come to it.

    Args:
        now_s: a clock.

    Attributes:
        waited_s: the sum.
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
    """Have the stacks of all threads written when the supervisor asks; nothing where there is no supervisor.

    They are written inside the handler of the signal, so that a program shows them that never returns to Python.
    """
    descriptor, _, number = environ.get(STACK_VARIABLE, "").partition(":")
    if not (descriptor.isdecimal() and number.isdecimal()):
        return
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:poprun-stack"):
            return  # a child that did not inherit it, and has another file there
        faulthandler.register(int(number), file=int(descriptor), all_threads=True)
        os.write(int(descriptor), b"\n")  # tells the supervisor that the signal will not end this process
    except OSError:
        return
