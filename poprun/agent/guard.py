"""The agent: runs the program of one instance, forwards its output, and leaves none of its processes behind.

The agent talks to poprun over a socket. If the socket closes, poprun is gone and the agent ends the instance. The agent
runs in an isolated interpreter and has to start fast, so it imports little, all of it from the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from poprun.agent.guard_machine import CUT_SIGNAL, PASSED_ON, STACK_SIGNAL, STOPPING, Action, Do, GuardMachine
from poprun.agent.keeper import put_keeper_above
from poprun.agent.link import ControlLink
from poprun.agent.process_statistics import Activity, MemoryUse, OutOfMemory
from poprun.agent.program_output import ProgramOutput
from poprun.ipc import wire
from poprun.ipc.processes import (
    adopt_orphans,
    catch_signals,
    descendants,
    die_with_parent,
    end_descendants,
    parent_of,
    send,
    start,
    state_of,
)
from poprun.ipc.streams import InputFeed, open_outputs

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load
if TYPE_CHECKING:
    from collections.abc import Callable

PROGRESS_VARIABLE = "POPRUN_PROGRESS_FD"
STACK_VARIABLE = "POPRUN_STACK"
HOLDING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "holding")
"""The folder with the file that holds a reserve before its program begins."""
ALONE_VARIABLE = "POPDIST_ALONE"
"""The name of popdist's variable for processes outside of a job; programs of this job must not inherit it. It is
repeated here, because popdist takes too long to load.
"""
RESERVE_VARIABLE = "POPDIST_RESERVE"
"""The name of popdist's variable for a process whose program waits until poprun starts it, repeated likewise."""
PAGE_BYTES = 4096
NEW_PAGE = b"POPRUN3\0" + bytes(PAGE_BYTES - 8)
OWNER_OFFSET, SINCE_OFFSET, RELEASED_OFFSET, SUPERVISOR_OFFSET, WANTED_OFFSET = 8, 40, 64, 80, 184
BEGUN_OFFSET = 200
CALLED_OFFSET = 224

STACK_BYTES = 1 << 16
_NEVER = float("inf")


def guard_program(cpus: str, words: list[str], environ: dict[str, str]) -> int:
    """Run a program until it and all its descendants have ended, and return the agent's exit status.

    Args:
        cpus: The CPUs to pin the program to, such as `0-3,8`, or `any`.
        words: The program and its arguments.
        environ: The environment; variables for the agent are removed from it, and the rest goes to the program.
    """
    daemon = os.getppid()
    control = environ.pop(wire.CONTROL_VARIABLE)
    environ.pop(ALONE_VARIABLE, None)
    if control.endswith(wire.IGNORES_HANGUP):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # mpirun has reset it to the default
    control = control.removesuffix(wire.IGNORES_HANGUP)
    tells_notice = control.endswith(wire.TELLS_NOTICE)
    place, token, terminals = control.removesuffix(wire.TELLS_NOTICE).rsplit(" ", 2)
    directory, _, address = place.rpartition(" ")
    blocked = put_keeper_above(lambda was_orderly: _tidy(environ, was_orderly, address))
    wakeup = catch_signals((*STOPPING, *PASSED_ON, CUT_SIGNAL, signal.SIGCHLD))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    adopt_orphans()
    rank = int(environ["OMPI_COMM_WORLD_RANK"])
    meant_for = environ.pop(wire.HOST_VARIABLE, os.uname().nodename)
    if meant_for != os.uname().nodename:
        _refuse_host(meant_for, rank, ControlLink(address), token)
        return 1
    page = _new_page(environ)
    stack = _new_file("poprun-stack", environ, STACK_VARIABLE, suffix=f":{STACK_SIGNAL}")
    outputs = open_outputs(terminals)
    stdin, feed = os.pipe() if rank == 0 else (os.open(os.devnull, os.O_RDONLY), -1)
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)  # mpirun's signals to its process group must not reach the program
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        os.dup2(stdin, 0)
        for target, (_, writer) in outputs.items():
            os.dup2(writer, target)
        if directory:
            check_directory(directory)
        if cpus != "any":
            os.sched_setaffinity(0, parse_cpus(cpus))

    if RESERVE_VARIABLE in environ:
        environ[RESERVE_VARIABLE] = str(parent)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HOLDING, environ.get("PYTHONPATH"))))
    pid = start(words, environ, prepare)
    os.close(stdin)
    for _, writer in outputs.values():
        os.close(writer)
    try:
        link = ControlLink(address)
    except OSError:  # poprun is gone
        end_descendants()
        raise
    link.send(wire.pack_hello(rank, pid, time.monotonic(), bytes.fromhex(token), os.uname().nodename))
    machine = GuardMachine(tells_notice)
    Guard(pid, page, stack, link, wakeup, [outputs[1][0], outputs[2][0]], InputFeed(feed), machine).run()
    if link.is_cut and parent_of(os.getppid()) == daemon:
        # The daemon's report about our instance is still unconfirmed, and keepalive does not end a connection with
        # unconfirmed data. So the daemon would not end by itself.
        send(daemon, signal.SIGTERM)
    return 0


