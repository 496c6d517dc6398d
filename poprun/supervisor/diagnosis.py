"""Diagnosis of a failed job: the instance to blame, the lines about it, and the exit status. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from popdist.records.progress import State
from poprun.cli.log import Level
from poprun.cli.wording import count, list_instances
from poprun.ipc.facts import Ending, EndKind, Facts, JobEnd, Loss, Verdict, signal_name
from poprun.supervisor.job_events import Action, CleanUp, Deed, DeedKind, Finish, Say
from poprun.supervisor.signals import PASSED_ON

MOST_LINES = 15
SAME_MOMENT_S = 0.05
"""The difference in time below which the order of two ends is unknown. A signal from outside then counts as the cause.
"""

STUCK_STATUS = 124
"""The exit status of a job with a stuck instance, as of timeout(1)."""

SPARE_END_S = 1.0
"""The time within which an instance ends, or notes its end, if a spare has ended because the job is over."""

Wait = tuple[int, int, int]
"""A waiting instance, the instance it waits for, and the number of the collective."""


def vain_waits(facts: Sequence[Facts]) -> frozenset[Wait]:
    """Return the waits for instances that have ended with status 0 or run their exit handlers.

    A wait in `popdist.init` for an instance that has ended without calling it counts too.

    A single look may see a collective that is about to complete. A wait that two looks see is in vain.
    """
    gone = {each.index for each in facts if each.is_gone and not each.is_given_up}
    return frozenset(
        (each.index, other, each.record.number)
        for each in facts
        if each.ending is None and not each.record.is_leaving
        for other in _awaited_by(each, facts)
        if other in gone
    )


def has_failed(facts: Sequence[Facts]) -> bool:
    """Return whether an instance has failed by itself, not because it was told to stop."""
    return any(each.ending is not None and each.ending.is_own_failure and each.is_needed for each in facts)


def first_cause(facts: Sequence[Facts], in_vain: Iterable[Wait] = ()) -> int | None:
    """Return the instance that brought the job down; None if mpirun told every instance to stop.

    Begin with the earliest failure. If that instance failed inside a collective while it waited for an absent one, it
    is a victim: blame the absent instance instead, and repeat. Absent means gone, leaving, or failed.
    """
    failed = [each for each in facts if each.ending is not None and each.ending.is_own_failure and each.is_needed]
    if not failed:
        waited_for = sorted(gone for _, gone, _ in in_vain)
        return waited_for[0] if waited_for else _ended_by_itself(facts)
    blamed = min(failed, key=lambda each: _order(each, failed))
    seen = {blamed.index}
    while (cause := _cause_of(blamed, facts)) is not None and cause.index not in seen:
        blamed = cause
        seen.add(blamed.index)
    return blamed.index


def judge(facts: Sequence[Facts], here: str, in_vain: Iterable[Wait] = ()) -> Verdict | None:
    """Return the verdict on a failed job; None if no instance and no lost daemon explains the failure.

    Args:
        facts: The facts of each instance, by index.
        here: The host of mpirun, which needs no daemon.
        in_vain: The waits that two looks have seen.
    """
    in_vain = tuple(in_vain)
    if host := _orphaned_host(facts, here):
        return _blame_daemon(host, facts)
    index = first_cause(facts, in_vain)
    if index is None:
        return None
    blamed = facts[index]
    if any(_is_swept(each) for each in facts) and (_is_swept(blamed) or _is_victim(blamed)):
        return None
    if _is_victim(blamed) and _mpirun_was_gone(facts, blamed, here):
        return None
    if host := _host_without_daemon(facts, blamed):
        return _blame_daemon(host, facts) if host != here else None
    status = blamed.ending.exit_status if blamed.ending is not None else 1
    others = _describe_others(facts, index)
    if not others and blamed.ending is not None and _is_orderly(blamed.ending):
        name = signal_name(status - 128)
        text = f"{blamed.name} ended with exit status {status}, the usual status of a program that ends after {name}"
        return Verdict(index, status, (text,), lost=(index,), is_orderly=True)
    lines = (describe_failure(blamed, facts), *others)[:MOST_LINES]
    return Verdict(index, status, lines, _is_aborted(blamed, facts), is_of_hosts=is_of_hosts([blamed]), lost=(index,))


def is_of_hosts(failed: Sequence[Facts]) -> bool:
    """Return whether hosts, or links between them, have failed; Open MPI cannot go on after that."""
    return any(each.ending is not None and bool(each.ending.fault) for each in failed)


def describe_rest(left: Sequence[Facts], limit_s: float) -> list[str]:
    """Describe each ended instance that may still have processes, as its agent has not confirmed their end."""
    return [
        f"{each.name} has ended, but its supervisor process has not confirmed within {limit_s:g} s (--stuck-timeout-s) "
        "that all processes of the instance are gone; poprun stops waiting for it"
        for each in left[:MOST_LINES]
    ]


def judge_missing(facts: Sequence[Facts], mpirun_status: int | None) -> Verdict:
    """Return the verdict if mpirun has ended or was too slow to start, and no instance explains that."""
    missing = [each for each in facts if each.ending is None]
    never = [each.index for each in missing if not each.is_started]
    how = "the job was ended"
    if mpirun_status is not None:
        how = f"mpirun ended with {mpirun_status}"
    elif never:
        how = "mpirun did not start every instance in time"
    lines = [f"{how} before every instance had completed"]
    if never:
        lines.append(f"{list_instances(never)} never started")
    lines += [f"{name} did not report how it ended" for name in (each.name for each in missing if each.is_started)]
    stopped: dict[tuple[str, str], list[int]] = {}
    for each in facts:
        if reason := _why_stopped(each):
            stopped.setdefault((each.host, reason), []).append(each.index)
    lines += [
        f"{list_instances(indices)} on host {host} had to stop because {reason}"
        for (host, reason), indices in stopped.items()
    ]
    return Verdict(None, mpirun_status or 1, tuple(lines[:MOST_LINES]), is_unexplained=True, is_of_hosts=True)


def lost_spares(facts: Sequence[Facts]) -> list[Facts]:
    """Return the sleeping spares that have failed, or have ended with status 0 before the end of the job."""
    asleep = [each for each in facts if each.is_asleep and not each.is_needed and not each.is_given_up]
    ended = [each for each in asleep if each.ending is not None]
    return [each for each in ended if each.ending and (each.ending.is_own_failure or _is_early(each.ending, facts))]


def _is_early(ending: Ending, facts: Sequence[Facts]) -> bool:
    """Return whether a spare has ended with status 0 although no instance was at its end a second later."""
    active = [each for each in facts if each.is_needed]
    are_at_work = all(each.ending is None and not each.is_at_end for each in active)
    are_known = all(each.answered_at_s >= ending.at_s + SPARE_END_S for each in active)
    return ending.is_success and not ending.told and are_at_work and are_known


def find_stuck(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """Return the instance for which others have waited for `limit_s` seconds while it did nothing, or None.

    The others wait in a collective, or in their exit handlers. An instance that a signal has stopped is blamed first,
    and one outside of the collective before one inside of it.
    """
    still = {
        each.index: each
        for each in facts
        if each.ending is None and each.record.since_s and now_s - each.record.since_s >= limit_s
    }
    awake = [each for each in still.values() if not each.is_asleep]
    waiting = [each for each in awake if each.record.is_inside]
    awaited = [still[index] for each in waiting for index in each.record.waiting_for if index in still]
    if not awaited and any(each.record.is_leaving for each in awake):
        awaited = _awaited_at_end(facts, still)
    if not awaited:
        return None
    return min(
        awaited, key=lambda each: (not each.stopped_since_s, _waits(each), each.record.number, each.record.since_s)
    ).index


def judge_stuck(facts: Sequence[Facts], stuck: int, limit_s: float) -> Verdict:
    """Return the verdict on a job with a stuck instance that was asked for its stack."""
    blamed = facts[stuck]
    place = _describe_place(blamed)
    if not blamed.record.since_s and any(each.record.since_s for each in facts):
        place = " before popdist.init"
    fact = f"{blamed.name} has made no progress for {limit_s:g} s (--stuck-timeout-s){place}"
    lines = [f"{fact}: it is {_describe_state(blamed)}", *_describe_others(facts, stuck)]
    at_end = [each.index for each in facts if each.ending is None and each.record.state is State.LEAVING]
    if at_end:
        lines.append(f"{list_instances(at_end)} had reached the end of the program")
    return Verdict(stuck, STUCK_STATUS, tuple(lines[:MOST_LINES]), lost=(stuck,))


def _awaited_at_end(facts: Sequence[Facts], still: Mapping[int, Facts]) -> list[Facts]:
    """Return the instances that have not reached their exit handlers; none if one of them is not in `still`."""
    here = [each for each in facts if each.ending is None and not each.record.is_leaving and not each.is_asleep]
    here = [each for each in here if each.record.state is not State.FINISHED]
    return here if all(each.index in still for each in here) else []


def _waits(each: Facts) -> bool:
    return each.record.is_inside and bool(each.record.waiting_for)


def _awaited_by(each: Facts, facts: Sequence[Facts]) -> Sequence[int]:
    """Return the instances for which an instance waits."""
    if each.record.is_joining:
        return [other.index for other in facts if not other.record.since_s]
    return each.record.waiting_for if each.record.is_inside else ()


_STATES = {"S": "asleep, or waits for something", "D": "waiting for a disk or a file server", "R": "computing"}


def _describe_state(each: Facts) -> str:
    if each.state in ("T", "t"):
        return "stopped by a signal or a debugger"
    if place := innermost_line(each.stack):
        return f"at {place}"
    if not each.record.since_s and each.state in _STATES:
        return f"{_STATES[each.state]} (process state {each.state})"
    return "at an unknown place of its program"


def _why_stopped(each: Facts) -> str:
    if _is_swept(each):
        return "SIGTERM came to all processes there, as when a batch system ends a job"
    if each.ending is not None and each.ending.told:
        return "mpirun ordered it, or because mpirun or its daemon there has ended"
    return ""


def _blame_daemon(host: str, facts: Sequence[Facts]) -> Verdict:
    members = [each.index for each in facts if each.host == host]
    line = f"host {host} has lost its daemon of Open MPI, and with it {list_instances(members)}"
    lines = (line, *_describe_others(facts, -1))[:MOST_LINES]
    return Verdict(None, 1, lines, is_of_hosts=True, lost=tuple(members))


def _orphaned_host(facts: Sequence[Facts], here: str) -> str:
    """Return the host whose daemon ended first; "" if mpirun ended first, because all daemons end after mpirun."""
    orphans = sorted((each.orphaned_at_s, each.host) for each in facts if each.orphaned_at_s)
    others = (host for at_s, host in orphans if at_s <= orphans[0][0] + SAME_MOMENT_S and host != here)
    return next(others, "")


def _is_swept(each: Facts) -> bool:
    """Return whether both program and agent received SIGTERM; Open MPI sends it to the agent only."""
    ending = each.ending
    is_terminated = ending is not None and ending.kind is EndKind.SIGNAL and ending.number == signal.SIGTERM
    return is_terminated and each.told_at_s > 0


def _is_victim(each: Facts) -> bool:
    """Return whether an instance exited inside a collective, perhaps because it could not reach another instance."""
    is_waiting = each.record.is_inside or each.record.is_joining
    return is_waiting and each.ending is not None and each.ending.kind is EndKind.EXIT


def _mpirun_was_gone(facts: Sequence[Facts], victim: Facts, here: str) -> bool:
    """Return whether mpirun was already gone when an instance failed.

    The kernel closes mpirun's connections before it tells the agents that their parent is gone.
    """
    assert victim.ending is not None
    end_s = victim.ending.at_s + SAME_MOMENT_S
    return any(each.host == here and 0 < each.orphaned_at_s <= end_s for each in facts)


def _host_without_daemon(facts: Sequence[Facts], victim: Facts) -> str:
    """Return the host whose instances were all told to stop before the victim failed in a collective; "" if none.

    When a host's daemon ends, instances on other hosts fail before Open MPI tells them to stop.
    """
    ending = victim.ending
    if ending is None or not _is_victim(victim):
        return ""
    end_s = ending.at_s + SAME_MOMENT_S
    before = {each.host for each in facts if 0 < each.told_at_s < end_s}
    if len(before) != 1 or victim.host in before:
        return ""
    host = before.pop()
    return host if all(0 < each.told_at_s < end_s for each in facts if each.host == host) else ""


def _order(each: Facts, failed: Sequence[Facts]) -> tuple[bool, float]:
    assert each.ending is not None
    first_s = min(other.ending.at_s for other in failed if other.ending is not None)
    is_at_once = each.ending.at_s <= first_s + SAME_MOMENT_S
    return not (is_at_once and each.ending.kind is not EndKind.EXIT), each.ending.at_s


def _cause_of(victim: Facts, facts: Sequence[Facts]) -> Facts | None:
    """Return the instance whose absence explains a failure; None if the failure has a reason of its own."""
    if victim.ending is not None and victim.ending.kind is not EndKind.EXIT:
        return None
    if not victim.record.is_inside and not victim.record.is_joining:
        return None
    candidates = [facts[index] for index in _awaited_by(victim, facts) if index < len(facts)]
    if not candidates and victim.record.is_inside:
        candidates = [each for each in facts if each.index != victim.index and _has_not_come(each, victim)]
    absent = [each for each in candidates if _is_absent(each)]
    return min(absent, key=_absent_since, default=None)


def _has_not_come(each: Facts, victim: Facts) -> bool:
    return each.record.since_s > 0 and each.record.number < victim.record.number


def _is_absent(each: Facts) -> bool:
    return each.is_gone or (each.ending is not None and each.ending.is_own_failure)


def _absent_since(each: Facts) -> float:
    return each.ending.at_s if each.ending is not None else each.record.since_s


def _ended_by_itself(facts: Sequence[Facts]) -> int | None:
    """Return the instance that exited by itself, as after MPI_Abort, although mpirun told all instances to stop."""
    own = [each for each in facts if each.ending is not None and not each.ending.is_success and each.is_needed]
    own = [each for each in own if each.ending is not None and each.ending.kind is EndKind.EXIT]
    own = [each for each in own if not each.orphaned_at_s]  # these ended because mpirun was gone
    return min(own, key=_absent_since).index if own else None


def _is_orderly(ending: Ending) -> bool:
    """Return whether a program ended with 128 + a signal, as `strategies.Checkpoints` and many batch programs do."""
    return ending.kind is EndKind.EXIT and ending.number - 128 in (signal.SIGTERM, signal.SIGINT, *PASSED_ON)


def describe_failure(blamed: Facts, facts: Sequence[Facts]) -> str:
    """Return a line about an instance that has failed or ended too early."""
    how = "left the program" if blamed.ending is None else blamed.ending.describe()
    if not blamed.is_gone:
        place = _describe_place(blamed) if len(facts) > 1 else _describe_step(blamed)
        if place and blamed.ending is not None and blamed.ending.kind is EndKind.LOST:
            place = f"; last heard of {place.lstrip(', ')}"  # the last report may be old
        return f"{blamed.name} {how}{place}"
    waiting = [each.index for each in facts if each.index != blamed.index and _needs(each, blamed)]
    if not waiting and blamed.is_spare:
        return f"{blamed.name} {how} before the end of the job"
    return f"{blamed.name} {how} too early: {list_instances(waiting)} still needed it"


def _needs(each: Facts, gone: Facts) -> bool:
    if gone.index in _awaited_by(each, (gone,)):
        return True
    return each.record.is_inside and not each.record.waiting_for and _has_not_come(gone, each)


def _is_aborted(blamed: Facts, facts: Sequence[Facts]) -> bool:
    """Return whether Open MPI may have aborted an instance, for example because hosts cannot connect.

    Only mpirun knows the reason then. Open MPI aborts before the program has a record or inside a collective, and not
    with the exit status of an exception.
    """
    is_in_mpi = blamed.record.is_inside or blamed.record.is_joining or not blamed.record.since_s
    is_odd = blamed.ending is not None and blamed.ending.kind is EndKind.EXIT and blamed.ending.number > 1
    return is_in_mpi and is_odd and len({each.host for each in facts}) > 1


def _describe_place(each: Facts) -> str:
    record = each.record
    if not record.since_s:
        return ""
    if record.is_joining:
        return " in popdist.init"
    step = _describe_step(each)
    if record.is_inside:
        return f"{step}, inside collective {record.number}, {record.label}"
    return f"{step}, after collective {record.number}, {record.label}" if record.number else step


def _describe_step(each: Facts) -> str:
    return f" in step {each.record.step}" if each.record.step else ""


def _describe_others(facts: Sequence[Facts], blamed: int) -> list[str]:
    """Describe the instances inside collectives, one line for all that wait in the same way."""
    groups: dict[str, list[int]] = {}
    for each in facts:
        if each.index != blamed and each.record.is_inside:
            groups.setdefault(_describe_wait(each), []).append(each.index)
        elif each.index != blamed and each.record.is_joining:
            awaited = _awaited_by(each, facts)
            waiting = f", waiting for {list_instances(awaited)}" if awaited else ""
            groups.setdefault(f"in popdist.init{waiting}", []).append(each.index)
    return [
        f"{list_instances(members)} {'was' if len(members) == 1 else 'were'} {wait}" for wait, members in groups.items()
    ]


def _describe_wait(each: Facts) -> str:
    record = each.record
    step = f", step {record.step}" if record.step else ""
    waiting = f", waiting for {list_instances(record.waiting_for)}" if record.waiting_for else ""
    return f"in collective {record.number}, {record.label}{step}{waiting}"


_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_MORE_THREADS = "..."
"""The last line of a stack dump with more than 100 threads that omits the main thread."""
_OF_LIBRARIES = re.compile(r"/lib(64)?/python3\.\d+/|<frozen ")


def innermost_line(stacks: str) -> str:
    """Return the main thread's innermost frame outside of libraries, as `train.py, line 31, in forward`.

    Args:
        stacks: The stacks of all threads, the main thread last, each from the innermost frame outwards; may be cut off
            or empty.

    Returns:
        The innermost frame of all if only libraries are on the stack; "" if there is no frame, or if the main thread
        is missing.
    """
    frames = [match for line in _main_thread(stacks) if (match := _FRAME.fullmatch(line))]
    own = [frame for frame in frames if not _OF_LIBRARIES.search(frame["file"])]
    for frame in own or frames:
        return f"{frame['file']}, line {frame['line']}, in {frame['function']}"
    return ""


def _main_thread(stacks: str) -> list[str]:
    lines = stacks.splitlines()
    heads = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    return lines[heads[-1] :] if heads and _MORE_THREADS not in lines else []


KEPT_BYTES = 8192
_LONGEST_TEXT = 300
_FAR_LINES = 20
"""An exception followed by more lines than this did not end the program."""

_FRAMES = ("Traceback (most recent call last):", '  File "')
_TRACE = re.compile(
    rb"^(.*Traceback \(most recent call last\):|Exception ignored in|terminate called after throwing)", re.MULTILINE
)
_REPORT = re.compile(
    rb"(?<!:\n\n)^(Exception ignored in.*(\nTraceback)?|Traceback \(most recent|terminate called after)", re.MULTILINE
)
"""The begin of a report; the line above a traceback of the same report ends with a colon."""
_HANDLING = b"During handling of the above exception"
"""The line below an exception that is no interrupt, or above one that the reaction to the interrupt has raised."""
_OF_JAX = (b"--------------------", b"For simplicity, JAX has removed")
_LONGEST_TRACE_BYTES = 1 << 18
_EXCEPTION = re.compile(r"[^\W\d][\w.]*(: .*)?")


class LastLines:
    """The last part of every instance's standard error."""

    def __init__(self) -> None:
        self._ends: dict[int, bytes] = {}

    def take(self, instance: int, data: bytes) -> None:
        """Store the output of an instance."""
        self._ends[instance] = (self._ends.get(instance, b"") + data[-KEPT_BYTES:])[-KEPT_BYTES:]

    def describe_cause(self, verdict: Verdict, facts: Sequence[Facts]) -> str:
        """Describe the instance to blame and its last error in one line, to be shown after all other output.

        The text is empty if a signal ended the instance, or if it has written no error. If the job has only one
        instance, its last line stands above anyway, so only an exception is described.
        """
        if verdict.instance is None:
            return ""
        blamed = facts[verdict.instance]
        lines = _lines_of(self._ends.get(blamed.index, b""))
        who = f"first cause: instance {blamed.index} on host {blamed.host}"
        status = f"exit status {verdict.exit_status}"
        ending = blamed.ending
        if ending is not None and (ending.kind is not EndKind.EXIT or ending.is_success):
            return ""
        if exception := find_exception(lines):
            return f"{who}: {_cut(exception)} ({status})"
        is_telling = lines and ending is not None and len(facts) > 1
        return f"{who} ({status}), which wrote last: {_cut(lines[-1])}" if is_telling else ""


