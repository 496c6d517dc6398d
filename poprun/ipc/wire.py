"""The messages between poprun and its agents: type, length and content. Pure.

The program's words reach the agent on mpirun's command line, and mpirun (5.0.11) interprets every word up to a `--`,
even behind the program: `:` begins another program, `--mca` sets parameters, a final `--prtemca` ends mpirun, and
`--bind-to` becomes `--bindto`. So `mark` writes words in a form that mpirun does not interpret.
"""

from __future__ import annotations

import signal
import struct

CONTROL_VARIABLE = "POPRUN_CONTROL"
"""Folder, address and streams by which agents reach poprun. mpirun forwards the variable by name."""

IGNORES_HANGUP = "/nohup"
"""The end of CONTROL_VARIABLE if poprun ignores SIGHUP; then agents and programs ignore it on every host."""

TELLS_NOTICE = "/notice"
"""The end of CONTROL_VARIABLE, before IGNORES_HANGUP, if agents tell poprun of SIGUSR1 and do not pass it on."""

HOST_VARIABLE = "POPRUN_HOST"
"""Host for which an instance is meant, as the kernel of that host names it."""

HELLO = 1
"""Agent: rank, the program's pid, its clock, the job's token, its host; the first message."""
STDOUT = 2
"""Agent: whole lines of the program's standard output, or a piece of a line that has waited long enough."""
STDERR = 3
"""Agent: the same for standard error."""
ENDED = 4
"""Agent: the end of the program; all of the program's own output has been sent before."""
PROGRESS = 5
"""Agent: its clock, whether the program is stopped, effort and memory, and a copy of the progress page."""
TOLD = 6
"""Agent: the signal by which mpirun told it to stop; ORPHANED: its parent, mpirun or a daemon, is gone."""
ORPHANED = int(signal.SIGRTMIN)
"""The signal by which the kernel tells an agent that its parent is gone; no other program sends it."""
CLOSED = 7
"""Agent: no process of the instance is left."""
WANT = 8
"""Agent: the program has taken the last piece of standard input."""

EXAMINED = 9
"""Agent: the state of the program's process, and its Python stack if it shows one."""

NOTICED = 10
"""Agent: SIGUSR1 has come, because the host is about to go away; only if TELLS_NOTICE."""

REPORT = 64
"""poprun: send PROGRESS."""
SIGNAL = 65
"""poprun: pass this signal to the program."""
RELEASE = 66
"""poprun: the number of instances lost so far, which the program no longer waits for."""
STOP = 67
"""poprun: end all processes of the instance, then the agent."""
STDIN = 68
"""poprun: a piece of standard input; an empty piece is the end."""

EXAMINE = 69
"""poprun: send EXAMINED."""

WANT_ACTIVE = 70
"""poprun: its wish about the active instances, as `popdist.records.wanted.Wanted.pack` returns it."""

BEGIN = 71
"""poprun: begin the program of a reserve."""

CALL = 72
"""poprun: take part in the change of the members that another process has begun, for the wish of this number."""

MOST_OF_STRANGERS = 1 << 10
"""The most bytes of a message before the sender has proved that it belongs to the job; a HELLO is shorter."""
MOST_BYTES = 1 << 26
"""The most bytes of a message; the longest pieces of output have an eighth of it."""

_HEAD = struct.Struct("!BI")
_HELLO = struct.Struct("!IId16s")
_ENDED = struct.Struct("!???id")
_PROGRESS = struct.Struct("!d?dQQ")
_NUMBER = struct.Struct("!I")


def pack(kind: int, content: bytes = b"") -> bytes:
    """Pack one message."""
    return _HEAD.pack(kind, len(content)) + content


def pack_hello(rank: int, pid: int, clock_s: float, token: bytes, host: str) -> bytes:
    """Pack a HELLO: instance, program's pid, `time.monotonic` of the host, the job's token of 16 bytes, host name."""
    return pack(HELLO, _HELLO.pack(rank, pid, clock_s, token) + host.encode())


def unpack_hello(content: bytes) -> tuple[int, int, float, bytes, str]:
    """Return the arguments of `pack_hello`.

    Raises:
        ValueError: The content is not that of a HELLO.
    """
    if len(content) < _HELLO.size:
        raise ValueError(f"a HELLO has {_HELLO.size} bytes or more, this one has {len(content)}")
    rank, pid, clock_s, token = _HELLO.unpack_from(content)
    return rank, pid, clock_s, token, content[_HELLO.size :].decode()


def pack_ended(by_signal: bool, told: bool, lacked_memory: bool, number: int, at_s: float) -> bytes:
    """Pack an ENDED: exit status or signal, whether the agent was told to stop, whether memory ran out, the time."""
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
    """Return the number in a message of `pack_number`."""
    number: int = _NUMBER.unpack(content)[0]
    return number


class MessageReader:
    """A reader that cuts a byte stream into messages.

    Args:
        most_of_first: The largest accepted content of the first message, in bytes.
    """

    def __init__(self, most_of_first: int = MOST_BYTES) -> None:
        self._most_bytes = most_of_first
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add received bytes; return the messages that are complete now, as type and content.

        Raises:
            ValueError: A message is announced that is too long. Its data and the rest of `data` are useless.
        """
        self._held += data
        messages = []
        start = 0
        while len(self._held) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._held, start)
            if length > self._most_bytes:
                raise ValueError(f"a message has {length} bytes, but at most {self._most_bytes} are accepted")
            end = start + _HEAD.size + length
            if end > len(self._held):
                break
            messages.append((kind, bytes(self._held[start + _HEAD.size : end])))
            start = end
            self._most_bytes = MOST_BYTES
        del self._held[:start]
        return messages


MARK = "+"
"""The prefix of words that mpirun could interpret, and of words that begin with the prefix themselves."""

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._")
_LAST_OF_ASCII = "\x7f"


def mark(word: str) -> str:
    """Return the form of a word for mpirun; a word that begins like a name, a number or a path stays unchanged."""
    return word if word[:1] in _PLAIN or word[:1] > _LAST_OF_ASCII else MARK + word


def unmark(word: str) -> str:
    """Return the original of a word from `mark`."""
    return word.removeprefix(MARK)