def _refuse_host(meant_for: str, rank: int, link: ControlLink, token: str) -> None:
    """Report to poprun that Open MPI has started this agent on a wrong host; the program is not started."""
    here, now_s = os.uname().nodename, time.monotonic()
    text = (
        f"instance {rank} is meant for host {meant_for}, but Open MPI has started it on {here}, so it does not run. "
        "Give the hosts names that differ before the first dot, or name them by address (--host 10.0.0.1,10.0.0.2)\n"
    )
    link.send(wire.pack_hello(rank, os.getpid(), now_s, bytes.fromhex(token), here))
    link.send(wire.pack(wire.STDERR, text.encode()))
    link.send(wire.pack_ended(False, False, False, 1, now_s))
    link.send(wire.pack(wire.CLOSED))
    while link.is_open and not any(kind == wire.STOP for kind, _ in link.receive()):
        pass


class Guard:
    """The event loop around the machine of one instance; it also forwards output and input.

    Args:
        pid: The process of the program.
        page: Descriptor of the memory file with the program's progress record; -1 without one.
        stack: Descriptor of the memory file for the program's stack; -1 without one.
        link: The connection to poprun.
        wakeup: Descriptor from which the numbers of received signals are read.
        outputs: Descriptors of the program's standard output and error.
        feed: The program's standard input.
        machine: The state of the instance.
        now_s: The clock, like `time.monotonic`.
    """

    def __init__(
        self,
        pid: int,
        page: int,
        stack: int,
        link: ControlLink,
        wakeup: int,
        outputs: list[int],
        feed: InputFeed,
        machine: GuardMachine,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._page = page
        self._stack = stack
        self._machine = machine
        self._ended_at_s = _NEVER
        self._link = link
        self._wakeup = wakeup
        self._feed = feed
        self._out_of_memory = OutOfMemory()
        self._memory = MemoryUse()
        self._activity = Activity(pid)
        self._now_s = now_s
        self._poll = select.poll()
        for descriptor in (wakeup, link.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._output = ProgramOutput(outputs, self._poll, link, now_s)
        if feed.is_open:
            os.set_blocking(feed.descriptor, False)
            link.send(wire.pack(wire.WANT))

    def run(self) -> None:
        """Serve until no process of the instance is left and poprun, or its end, dismisses the agent."""
        while not self._machine.is_over:
            for descriptor, _ in self._poll.poll(self._timeout_ms()):
                self._serve(descriptor)
            self._hand_over_input()
            now_s = self._now_s()
            self._output.keep_pace(now_s)
            self._keep_time(now_s)

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._wakeup:
            for number in os.read(descriptor, 512):
                self._do(self._machine.take_signal(number, self._now_s()))
        elif descriptor in self._output:
            self._output.forward(descriptor)
        elif descriptor == self._link.fileno():
            self._obey()

    def _hand_over_input(self) -> None:
        """Write input to the program as far as it takes it; ask poprun for more when all is written."""
        if not self._feed.is_full:
            return
        descriptor = self._feed.descriptor
        self._feed.write()
        if self._feed.is_full:
            self._poll.register(descriptor, select.POLLOUT)
            return
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        if self._feed.is_open:
            self._link.send(wire.pack(wire.WANT))

    def _obey(self) -> None:
        for kind, content in self._link.receive():
            if kind == wire.REPORT:
                self._report()
            elif kind == wire.SIGNAL:
                self._do(self._machine.pass_on(wire.unpack_number(content)))
            elif kind == wire.RELEASE and self._page >= 0:
                os.pwrite(self._page, wire.unpack_number(content).to_bytes(8, "little"), RELEASED_OFFSET)
            elif kind == wire.WANT_ACTIVE and self._page >= 0:
                wanted = wire.unpack_number(content)
                os.pwrite(self._page, (wanted | (wanted ^ 0xFFFFFFFF) << 32).to_bytes(8, "little"), WANTED_OFFSET)
            elif kind == wire.BEGIN and self._page >= 0:
                os.pwrite(self._page, (1).to_bytes(8, "little"), BEGUN_OFFSET)
            elif kind == wire.CALL and self._page >= 0:
                os.pwrite(self._page, wire.unpack_number(content).to_bytes(8, "little"), CALLED_OFFSET)
            elif kind == wire.STDIN:
                self._feed.put(content)
            elif kind == wire.EXAMINE:
                size = os.fstat(self._stack).st_size if self._stack >= 0 else 0
                self._do(self._machine.examine(size, self._now_s()))
            elif kind == wire.STOP:
                self._machine.dismiss()
        if not self._link.is_open:
            self._machine.dismiss()
            self._poll.unregister(self._link.fileno())

    def _do(self, actions: list[Action]) -> None:
        for what, number in actions:
            if what is Do.SEND:
                send(self._worker() if number == STACK_SIGNAL else self._pid, number)
            elif what is Do.SWEEP:
                for pid in descendants(os.getpid()):
                    send(pid, signal.SIGKILL)
            elif what is Do.CUT:
                self._link.cut()
            elif what is Do.DRAIN:
                self._output.drain()
            elif what is Do.REPORT:
                self._report()
            elif what is Do.LOOK_AT_STACK:
                self._look_at_stack()
            elif what is Do.TELL_TOLD:
                self._link.send(wire.pack_number(wire.TOLD, number))
            elif what is Do.TELL_NOTICE:
                self._link.send(wire.pack(wire.NOTICED))
            elif what is Do.TELL_ENDED:
                self._tell_end(number)
            elif what is Do.TELL_CLOSED:
                self._link.send(wire.pack(wire.CLOSED))
            elif what is Do.TELL_STACK:
                stack = os.pread(self._stack, STACK_BYTES, number) if number >= 0 else b""
                self._link.send(wire.pack(wire.EXAMINED, self._state() + stack))

    def _tell_end(self, code: int) -> None:
        lacked_memory = code == -signal.SIGKILL and self._out_of_memory.has_just_killed(self._ended_at_s)
        was_told = bool(self._machine.told)
        self._link.send(wire.pack_ended(code < 0, was_told, lacked_memory, abs(code), self._ended_at_s))

    def _look_at_stack(self) -> None:
        size = os.fstat(self._stack).st_size if self._stack >= 0 else 0
        is_stopped = self._state() in (b"T", b"t")
        self._do(self._machine.see_stack(size, is_stopped, self._now_s()))

    def _worker(self) -> int:
        """Return the process to show the stack of: the program, or the worker that it has started."""
        worker = self._activity.worker
        return worker if worker in descendants(os.getpid()) else self._pid

    def _state(self) -> bytes:
        return b"T" if self._activity.is_stopped else state_of(self._activity.worker)

    def _report(self) -> None:
        page = b""
        if self._page >= 0:
            page, again = os.pread(self._page, PAGE_BYTES, 0), b""
            for _ in range(3):  # the program may write meanwhile
                again = os.pread(self._page, PAGE_BYTES, 0)
                if again == page:
                    break
                page = again
        now_s = self._now_s()
        self._out_of_memory.look(now_s)
        is_stopped, effort = self._look_at_program(page, now_s)
        memory = self._memory.look(self._activity.worker, now_s)
        self._link.send(wire.pack_progress(now_s, page, is_stopped, effort, memory))

    def _look_at_program(self, page: bytes, now_s: float) -> tuple[bool, float]:
        """Return whether the program is stopped, and its effort (0 after it has reached `popdist.init`)."""
        has_begun = page[SINCE_OFFSET : SINCE_OFFSET + 8].strip(b"\0")
        effort = 0.0 if has_begun else self._activity.effort(now_s)
        if owner := int.from_bytes(page[OWNER_OFFSET : OWNER_OFFSET + 8], "little"):
            self._activity.note_owner(owner)
        return self._activity.is_stopped, effort

    def _keep_time(self, now_s: float) -> None:
        self._output.let_go(now_s)
        self._reap()
        self._do(self._machine.tick(now_s))

    def _reap(self) -> None:
        try:
            while self._machine.has_children:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._memory.note_end(used.ru_maxrss)
                if pid == self._pid:
                    self._ended_at_s = self._now_s()
                    self._do(self._machine.note_end(os.waitstatus_to_exitcode(status), self._ended_at_s))
        except ChildProcessError:
            self._do(self._machine.note_none_left())

    def _timeout_ms(self) -> int | None:
        soonest = min(self._output.deadline_s, self._machine.deadline_s)
        if soonest == _NEVER:
            return None
        return max(0, int((soonest - self._now_s()) * 1000) + 1)


def check_directory(directory: str) -> None:
    """Refuse a working directory other than poprun's: if it is missing, Open MPI starts programs in $HOME.

    Raises:
        OSError: The current directory is another one, or poprun's is missing.
    """
    where = f"the working directory {directory} of poprun"
    way_out = f"make it on {os.uname().nodename}, or start poprun in one that all hosts have"
    try:
        is_here = os.path.samestat(os.stat(directory), os.stat("."))
    except OSError as error:
        raise OSError(f"{where} cannot be used here: {error.strerror}; {way_out}") from None
    if not is_here:
        raise OSError(f"{where} is not where Open MPI has started this instance, {os.getcwd()}; {way_out}")


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPU numbers in a list such as `0-3,8`."""
    bounds = (part.partition("-")[::2] for part in text.split(","))
    return tuple(cpu for low, high in bounds for cpu in range(int(low), int(high or low) + 1))


def _tidy(environ: dict[str, str], was_orderly: bool, address: str) -> None:
    """Remove files of dead jobs on this host: once for each host and job, and always if the agent was killed.

    On its own machine, poprun does it after each job, in the folder that mpirun uses by default.
    """
    folder = os.path.dirname(environ.get("PMIX_SERVER_TMPDIR", ""))
    is_left_to_poprun = address.startswith("unix:") and folder == (environ.get("TMPDIR") or "/tmp")
    if not was_orderly or (environ.get("OMPI_COMM_WORLD_LOCAL_RANK") == "0" and not is_left_to_poprun):
        from poprun.ipc.leavings import folder_of, remove_leavings

        remove_leavings(folder_of(environ))


def _new_file(name: str, environ: dict[str, str], variable: str, content: bytes = b"", suffix: str = "") -> int:
    """Make a memory file, and name it to the program in a variable; return its descriptor, or -1 on failure."""
    environ.pop(variable, None)
    try:
        file = os.memfd_create(name, 0)
        os.write(file, content)
    except OSError:
        return -1
    os.set_inheritable(file, True)
    environ[variable] = f"{file}{suffix}"
    return file


def _new_page(environ: dict[str, str]) -> int:
    """Make the memory file of the progress record."""
    pid = os.getpid().to_bytes(8, "little")
    content = NEW_PAGE[:SUPERVISOR_OFFSET] + pid + NEW_PAGE[SUPERVISOR_OFFSET + 8 :]
    return _new_file("poprun-progress", environ, PROGRESS_VARIABLE, content)
