"""The messages between poprun and its agents: a type, a length, and the content. Pure.

The program's words reach the agent on mpirun's command line. mpirun (5.0.11) looks at all words up to a `--`, those
behind the program too: it begins another program at `:`, takes parameters from `--mca`, ends at a `--prtemca` that is
the last word, and hands `--bind-to` on as `--bindto`. So `mark` writes words in a way that mpirun reads none of them.
"""

from __future__ import annotations

import signal
import struct

CONTROL_VARIABLE = "POPRUN_CONTROL"
"""Folder, address and streams by which agents reach poprun. mpirun forwards the variable by name."""

IGNORES_HANGUP = "/nohup"
"""At the end of CONTROL_VARIABLE: poprun ignores SIGHUP, so agents and programs do, on every host."""

HOST_VARIABLE = "POPRUN_HOST"
"""Host for which an instance is meant, as the kernel of that host names it."""

HELLO = 1
"""agent: rank, program's pid, its clock, the job's token, its host; the first message."""
STDOUT = 2
"""agent: whole lines of the program's standard output, or a piece without line end that has waited."""
STDERR = 3
"""agent: the same for standard error."""
ENDED = 4
"""agent: how the program ended; all of its own output has been sent."""
PROGRESS = 5
"""agent: its clock, whether the program is stopped, its effort and memory, and a copy of the progress page."""
TOLD = 6
"""agent: mpirun has told it to stop, by this signal; ORPHANED: what has started it, mpirun or its daemon, is gone."""
ORPHANED = int(signal.SIGRTMIN)
"""The signal by which the kernel tells an agent so; nobody else sends it."""
CLOSED = 7
"""agent: no process of the instance is left."""
WANT = 8
"""agent: the program has taken the last piece of standard input."""

EXAMINED = 9
"""agent: the state of the program's process, and its Python stack if it shows one."""

REPORT = 64
"""poprun: send PROGRESS."""
SIGNAL = 65
"""poprun: pass this signal to the program."""
RELEASE = 66
"""poprun: so many instances are lost that waiting for the others is of no use any more."""
STOP = 67
"""poprun: end what is left of the instance and go."""
STDIN = 68
"""poprun: a piece of standard input; an empty one is the end."""

EXAMINE = 69
"""poprun: send EXAMINED."""

MOST_OF_STRANGERS = 1 << 10
"""Bytes of a message from somebody who has not proved yet that he belongs to the job; a HELLO has less."""
MOST_BYTES = 1 << 26
"""Bytes of a message; the longest pieces of output have an eighth of it."""

_HEAD = struct.Struct("!BI")
_HELLO = struct.Struct("!IId16s")
_ENDED = struct.Struct("!???id")
_PROGRESS = struct.Struct("!d?dQQ")
_NUMBER = struct.Struct("!I")


def pack(kind: int, content: bytes = b"") -> bytes:
    """Pack one message."""
    return _HEAD.pack(kind, len(content)) + content


def pack_hello(rank: int, pid: int, clock_s: float, token: bytes, host: str) -> bytes:
    """Pack a HELLO: instance, program, the host's `time.monotonic`, the job's token of 16 bytes, the host's name."""
    return pack(HELLO, _HELLO.pack(rank, pid, clock_s, token) + host.encode())


def unpack_hello(content: bytes) -> tuple[int, int, float, bytes, str]:
    """Return the arguments of `pack_hello`.

    Raises:
        ValueError: it is no HELLO.
    """
    if len(content) < _HELLO.size:
        raise ValueError(f"a HELLO has {_HELLO.size} bytes or more, this one has {len(content)}")
    rank, pid, clock_s, token = _HELLO.unpack_from(content)
    return rank, pid, clock_s, token, content[_HELLO.size :].decode()


def pack_ended(by_signal: bool, told: bool, lacked_memory: bool, number: int, at_s: float) -> bytes:
    """Pack an ENDED: exit status or signal, whether the agent was told to stop, whether memory lacked, and the time."""
    return pack(ENDED, _ENDED.pack(by_signal, told, lacked_memory, number, at_s))


def unpack_ended(content: bytes) -> tuple[bool, bool, bool, int, float]:
    """Return the arguments of `pack_ended`."""
    by_signal, told, lacked_memory, number, at_s = _ENDED.unpack(content)
    return by_signal, told, lacked_memory, number, at_s


def pack_progress(
    now_s: float, page: bytes, is_stopped: bool = False, effort: float = 0.0, memory: tuple[int, int] = (0, 0)
) -> bytes:
    """Pack a PROGRESS: the agent's clock, the page, whether stopped, effort, resident memory and its peak."""
    return pack(PROGRESS, _PROGRESS.pack(now_s, is_stopped, effort, *memory) + page)


def unpack_progress(content: bytes) -> tuple[float, bytes, bool, float, tuple[int, int]]:
    """Return the arguments of `pack_progress`."""
    now_s, is_stopped, effort, *memory = _PROGRESS.unpack_from(content)
    return now_s, content[_PROGRESS.size :], is_stopped, effort, (memory[0], memory[1])


def pack_number(kind: int, number: int) -> bytes:
    """Pack a message that holds one number, such as SIGNAL or TOLD."""
    return pack(kind, _NUMBER.pack(number))


def unpack_number(content: bytes) -> int:
    """Return the number of such a message."""
    number: int = _NUMBER.unpack(content)[0]
    return number


class MessageReader:
    """Cuts a byte stream into messages.

    Args:
        most_of_first: the longest content of the first message that is collected.
    """

    def __init__(self, most_of_first: int = MOST_BYTES) -> None:
        self._most_bytes = most_of_first
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the messages that are complete now, as type and content.

        Raises:
            ValueError: one is announced that is too long; nothing of it, or of what came with it, is of use.
        """
        self._held += data
        messages = []
        start = 0
        while len(self._held) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._held, start)
            if length > self._most_bytes:
                raise ValueError(f"a message has {length} bytes, and {self._most_bytes} at most are taken")
            end = start + _HEAD.size + length
            if end > len(self._held):
                break
            messages.append((kind, bytes(self._held[start + _HEAD.size : end])))
            start = end
            self._most_bytes = MOST_BYTES
        del self._held[:start]
        return messages


MARK = "+"
"""Stands before each word that could mean something to mpirun, and before those that begin with it themselves."""

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._")
_LAST_OF_ASCII = "\x7f"


def mark(word: str) -> str:
    """Return a word as mpirun gets it; one that begins like a name, a number or a path is unchanged."""
    return word if word[:1] in _PLAIN or word[:1] > _LAST_OF_ASCII else MARK + word


def unmark(word: str) -> str:
    """Return the word that `mark` was given."""
    return word.removeprefix(MARK)
