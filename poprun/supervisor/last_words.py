"""What is done and said when a job is over. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from poprun.cli.log import Level
from poprun.cli.wording import count
from poprun.ipc.facts import Ended
from poprun.supervisor.diagnosis import MOST_LINES
from poprun.supervisor.job_actions import Action, CleanUp, Finish, Say, ShowComplaint, ShowHiddenErrors

NEVER_STARTED = (
    "a firewall may keep hosts from each other: daemons, instances and poprun connect to TCP ports as the kernel gives "
    "them out (32768-60999, see /proc/sys/net/ipv4/ip_local_port_range, and 1024 and above for Open MPI's data); "
    "`poprun doctor --host HOSTS` tries it between all of them, and a slow start may need a larger --start-timeout-s"
)
"""What to do where instances on other hosts never started."""


@dataclass(frozen=True)
class LastWords:
    """What is known about a job when it is over.

    Attributes:
        ended: how.
        obstacle: why the others could not go on without those that were lost; "" if they could, or were not to.
        losses: a line about each instance without which the job went on.
        mpirun_status: mpirun's exit status; None: it still runs.
        silent: hosts to which the connection broke.
        first_cause: what the instance to blame has said, in a line; "" where that is not known.
        lacked_some: whether some instances have never started.
    """

    ended: Ended
    obstacle: str
    losses: tuple[str, ...]
    mpirun_status: int | None
    silent: frozenset[str]
    first_cause: str = ""
    lacked_some: bool = False


def last_actions(words: LastWords, has_others: bool) -> list[Action]:
    """Everything that follows the end of mpirun and of its instances.

    Args:
        words: what is known.
        has_others: whether there are other hosts, where mpirun may have left something.
    """
    verdict = words.ended.verdict
    is_unexplained = verdict is not None and verdict.is_unexplained
    sweeps = has_others and (is_unexplained or words.mpirun_status is None or words.mpirun_status > 128)
    actions: list[Action] = [CleanUp(sweeps, words.silent)]
    if verdict is not None and verdict.instance is not None:
        actions.append(ShowHiddenErrors(verdict.instance))
    if is_unexplained:
        actions.append(ShowComplaint())
    if verdict is not None:
        last = [line for line in (words.obstacle, words.first_cause) if line]
        lines = (*verdict.lines[: MOST_LINES - len(last)], *last)
        level = Level.WARN if verdict.is_orderly and len(lines) == 1 else Level.ERROR
        actions += [Say(level, line) for line in lines]
    if is_unexplained and has_others and words.lacked_some:
        actions.append(Say(Level.ERROR, NEVER_STARTED))
    if words.losses and not words.ended.exit_status:
        text = f"the job completed without {count(len(words.losses), 'instance')}: {'; '.join(words.losses)}"
        actions.append(Say(Level.WARN, text))
    return [*actions, Finish(words.ended)]