class InterruptedTraces:
    """A filter for the tracebacks that instances write after Ctrl-C; it drops the ones that follow from Ctrl-C.

    From the first traceback on, an instance's standard error is held back until the instance has ended. A library may
    raise another exception from KeyboardInterrupt, for example while it is imported, or in a callback of XLA.
    """

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}

    def take(self, instance: int, data: bytes) -> bytes:
        """Take standard error of an instance, and return the part to show now."""
        if instance in self._held:
            self._held[instance] += data
            return self.release(instance) if len(self._held[instance]) > _LONGEST_TRACE_BYTES else b""
        if begin := _TRACE.search(data):
            self._held[instance] = data[begin.start() :]
        return data[: begin.start()] if begin else data

    def release(self, instance: int) -> bytes:
        """Return what was held back for an instance, without the tracebacks that follow from the interrupt."""
        held = self._held.pop(instance, b"")
        begins = [0, *(report.start() for report in _REPORT.finditer(held)), len(held)]
        return b"".join(_without_interrupt(held[begin:end]) for begin, end in pairwise(begins))


def _without_interrupt(report: bytes) -> bytes:
    """Return the lines after a traceback if it ends in KeyboardInterrupt, and all lines of another one."""
    lines = report.splitlines(keepends=True)
    after_frames = [number + 1 for number, line in enumerate(lines) if line.startswith((b" ", b"\t"))]
    is_interrupt = any(
        line.startswith(b"KeyboardInterrupt") for line in (lines[each] for each in after_frames if each < len(lines))
    )
    if not is_interrupt or any(line.startswith(_HANDLING) for line in lines):
        return report
    return b"".join(line for line in lines[after_frames[-1] + 1 :] if not line.startswith(_OF_JAX))


