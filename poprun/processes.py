"""Starting, adopting and ending processes the Linux way, without the weight of `subprocess`."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)
_SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these; programs expect the default


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent ends."""
    _prctl(_SET_DEATH_SIGNAL, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that it can be found and ended."""
    _prctl(_SET_SUBREAPER, 1)


def catch_signals(numbers: Iterable[int]) -> int:
    """Turn signals into bytes in a pipe; its reading end, which never waits."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reader


def start(words: list[str], environ: dict[str, str], prepare: Callable[[], None]) -> int:
    """Start a program as a child.

    Args:
        words: the program, looked up in PATH, and its arguments.
        environ: its environment.
        prepare: called in the child before it becomes the program.

    Returns:
        Its process id. A program that cannot be started says why on its standard error and ends with 127.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        prepare()
        os.execvpe(words[0], words, environ)
    except BaseException as error:
        os.write(2, f"poprun: cannot start {words[0]}: {error}\n".encode(errors="replace"))
    os._exit(127)


def descendants(ancestor: int) -> list[int]:
    """The living descendants of a process, from one look at /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (parent := _living_parent(name)):
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone already is fine."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def state_of(pid: int) -> bytes:
    """The letter of a process's state, see proc(5): `T` for one that is stopped; `X` for one that is gone."""
    return _read_stat(str(pid))[0]


def _living_parent(pid: str) -> int:
    """The parent of a process that is not a zombie; 0 when there is none."""
    state, parent = _read_stat(pid)
    return 0 if state in (b"Z", b"X") else parent


def _read_stat(pid: str) -> tuple[bytes, int]:
    """The state and the parent of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split(None, 2)[:2]
        return state, int(parent)
    except (OSError, ValueError):
        return b"X", 0


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
