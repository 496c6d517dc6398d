"""The handing over of states to instances that join: variables, optimizer states, model states, loss scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic

import numpy as np

from strategies.core.agreement import broadcast_text
from strategies.core.digest import digest_of_arrays
from strategies.core.engine import Engine, Pending, State
from strategies.errors import SpareError
from strategies.typing import Batch

if TYPE_CHECKING:
    from strategies.core.members import Members


class Carrier(Generic[State, Pending]):
    """The holder of the latest state of one trainer, which joining instances get.

    All instances make their carriers in the same order. On an active instance the state has values. On a spare it is
    made of placeholders, which get their values when the instance joins.

    Args:
        members: The instances.
        engine: The engine that owns the states.
        own_part: The part of the state that no other instance has, in words; None without one.

    Attributes:
        batch: The batch of the step that is being made; None outside of steps.
        first: Function that returns a state with the shapes of the first one, while the training starts.
    """

    def __init__(self, members: Members, engine: Engine[State, Pending], own_part: str | None) -> None:
        self._members = members
        self._engine = engine
        self._own_part = own_part
        self._latest: State | None = None
        self._version = 0
        self.batch: Batch = None
        self.first: Callable[[], State] | None = None
        if members.journal.is_kept:
            members.journal.carriers.append(self)

    def note(self, state: State) -> None:
        """Note the state that the trainer has made, or was given, last."""
        if state is not self._latest and self._members.journal.is_kept:
            self._latest = state
            self._version += 1

    def unread(self, state: State, step: int) -> State:
        """Return the state of a step on a spare, like `state` but without values, and note it."""
        found = self._engine.unread(state, step, self._members.wait_for_values)
        self.note(found)
        return found

    def read(self, state: State) -> State:
        """Return a state with values, given one that this instance may have got as a spare."""
        return self._engine.read(state) if self._members.journal.has_joined else state

    def holds(self, state: object) -> bool:
        """Return whether this is the latest state."""
        return state is self._latest

    # ---- handing over

    @property
    def facts(self) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """The facts that a joining instance must share, and others that it must share if both have them."""
        state = self._latest
        told = {"number of states": self._version, "step": None if state is None else state.step}
        others = dict(self._engine.facts)
        if self.batch is not None:  # missing if the program of the joining instance reads variables between steps
            others["position in the data set"] = self._members.position_of(self.batch)
        return told, others

    @property
    def obstacle(self) -> str:
        """The reason why this state cannot be handed over, or ""."""
        if self._own_part is None:
            return ""
        return f"every instance has a part of the state that no other has ({self._own_part})"

    def hand_over(self, source: int, joins: bool) -> None:
        """Take over the state of rank `source`, which has one, if this instance joins. Collective.

        Args:
            source: The rank whose state is handed over.
            joins: Whether this instance joins.
        """
        if self._latest is None:  # this instance is late by the start of the training
            assert self.first is not None
            self._engine.hand_over(self.first(), source, joins)
        elif joins:
            self._engine.resolve(self._latest, self._engine.hand_over(self._latest, source, joins))
        else:
            self._engine.hand_over(self.read(self._latest), source, joins)

    def digest(self) -> tuple[int, int]:
        """Return a digest of the latest state."""
        return (
            (0, 0) if self._latest is None else digest_of_arrays(self._engine.digest(self.read(self._latest)).values())
        )


def hand_over_all(members: Members, source: int) -> None:
    """Hand the states of all carriers over to the instances that join. Collective.

    A joining instance that differs in anything that can be compared ends, and the others go on without it.

    Args:
        members: The instances.
        source: The rank whose states are handed over.

    Raises:
        SpareError: This instance joins, and does not fit.
    """
    journal = members.journal
    joins = journal.is_joining
    told = _compare_facts(members, source)
    for carrier, facts in zip(journal.carriers, told, strict=False):
        if facts["step"] is not None:
            carrier.hand_over(source, joins)
    _compare_digests(members, source)
    journal.takes_values()


def _facts_of(members: Members) -> dict[str, object]:
    return {"number of trainers": len(members.journal.carriers), "number of operations": members.done_so_far.entries}


def _compare_facts(members: Members, source: int) -> list[dict[str, object]]:
    """Return the facts of each carrier of the source; raise on a joining instance that does not fit. Collective."""
    journal = members.journal
    own = [(_facts_of(members), {}), *[carrier.facts for carrier in journal.carriers]]
    text = broadcast_text(members.communicator, json.dumps(own), source, "facts of the training")
    told: list[tuple[dict[str, object], dict[str, object]]] = json.loads(text)
    of_carriers = [facts for facts, _ in told[1:]]
    if not journal.is_joining:
        return of_carriers
    for (theirs, some_of_theirs), (here, some_here) in zip(told, json.loads(json.dumps(own)), strict=False):
        if found := _difference(theirs, here) or _difference(some_of_theirs, some_here, only_common=True):
            raise SpareError(f"this spare cannot take the place of a lost instance: {found}")
    if obstacle := next((each.obstacle for each in journal.carriers if each.obstacle), ""):
        raise SpareError(f"this spare cannot take the place of a lost instance: {obstacle}")
    return of_carriers


def _compare_digests(members: Members, source: int) -> None:
    """Raise on a joining instance that has other bits than the source. Collective."""
    journal, communicator = members.journal, members.communicator
    concerns = journal.is_joining or communicator.rank == source
    own = [carrier.digest() if concerns else (0, 0) for carrier in journal.carriers]
    digests = communicator.all_gather(np.array(own, np.uint64).reshape(-1), name="digests of what was handed over")
    if journal.is_joining and (digests[communicator.rank] != digests[source]).any():
        raise SpareError(
            f"the variables have other bits here than on rank {source}, which has handed them over; check the memory "
            "and the network of this host"
        )


def _difference(theirs: Mapping[str, object], own: Mapping[str, object], only_common: bool = False) -> str:
    """Describe the first fact in which two instances differ; "" if there is none.

    Args:
        theirs: The facts of the other instance.
        own: The facts of this instance.
        only_common: Whether to compare only facts that both have.
    """
    names = theirs.keys() & own.keys() if only_common else theirs.keys() | own.keys()
    for name in sorted(names):
        there, here = theirs.get(name, "missing"), own.get(name, "missing")
        if there != here:
            return f"its {name} is {here}, but on the active instances it is {there}"
    return ""
