"""From facts to blame: which instance caused the failure, what to say about it, and the exit status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poprun.facts import EndKind, Facts

MOST_LINES = 15
SAME_MOMENT_S = 0.05
"""Ends closer than this may be in the wrong order: a signal comes from outside, so it is the cause."""

Wait = tuple[int, int, int]
"""Instance, the instance it waits for, and the number of the collective."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a failed job.

    Attributes:
        instance: the one to blame; None when none is.
        exit_status: poprun's.
        lines: what to tell the user, at most `MOST_LINES`.
        is_unexplained: whether mpirun's own words are needed to understand it.
    """

    instance: int | None
    exit_status: int
    lines: tuple[str, ...]
    is_unexplained: bool = False


def vain_waits(facts: Sequence[Facts]) -> frozenset[Wait]:
    """The waits inside collectives for instances that have ended with status 0 or are in their exit handlers.

    One look may see a collective that is about to end; a wait that is there in two looks is in vain.
    """
    gone = {each.index for each in facts if each.is_gone}
    return frozenset(
        (each.index, other, each.record.number)
        for each in facts
        if each.ending is None and each.record.is_inside and not each.record.is_leaving
        for other in each.record.waiting_for
        if other in gone
    )


def has_failed(facts: Sequence[Facts]) -> bool:
    """Whether an instance has failed by itself."""
    return any(each.ending is not None and each.ending.is_own_failure for each in facts)


def first_cause(facts: Sequence[Facts], in_vain: Iterable[Wait] = ()) -> int | None:
    """The instance that brought the job down, or None when every instance was told to stop by mpirun.

    The earliest failure is the start. Who failed inside a collective because it waited for one that had gone,
    was leaving, or has failed too, is a victim; the blame goes on to that one.

    Args:
        facts: one entry for each instance, in order.
        in_vain: waits that were seen twice.
    """
    failed = [each for each in facts if each.ending is not None and each.ending.is_own_failure]
    if not failed:
        waited_for = sorted(gone for _, gone, _ in in_vain)
        return waited_for[0] if waited_for else _ended_by_itself(facts)
    blamed = min(failed, key=lambda each: _order(each, failed))
    seen = {blamed.index}
    while (cause := _cause_of(blamed, facts)) is not None and cause.index not in seen:
        blamed = cause
        seen.add(blamed.index)
    return blamed.index


def judge(facts: Sequence[Facts], in_vain: Iterable[Wait] = ()) -> Verdict | None:
    """The verdict over a failed job, or None when no instance explains it."""
    in_vain = tuple(in_vain)
    index = first_cause(facts, in_vain)
    if index is None:
        return None
    blamed = facts[index]
    status = blamed.ending.exit_status if blamed.ending is not None else 1
    others = _describe_others(facts, index)
    return Verdict(index, status, (_describe_blamed(blamed, facts), *others)[:MOST_LINES])


def judge_missing(facts: Sequence[Facts], mpirun_status: int | None) -> Verdict:
    """The verdict when mpirun has ended or was too slow to start, and no instance explains it."""
    missing = [each for each in facts if each.ending is None]
    never = [each.index for each in missing if not each.is_started]
    how = "did not start every instance in time" if mpirun_status is None else f"ended with {mpirun_status}"
    lines = [f"mpirun {how} before every instance had completed"]
    if never:
        lines.append(f"{list_instances(never)} never started")
    unfinished = [each.name for each in missing if each.is_started]
    lines += [f"{name} did not report how it ended" for name in unfinished]
    stopped = [each.index for each in facts if each.ending is not None and each.ending.told]
    if stopped:
        lines.append(f"{list_instances(stopped)} had to stop because mpirun said so")
    return Verdict(None, mpirun_status or 1, tuple(lines[:MOST_LINES]), is_unexplained=True)


def list_instances(indices: Sequence[int]) -> str:
    """`instance 3` or `instances 0-2, 5`."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
    return f"instance {text}" if len(indices) == 1 else f"instances {text}"


def _order(each: Facts, failed: Sequence[Facts]) -> tuple[bool, float]:
    assert each.ending is not None
    first_s = min(other.ending.at_s for other in failed if other.ending is not None)
    is_at_once = each.ending.at_s <= first_s + SAME_MOMENT_S
    return not (is_at_once and each.ending.kind is not EndKind.EXIT), each.ending.at_s


def _cause_of(victim: Facts, facts: Sequence[Facts]) -> Facts | None:
    """The instance whose absence explains this failure; None when it has a reason of its own."""
    if not victim.record.is_inside or (victim.ending is not None and victim.ending.kind is not EndKind.EXIT):
        return None
    candidates = [facts[index] for index in victim.record.waiting_for if index < len(facts)]
    if not candidates:
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
    """After mpirun has told all to stop: the one that had an end of its own, as after MPI_Abort."""
    own = [each for each in facts if each.ending is not None and not each.ending.is_success]
    own = [each for each in own if each.ending is not None and each.ending.kind is EndKind.EXIT]
    return min(own, key=_absent_since).index if own else None


def _describe_blamed(blamed: Facts, facts: Sequence[Facts]) -> str:
    how = "left the program" if blamed.ending is None else blamed.ending.describe()
    if not blamed.is_gone:
        return f"{blamed.name} {how}{_describe_place(blamed)}"
    waiting = [each.index for each in facts if each.index != blamed.index and _needs(each, blamed)]
    return f"{blamed.name} {how} too early: {list_instances(waiting)} still needed it"


def _needs(each: Facts, gone: Facts) -> bool:
    waits = gone.index in each.record.waiting_for or (not each.record.waiting_for and _has_not_come(gone, each))
    return each.record.is_inside and waits


def _describe_place(each: Facts) -> str:
    record = each.record
    if not record.since_s:
        return ""
    step = f" in step {record.step}" if record.step else ""
    if record.is_inside:
        return f"{step}, inside collective {record.number}, {record.label}"
    return f"{step}, after collective {record.number}, {record.label}" if record.number else step


def _describe_others(facts: Sequence[Facts], blamed: int) -> list[str]:
    """One line for all that were in the same collective, waiting for the same instances."""
    groups: dict[str, list[int]] = {}
    for each in facts:
        if each.index != blamed and each.record.is_inside:
            groups.setdefault(_describe_wait(each), []).append(each.index)
    return [
        f"{list_instances(members)} {'was' if len(members) == 1 else 'were'} {wait}" for wait, members in groups.items()
    ]


def _describe_wait(each: Facts) -> str:
    record = each.record
    step = f", step {record.step}" if record.step else ""
    waiting = f", waiting for {list_instances(record.waiting_for)}" if record.waiting_for else ""
    return f"in collective {record.number}, {record.label}{step}{waiting}"
