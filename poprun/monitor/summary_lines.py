"""What is shown about a job when it is over: three lines at most. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from poprun.cli.wording import count, duration_text, list_ranges, memory_text, number_text, share_text
from poprun.monitor.attempts import Attempt, Slowest, Totals, add_up

_MOST_NAMED = 8
"""Of how many instances the memory is listed; of more the least and the largest."""


def summary_lines(attempts: Sequence[Attempt], duration_s: float) -> list[str]:
    """The lines about a job, what is not known left out.

    Args:
        attempts: at it, in their order.
        duration_s: of all of it, pauses between them included.
    """
    totals = add_up(attempts)
    lines = [_first(attempts, totals, duration_s), _second(totals), _third(attempts, totals)]
    return [line for line in lines if line]


def _first(attempts: Sequence[Attempt], totals: Totals, duration_s: float) -> str:
    again = f" in {count(len(attempts), 'attempt')}" if len(attempts) > 1 else ""
    instances = count(len(attempts[-1].facts), "instance") if attempts else "nothing"
    line = f"summary: {instances} ran for {duration_text(duration_s)}{again}"
    if not totals.steps:
        return line
    line += f"; {count(totals.steps, 'step')}{' (of all attempts)' if again else ''}"
    if totals.steps_per_s is not None:
        line += f", {number_text(totals.steps_per_s)} steps/s"
    if totals.samples_per_s:
        line += f", {number_text(totals.samples_per_s)} samples/s"
    return line


def _second(totals: Totals) -> str:
    parts = []
    if totals.waiting_share is not None:
        parts.append(f"waiting for others: {share_text(totals.waiting_share)} of the time of steps")
        if totals.slowest is not None:
            parts[0] += f"; {_describe_slowest(totals.slowest)}"
    if totals.survived:
        parts.append(f"survived {count(len(totals.survived), 'fault')}")
    return f"summary: {'; '.join(parts)}" if parts else ""


def _describe_slowest(slowest: Slowest) -> str:
    shares = f"it waited {share_text(slowest.waiting_share)}, the others {share_text(slowest.others_waiting_share)}"
    return f"the slowest is instance {slowest.instance} on host {slowest.host} ({shares})"


def _third(attempts: Sequence[Attempt], totals: Totals) -> str:
    """The memory of each instance: the most that it had in any attempt."""
    peaks: dict[int, int] = {}
    for attempt in attempts:
        for each in attempt.facts:
            if each.peak_memory_bytes:
                peaks[each.index] = max(peaks.get(each.index, 0), each.peak_memory_bytes)
    if not peaks:
        return ""
    if len(peaks) > _MOST_NAMED:
        largest, least = max(peaks, key=lambda index: peaks[index]), min(peaks.values())
        return (
            f"summary: peak memory {memory_text(least)} to {memory_text(totals.peak_memory_bytes)}, "
            f"most of it in instance {largest}"
        )
    by_text: dict[str, list[int]] = {}
    for index, peak in sorted(peaks.items()):
        by_text.setdefault(memory_text(peak), []).append(index)
    listed = (f"{text} (instance{'s' if len(who) > 1 else ''} {list_ranges(who)})" for text, who in by_text.items())
    return f"summary: peak memory {', '.join(listed)}"
