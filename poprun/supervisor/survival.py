"""The decision whether a job goes on after losses, and which spares take the places of lost instances. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest

from popdist.membership.standby import Standing, choose
from popdist.records.progress import Role
from poprun.cli.log import Level
from poprun.cli.wording import count, list_instances
from poprun.ipc.facts import Ending, Facts, Loss
from poprun.supervisor.diagnosis import is_of_hosts, lost_spares
from poprun.supervisor.job_events import Action, Say
from poprun.supervisor.members import JobMembers


class Survival:
    """The decision whether a job goes on without lost instances, as the user allows it.

    Args:
        members: All instances and spares of the job.
        least: The least number of instances with which the job goes on; 0 if it needs all.

    Attributes:
        losses: The instances and spares that were given up.
        obstacle: Why the others could not go on although the user allows it; "" as long as they could.
    """

    def __init__(self, members: JobMembers, least: int) -> None:
        self.losses: list[Loss] = []
        self.obstacle = ""
        self._members = members
        self._least = least
        self._untold: set[int] = set()  # lost spares of which the others do not know

    def give_up(
        self, useless: Collection[int], was_told: Callable[[Ending], bool], describe: Callable[[Facts], str]
    ) -> list[Action]:
        """Give up failed and useless instances, and tell the others, which wait for them in vain.

        Spares take their places, as long as there are spares. A lost spare is given up too.

        Args:
            useless: The indices of further instances and spares to give up: stuck, silent, or ended too early.
            was_told: Returns whether an instance came to an end because of a signal from the user.
            describe: Returns a line about a lost instance.

        Returns:
            The orders for the agents, and a message about each lost instance. Empty if none has failed, or if the
            others cannot go on; `obstacle` then has the reason.
        """
        here = [each for each in self._members.facts if not each.is_given_up]
        asleep = {each.index for each in lost_spares(here)}
        failed = [
            each
            for each in here
            if each.index in useless
            or each.index in asleep
            or (each.ending is not None and each.ending.is_own_failure and each.is_needed)
        ]
        left = [each for each in here if each not in failed and each.ending is None]
        were_told = any(each.ending is not None and was_told(each.ending) for each in failed)
        if not failed or were_told or is_of_hosts(failed) or not self._least:
            return []
        is_change = any(not each.is_spare for each in failed)
        carriers = choose_carriers(self._members.carriers, left, self._members.target) if is_change else []
        called = [each for each in left if each.is_asleep and each.index in carriers]
        if not all(each.is_asleep for each in failed) and (obstacle := self._obstacle(left, len(called))):
            self.obstacle = self.obstacle or obstacle  # later failures follow from the first
            return []
        actions = self._part_from(failed, left, called, describe)
        if carriers:
            self._members.go_on_with(carriers)
        return actions

    def _part_from(
        self, failed: Sequence[Facts], left: Sequence[Facts], called: Sequence[Facts], describe: Callable[[Facts], str]
    ) -> list[Action]:
        lost = [each for each in failed if not each.is_spare]
        spares = [each for each in failed if each.is_spare]
        successors = called[: len(lost)]
        losses = [
            Loss(describe(each), each.index, each.record.is_spare, None if spare is None else spare.index)
            for each, spare in zip_longest(lost, successors)
        ]
        said = [f"{loss.line}; {_who_follows(spare, left, called)}" for loss, spare in zip_longest(losses, successors)]
        rest = sum(each.can_join for each in left) - len(called)
        for each in spares:
            losses.append(Loss(describe(each), each.index, was_spare=True))
            said.append(f"{losses[-1].line}; the job goes on with {count(rest, 'spare') if rest else 'no spare'} left")
        self.losses += losses
        actions: list[Action] = []
        for each in failed:
            actions += self._members.give_up(each.index)
        self._untold |= {each.index for each in spares}
        if lost:
            actions += self._release(left)
        return [*actions, *(Say(Level.WARN, line) for line in said)]

    def tell_at_end(self) -> list[Action]:
        """Tell the others about lost spares if they wait for those at the end of the job.

        Before, nobody needs a sleeping spare, and the news would interrupt the collectives of all programs.
        """
        left = [each for each in self._members.facts if each.ending is None and not each.is_given_up]
        active = [each for each in left if not each.is_asleep]
        if not self._untold or not active or not all(self._is_at_end(each) for each in active):
            return []
        return self._release(left)

    def _is_at_end(self, each: Facts) -> bool:
        is_waiting = each.record.is_inside and not self._untold.isdisjoint(each.record.waiting_for)
        return is_waiting or each.is_at_end

    def _release(self, left: Sequence[Facts]) -> list[Action]:
        self._untold.clear()
        return [order for each in left for order in self._members.release(each.index, len(self.losses))]

    def _obstacle(self, left: Sequence[Facts], called: int) -> str:
        if not self._members.all_connected or not all(each.record.has_joined for each in left):
            return "the others cannot go on: an instance was lost before popdist.init had returned everywhere"
        active = sum(not each.is_asleep for each in left)
        if left and not any(each.has_variables for each in left):
            return "no instance is left that has the variables, and spares have none: the job ends"
        if active + called < max(1, self._least):
            return (
                f"only {count(active + called, 'instance')} would be left, and --min-instances is {self._least}: "
                "the job ends"
            )
        return ""


def choose_carriers(before: Sequence[int], left: Sequence[Facts], target: int) -> list[int]:
    """Return the instances that drive the replicas after a change, in their order; popdist chooses by the same rule.

    An instance at its end takes no part. So after a loss, the others may call more spares than places were lost.

    Args:
        before: The instances that drove the replicas before, in their order.
        left: The instances and spares that are left, by index.
        target: The wanted number of active instances.
    """
    hosts = [each.host for each in left]
    standings = [
        Standing(
            role=_role_of(each),
            number=before.index(each.index) if each.index in before else 0,
            host=hosts.index(each.host),
            entries=0,
            may_be_active=(each.can_join or not each.is_spare) and not each.record.wanted.is_barred,
        )
        for each in left
    ]
    return [left[rank].index for rank in choose(standings, target)]


def _role_of(each: Facts) -> Role:
    if each.is_asleep or each.record.lacks_values:
        return Role.SPARE
    return Role.LEAVING if each.is_at_end else Role.ACTIVE


def _who_follows(spare: Facts | None, left: Sequence[Facts], called: Sequence[Facts]) -> str:
    if spare is not None:
        return f"{spare.short_name} on host {spare.host} takes its place"
    others = sorted(each.index for each in left if not each.is_asleep or each in called)
    return f"{list_instances(others)} {'goes' if len(others) == 1 else 'go'} on without it"