def find_exception(lines: Sequence[str]) -> str:
    """Return the first line of the last exception with a traceback; "" if there is none near the end."""
    found, found_at, is_trace = "", 0, False
    for position, line in enumerate(lines):
        if line.startswith(_FRAMES):
            is_trace = True
        elif is_trace and line[:1] not in (" ", "\t"):
            is_trace = False
            if _EXCEPTION.fullmatch(line):
                found, found_at = line, position
    return found if len(lines) - found_at <= _FAR_LINES else ""


def _lines_of(data: bytes) -> list[str]:
    """Return all lines that are not empty; for a line with carriage returns, the last version."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in data.decode(errors="replace").split("\n"))
    return [line for line in lines if line]


def _cut(line: str) -> str:
    shown = "".join(each if each.isprintable() else "?" for each in line.strip())
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}..."


NEVER_STARTED = (
    "a firewall may block connections between the hosts: Open MPI's daemons, the instances and poprun connect to TCP "
    "ports that the kernel chooses (32768-60999, see /proc/sys/net/ipv4/ip_local_port_range, and 1024 and above for "
    "Open MPI's data); `poprun doctor --host HOSTS` tests the connections between all of them; if the start is only "
    "slow, set a larger --start-timeout-s"
)
"""The advice for a job whose instances on other hosts never started."""


@dataclass(frozen=True)
class LastWords:
    """The facts about a job that has ended.

    Attributes:
        ended: The end of the job.
        obstacle: Why the others could not go on without the lost instances; "" if they could, or if the user did not
            ask for it.
        losses: The lost instances and spares without which the job went on.
        mpirun_status: mpirun's exit status; None if it still runs.
        silent: The hosts whose connection broke.
        first_cause: A line with the last error of the instance to blame; "" if that is unknown.
        lacked_some: Whether some instances have never started.
    """

    ended: JobEnd
    obstacle: str
    losses: tuple[Loss, ...]
    mpirun_status: int | None
    silent: frozenset[str]
    first_cause: str = ""
    lacked_some: bool = False


def last_actions(words: LastWords, has_others: bool) -> list[Action]:
    """Return all actions that follow the end of mpirun and of its instances."""
    verdict = words.ended.verdict
    is_unexplained = verdict is not None and verdict.is_unexplained
    sweeps = has_others and (is_unexplained or words.mpirun_status is None or words.mpirun_status > 128)
    actions: list[Action] = [CleanUp(sweeps, words.silent)]
    if verdict is not None and verdict.instance is not None:
        actions.append(Deed(DeedKind.SHOW_HIDDEN_ERRORS, verdict.instance))
    if is_unexplained:
        actions.append(Deed(DeedKind.SHOW_COMPLAINT))
    if verdict is not None:
        last = [line for line in (words.obstacle, words.first_cause) if line]
        lines = (*verdict.lines[: MOST_LINES - len(last)], *last)
        level = Level.WARN if verdict.is_orderly and len(lines) == 1 else Level.ERROR
        actions += [Say(level, line) for line in lines]
    if is_unexplained and has_others and words.lacked_some:
        actions.append(Say(Level.ERROR, NEVER_STARTED))
    if words.losses and not words.ended.exit_status:
        lines = tuple(loss.line for loss in words.losses)
        actions.append(Say(Level.WARN, f"the job completed {_describe_losses(words.losses)}: {'; '.join(lines)}"))
    return [*actions, Finish(words.ended)]


def _describe_losses(losses: Sequence[Loss]) -> str:
    spares = sum(loss.was_spare for loss in losses)
    replaced = sum(loss.is_replaced for loss in losses)
    new = sum(loss.by_new for loss in losses)
    missing = len(losses) - spares - replaced
    parts = [
        f"with {count(replaced - new, 'spare')} in the place of lost instances" if replaced > new else "",
        f"with {count(new, 'new instance')} in the place of lost ones" if new else "",
        f"without {count(missing, 'instance')}" if missing else "",
        f"without {count(spares, 'spare')}" if spares else "",
    ]
    return ", ".join(filter(None, parts))
