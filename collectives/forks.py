"""Forked children: connections, threads and exit handlers stay with the process that made them."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from collectives.errors import ForkedProcessError


class Belonging(Protocol):
    """An object that only the process that made it can use."""

    def disown(self) -> None:
        """Refuse further use, because this process is a forked child of the owner.

        A thread of the owner, which the child does not have, may have held any lock of the object.
        """


generation = 0
"""The number of forks since the first process of the program: another number in every child."""

_belongings: WeakSet[Belonging] = WeakSet()
_inherited: list[Belonging] = []  # kept alive: their destructors would use connections of the owner
_never_freed: list[object] = []
_exit_handlers: list[Callable[[], object]] = []


def keep_from_children(belonging: Belonging) -> None:
    """Call `belonging.disown` in every child that is forked from this process."""
    _belongings.add(belonging)


def never_free_in_children(one: object) -> None:
    """Keep an object to the end, and in forked children beyond it: its destructor waits for a thread of the owner."""
    _never_freed.append(one)


def at_exit(handler: Callable[[], object]) -> None:
    """Register an exit handler of this process, which its forked children do not run."""
    _exit_handlers.append(handler)
    atexit.register(handler)


def not_at_exit(handler: Callable[[], object]) -> None:
    """Unregister a handler of `at_exit`; do nothing if it is not registered."""
    if handler in _exit_handlers:
        _exit_handlers.remove(handler)
    atexit.unregister(handler)


def refusal(owner: str) -> ForkedProcessError:
    """Return the error of a call in a child that was forked from the owner."""
    return ForkedProcessError(
        f"this process ({os.getpid()}) is a child that was forked from {owner}; collectives belong to the parent: call "
        "them there, and pass their results to the child"
    )


def refuse_in_child(made_in: int, owner: str) -> None:
    """Refuse the use of an object that another process has made.

    Args:
        made_in: `generation` when the object was made.
        owner: Process that has made it, for the message.

    Raises:
        ForkedProcessError: This process was forked since.
    """
    if made_in != generation:
        raise refusal(owner)


def _begin_child() -> None:
    """Disown everything of the parent; Python calls this in a forked child, before the program goes on."""
    global generation
    generation += 1
    for handler in _exit_handlers:
        atexit.unregister(handler)
    _exit_handlers.clear()
    _inherited.extend(_belongings)
    _belongings.clear()
    for each in _inherited:
        each.disown()
    for one in _never_freed:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))  # a list would be emptied at the end of Python


os.register_at_fork(after_in_child=_begin_child)
