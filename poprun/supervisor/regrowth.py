"""New instances in the places of lost ones: when poprun starts one, on which host, and when it joins. Pure.

Open MPI cannot take a process into a running job. So the job has reserves: processes that are connected from the
beginning, whose program begins at poprun's order (`popdist.membership.reserve`). A new instance comes to the place in
the program at which the others are, and then joins them in a change of the members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from popdist.records.progress import Role
from poprun.cli.log import Level
from poprun.cli.wording import count
from poprun.ipc.facts import Facts, Loss
from poprun.launch.launch import Across
from poprun.supervisor.job_events import Action, AgentOrder, Command, Say
from poprun.supervisor.members import JobMembers
from poprun.supervisor.resizing import Resizing
from poprun.supervisor.restarts import MOST_FAILURES, pause_s

_NEVER = float("inf")


class Regrowth:
    """The new instances of a job.

    Args:
        members: All processes of the job.
        resizing: The changes of the members.
        losses: The lost instances; a new instance is noted as the successor of one.
        across: The largest number of new instances, and the pause before the first one; it doubles each time.
    """

    def __init__(self, members: JobMembers, resizing: Resizing, losses: list[Loss], across: Across) -> None:
        self._members = members
        self._resizing = resizing
        self._losses = losses
        self._instances = len(members.carriers)
        self._most = across.most_new
        self._first_pause_s = across.first_pause_s
        self._started: list[int] = []
        self._joined: set[int] = set()
        self._due_s = _NEVER
        self._has_said_end = False

    @property
    def deadline_s(self) -> float:
        """The time at which a new instance starts if nothing happens before; infinite if none is to start."""
        return self._due_s

    def look(self, now_s: float) -> list[Action]:
        """Start the next instance, or let one that is ready join, as far as the job lacks instances."""
        said = self._note_joined()
        running = [each for each in self._members.facts if each.ending is None and not each.is_given_up]
        active = [each for each in running if not each.is_asleep]
        if not active or self._is_ending:
            return said
        ready = [each for each in running if each.can_join and not self._resizing.is_left(each.host)]
        coming = [each for each in running if each.index in self._started and each.is_asleep and not each.can_join]
        missing = self._wanted - len(active)
        if missing > 0 and ready and not self._resizing.is_under_way:
            return [*said, *self._resizing.want(min(self._wanted, len(active) + len(ready)))]
        if missing <= len(ready) + len(coming):
            self._due_s = _NEVER
            return said
        return [*said, *self._start_when_due(running, active, now_s)]

    @property
    def _is_ending(self) -> bool:
        there = (each for each in self._members.facts if not each.is_given_up and not each.is_spare)
        return any(each.ending is not None or each.is_at_end for each in there)

    @property
    def _wanted(self) -> int:
        return self._resizing.wanted or self._instances

    def _start_when_due(self, running: Sequence[Facts], active: Sequence[Facts], now_s: float) -> list[Action]:
        reserves = [
            each
            for each in running
            if each.is_reserve and each.index not in self._started and not self._resizing.is_left(each.host)
        ]
        if len(self._started) == self._most or not reserves:
            return self._say_end()
        if self._due_s == _NEVER:
            self._due_s = now_s + pause_s(self._first_pause_s, len(self._started))
        if now_s < self._due_s:
            return []
        self._due_s = _NEVER
        failures = Counter(each.host for each in self._members.facts if each.is_given_up)
        chosen = choose_reserve(reserves, active, failures)
        self._started.append(chosen.index)
        text = f"instance {chosen.index} starts on host {chosen.host} in the place of a lost one"
        made = f"{len(self._started)} of {self._most} (--max-restarts)"
        return [AgentOrder(Command.BEGIN, chosen.index), Say(Level.WARN, f"{text}: {made}")]

    def _say_end(self) -> list[Action]:
        if self._has_said_end:
            return []
        self._has_said_end = True
        started = count(len(self._started), "new instance")
        return [Say(Level.WARN, f"no instance starts in the place of the lost one: {started} (--max-restarts)")]

    def _note_joined(self) -> list[Action]:
        said: list[Action] = []
        for index in self._started:
            each = self._members.facts[index]
            if index not in self._joined and each.record.role is Role.ACTIVE:
                self._joined.add(index)
                self._note_successor(index)
                step = max(other.record.step for other in self._members.facts)
                said.append(Say(Level.WARN, f"{each.name} has joined in step {step}"))
        return said

    def _note_successor(self, index: int) -> None:
        open_places = [at for at, loss in enumerate(self._losses) if loss.taken_by is None and not loss.was_spare]
        if open_places:
            at = open_places[0]
            self._losses[at] = replace(self._losses[at], taken_by=index, by_new=True)


def choose_reserve(reserves: Sequence[Facts], active: Sequence[Facts], failures: Counter[str]) -> Facts:
    """Return the reserve that becomes an instance: on the host with the fewest instances, which has lost one.

    A host with `MOST_FAILURES` losses is left out if another host has a reserve.
    """
    healthy = [each for each in reserves if failures[each.host] < MOST_FAILURES]
    on_host = Counter(each.host for each in active)
    return min(healthy or reserves, key=lambda each: (on_host[each.host], -failures[each.host], each.index))
