"""Letting the others go on without the instances that are lost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from poprun.cli.log import Level
from poprun.cli.wording import count
from poprun.ipc.facts import Ending, Facts
from poprun.supervisor.diagnosis import is_of_hosts, list_instances
from poprun.supervisor.job_actions import Action, Say
from poprun.supervisor.members import Members


class Survival:
    """The instances without which a job goes on, where the user allows that.

    Args:
        members: all of them.
        least: with how many the job goes on; 0: with all only.

    Attributes:
        losses: a line about each that was given up.
        obstacle: why the others could not go on, where the user wants it; "" as long as they could.
    """

    def __init__(self, members: Members, least: int) -> None:
        self.losses: list[str] = []
        self.obstacle = ""
        self._members = members
        self._least = least

    def give_up(
        self, useless: Collection[int], was_told: Callable[[Ending], bool], describe: Callable[[Facts], str]
    ) -> list[Action]:
        """Give up those that have failed, and tell the others, who wait for them in vain.

        Args:
            useless: others that do not help any more: they are stuck, or left too early.
            was_told: whether it is because of a signal from the user that an instance has come to such an end.
            describe: says what has become of an instance.

        Returns:
            What the agents are told, and a line about each; nothing if none has failed, or the others cannot go on.
        """
        here = [each for each in self._members.facts if not each.is_given_up]
        failed = [
            each for each in here if each.index in useless or (each.ending is not None and each.ending.is_own_failure)
        ]
        left = [each for each in here if each not in failed and each.ending is None]
        were_told = any(each.ending is not None and was_told(each.ending) for each in failed)
        if not failed or were_told or is_of_hosts(failed) or not self._least:
            return []
        if obstacle := self._obstacle(left):
            self.obstacle = self.obstacle or obstacle  # later ones fail because of the first
            return []
        others = list_instances([each.index for each in left])
        follows = f"{others} {'goes' if len(left) == 1 else 'go'} on without it"
        losses = [describe(each) for each in failed]
        self.losses += losses
        actions: list[Action] = []
        for each in failed:
            actions += self._members.give_up(each.index)
        for each in left:
            actions += self._members.release(each.index, len(self.losses))
        return [*actions, *(Say(Level.WARN, f"{line}; {follows}") for line in losses)]

    def _obstacle(self, left: Collection[Facts]) -> str:
        if not self._members.all_connected or not all(each.record.has_joined for each in left):
            return "the others cannot go on: what is lost before popdist.init has returned everywhere ends the job"
        if len(left) < max(1, self._least):
            return f"{count(len(left), 'instance')} would be left, --min-instances is {self._least}: the job ends"
        return ""
