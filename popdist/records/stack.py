"""Shows the Python stack of this process to its supervisor, which asks by a signal, whatever the program is doing."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping

VARIABLE = "POPRUN_STACK"
"""`descriptor:signal`: the memory file that gets the stack, and what asks for it."""


def show_stack_when_asked(environ: Mapping[str, str]) -> None:
    """Have the stacks of all threads written when the supervisor asks; nothing where there is no supervisor.

    They are written inside the handler of the signal, so that a program shows them that never returns to Python.
    """
    descriptor, _, number = environ.get(VARIABLE, "").partition(":")
    if not (descriptor.isdecimal() and number.isdecimal()):
        return
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:poprun-stack"):
            return  # a child that did not inherit it, and has another file there
        faulthandler.register(int(number), file=int(descriptor), all_threads=True)
        os.write(int(descriptor), b"\n")  # tells the supervisor that the signal will not end this process
    except OSError:
        return
