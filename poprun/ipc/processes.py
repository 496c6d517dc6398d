"""Processes: started, adopted and ended with Linux calls, without the loading time of `subprocess`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)
_SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LOOK_S = 0.003
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these signals; programs expect the default


def die_with_parent(number: int) -> None:
    """Make the kernel send this signal to the calling process when its parent ends."""
    _prctl(_SET_DEATH_SIGNAL, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (a subreaper), so that it can be found and ended."""
    _prctl(_SET_SUBREAPER, 1)


def heeded(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the signals without SIGHUP if it is ignored: a job under nohup outlives its terminal."""
    return tuple(number for number in numbers if number != signal.SIGHUP or not ignores_hangup())


def ignores_hangup() -> bool:
    """Return whether the calling process was started with SIGHUP ignored."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def catch_signals(numbers: Iterable[int]) -> int:
    """Turn signals into bytes in a pipe, and return its reading end, which never blocks. An ignored SIGHUP stays so."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in heeded(numbers):
        signal.signal(number, lambda *_: None)
    return reader


def start(words: list[str], environ: dict[str, str], prepare: Callable[[], None]) -> int:
    """Start a program as a child process.

    All signals are blocked during the fork: if Python raised an exception for a signal there, the fork hooks would drop
    it.

    Args:
        words: The program, looked up in PATH, and its arguments.
        environ: The environment of the program.
        prepare: Function that is called in the child before it becomes the program.

    Returns:
        The process id. If the program cannot start, the child prints the reason on standard error and ends with 127.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        prepare()
        os.execvpe(words[0], words, environ)
    except BaseException as error:
        os.write(2, f"poprun: cannot start {words[0]}: {error}\n".encode(errors="replace"))
    os._exit(127)


def descendants(ancestor: int) -> list[int]:
    """Return the living descendants of a process, from one reading of /proc."""
    children: dict[int, list[int]] = {}
    ended = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        state, parent = _read_stat(name)
        children.setdefault(parent, []).append(int(name))
        if state in (b"Z", b"X"):  # perhaps only its first thread has ended, and it still has children
            ended.add(int(name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return [pid for pid in found if pid not in ended]


def end_descendants(limit_s: float = float("inf")) -> None:
    """Kill and reap all descendants, including new ones, until none is left.

    The caller has to be a subreaper, so that orphans become its children.

    Args:
        limit_s: Seconds after which to give up on processes that survive SIGKILL, because they wait for a broken disk
            or file server.
    """
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        reap()
        if not _has_children():  # checked after reaping, because a child that ends may leave its own children to us
            return
        for pid in descendants(os.getpid()):
            send(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def reap() -> dict[int, int]:
    """Reap the children that have ended, including adopted ones, and return their wait status by process id."""
    ended: dict[int, int] = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return ended
            ended[pid] = status
    except ChildProcessError:
        return ended


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    return _read_stat(str(pid))[1]


def send(pid: int, number: int) -> None:
    """Send a signal; ignore a process that is gone or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def state_of(pid: int) -> bytes:
    """Return the letter of a process's state (proc(5)): `T` if stopped, `X` if gone."""
    return _read_stat(str(pid))[0]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _read_stat(pid: str) -> tuple[bytes, int]:
    """Read the state and the parent of a process."""
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
