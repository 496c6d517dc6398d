"""Restarts of a failed job on the remaining hosts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from popdist.records.faults import ATTEMPT_VARIABLE
from poprun.cli.command_line import read_fault
from poprun.cli.log import Log
from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import count, size_text
from poprun.errors import PopRunError
from poprun.hosts.allocation import spread
from poprun.hosts.hosts import Host
from poprun.hosts.ssh import HostCommand, remote_words, run_commands
from poprun.hosts.survey import limit_from
from poprun.ipc.facts import JobEnd, Verdict
from poprun.launch.launch import Launch
from poprun.launch.plan import available_hosts, plan_launch

MOST_FAILURES = 2
"""The number of failures after which a host is left out, if the other hosts have room for the job."""

MOST_PAUSE_S = 300.0
"""The longest pause before a restart."""


class Restarts:
    """The restarts of one job, and the failures of each host."""

    def __init__(self, environ: Mapping[str, str], log: Log, pause: Callable[[float], None] = time.sleep) -> None:
        self._environ = environ
        self._pause = pause
        self._log = log
        self._reasons: list[str] = []
        self._failures: Counter[str] = Counter()

    def run(self, launch: Launch, run_once: Callable[[Launch], JobEnd]) -> JobEnd:
        """Run a job until it completes, the user ends it, or all restarts are used up."""
        current = self._counted(launch)
        while True:
            ended = run_once(current)
            if ended.verdict is None or ended.was_told:
                break
            if launch.settings.carries_on and not ended.verdict.is_of_hosts:
                break
            self._note(current, ended.verdict)
            following = self._plan(launch.settings, current)
            if following is None:
                return ended
            current = following
        if self._reasons and ended.exit_status == 0:
            restarts = count(len(self._reasons), "restart")
            self._log.warn(f"the job completed after {restarts}: {'; '.join(self._reasons)}")
        return ended

    def _note(self, launch: Launch, verdict: Verdict) -> None:
        self._reasons.append(verdict.lines[0])
        hosts = {launch.places[index].host for index in verdict.lost}
        if len(hosts) == 1:
            self._failures.update(hosts)

    def _plan(self, settings: LaunchSettings, last: Launch) -> Launch | None:
        """Pause, then return the next launch; None if the job cannot be restarted."""
        made = len(self._reasons) - 1
        if made == settings.max_restarts:
            self._log.error(f"gave up after {count(made, 'restart')} (--max-restarts {settings.max_restarts})")
            return None
        self._pause(pause_s(settings.restart_backoff_s, made))
        hosts = available_hosts(settings, self._environ)
        silent = self._silent_among(hosts, last)
        failing = {host.name for host in hosts if self._failures[host.name] >= MOST_FAILURES}
        found = None
        for left_out in (silent | failing, silent):
            found = found or fit(settings, [host for host in hosts if host.name not in left_out])
        if found is None:
            too_few = f"{_list_hosts(silent)} not answer, and the other hosts" if silent else "the hosts"
            self._log.error(
                f"cannot restart: {too_few} have no room for {settings.min_instances} or more of the instances "
                "(--min-instances)"
            )
            return None
        fitting, chosen = found
        try:
            launch = plan_launch(fitting, self._environ, self._log, chosen)
        except PopRunError as error:
            self._log.error(f"cannot restart: {error}")
            return None
        self._log.warn(
            f"restart {made + 1} of {settings.max_restarts}: {size_text(fitting.num_instances, fitting.spares)} on "
            f"{', '.join(host.name for host in chosen)}"
        )
        return self._counted(launch)

    def _counted(self, launch: Launch) -> Launch:
        return replace(launch, extra={**launch.extra, ATTEMPT_VARIABLE: str(len(self._reasons))})

    def _silent_among(self, hosts: Sequence[Host], last: Launch) -> set[str]:
        """Return the hosts that do not answer."""
        if last.remote is None:
            return set()
        shell = last.remote.shell
        asked = {
            host.name: HostCommand(tuple(remote_words(shell, host.name, ["true"])))
            for host in hosts
            if not host.is_this_machine
        }
        ends = run_commands(asked, self._environ, limit_from(self._environ))
        return {host for host, end in ends if end.status != 0}


def pause_s(first_s: float, made: int) -> float:
    """Return the pause after `made` restarts: double the pause before, at most five minutes or `first_s`."""
    return min(first_s * 2.0 ** min(made, 64), max(first_s, MOST_PAUSE_S))


def fit(settings: LaunchSettings, hosts: Sequence[Host]) -> tuple[LaunchSettings, tuple[Host, ...]] | None:
    """Return the settings for the largest possible number of instances, and their hosts; None if too few fit.

    Spares get what room is left.

    Args:
        settings: The user's settings. The replicas must divide evenly among the instances. There are `num_instances`
            instances at most, and `min_instances` at least.
        hosts: The remaining hosts.
    """
    for instances in range(settings.num_instances, settings.min_instances - 1, -1):
        if settings.num_replicas % instances == 0 and (chosen := spread(hosts, instances)):
            if not settings.spares:
                return with_instances(settings, instances), chosen
            from poprun.hosts.spares import add_hosts, most_spares

            chosen = add_hosts(chosen, hosts, settings)
            wanted = with_instances(settings, instances, settings.spares)
            return with_instances(settings, instances, most_spares(chosen, wanted)), chosen
    return None


def with_instances(settings: LaunchSettings, instances: int, spares: int = 0) -> LaunchSettings:
    """Return the settings for so many instances and spares, without settings for processes of higher index."""
    processes, shown = instances + spares, settings.only_output_from_instance
    return replace(
        settings,
        num_instances=instances,
        spares=spares,
        on_failure="shrink" if settings.on_failure == "replace" and not spares else settings.on_failure,
        inject=tuple(text for text in settings.inject if read_fault(text).instance < processes),
        only_output_from_instance=shown if shown is None or shown < processes else 0,
        instance_mpi_local_args=tuple(pair for pair in settings.instance_mpi_local_args if pair[0] < processes),
    )


def _list_hosts(names: Collection[str]) -> str:
    return f"{'host' if len(names) == 1 else 'hosts'} {', '.join(sorted(names))} {'does' if len(names) == 1 else 'do'}"
