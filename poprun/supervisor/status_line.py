"""The line that is on a terminal until a job shows something by itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poprun.cli.log import Level
from poprun.cli.wording import count
from poprun.ipc.facts import Facts

SHOW_AFTER_S = 0.5
"""Most jobs on this machine have started before."""


def wants_status(level: Level, environ: Mapping[str, str]) -> bool:
    """Whether the user wants a line that comes and goes; whether there is a terminal is another matter."""
    return level >= Level.WARN and environ.get("TERM", "dumb") != "dumb"


class StatusLine:
    """What a job does that has not shown anything yet.

    Args:
        instances: how many it has.
        hosts: on how many hosts.
        begin_s: when it has begun.
    """

    def __init__(self, instances: int, hosts: int, begin_s: float) -> None:
        self._start = f"starting {count(instances, 'instance')} on {count(hosts, 'host')}"
        self._instances = instances
        self._begin_s = begin_s

    def text(self, facts: Sequence[Facts], now_s: float) -> str:
        """The line at this time; empty where there is nothing to say."""
        since_s = now_s - self._begin_s
        if since_s < SHOW_AFTER_S:
            return ""
        started = sum(each.is_started for each in facts)
        if started < self._instances:
            there = f", {started} of {self._instances} are there" if started else ""
            return f"{self._start}{there} ({int(since_s)} s)"
        if all(_is_before_first_step(each) for each in facts):
            return f"no step is completed yet: data are loaded, programs compiled ({int(since_s)} s)"
        return ""


def _is_before_first_step(each: Facts) -> bool:
    return each.ending is None and each.record.has_joined and not each.record.step
