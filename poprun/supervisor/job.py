"""Execution of a job: one attempt, or several if the user asks for restarts."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from poprun.cli.log import Level, Log
from poprun.cli.wording import list_ranges
from poprun.launch.launch import Across, Launch, build_command
from poprun.launch.program import quote_words
from poprun.output.output import Output, is_piped
from poprun.output.output_style import style_from
from poprun.supervisor.starting import StartedJob

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from poprun.ipc.facts import JobEnd
    from poprun.monitor.watching import JobWatch

LAST_WORDS_LIMIT_S = 0.2
"""The time limit for a reader to take each piece of the last output after an interrupt."""


def run_job(launch: Launch, environ: Mapping[str, str], log: Log, watch: Callable[[], JobWatch]) -> JobEnd:
    """Run the instances of a launch to their end.

    Args:
        launch: The launch to run.
        environ: The user's environment.
        log: The log for poprun's own messages.
        watch: Returns the watch of the job. It is first called after the start of mpirun, because it takes
            milliseconds to load.

    Returns:
        The end of the job. Its exit status is that of the failed instance, or 128 + n after signal n.
    """
    style = style_from(launch.settings, _hosts(launch), environ, is_piped())
    output = Output(launch.settings.only_output_from_instance, style)
    run_once = partial(_run_once, output=output, environ=environ, log=log, watch=watch)
    if launch.settings.on_failure == "stop":
        ended = run_once(launch)
    else:
        from poprun.supervisor.restarts import Restarts

        ended = Restarts(environ, log, lambda pause_s: watch().viewers.pause(pause_s)).run(launch, run_once)
    output.finish(limit_s=LAST_WORDS_LIMIT_S if ended.was_told else None)
    return ended


def _run_once(
    launch: Launch, output: Output, environ: Mapping[str, str], log: Log, watch: Callable[[], JobWatch]
) -> JobEnd:
    for warning in launch.remote.warnings if launch.remote is not None else ():
        log.warn(warning)
    for place in launch.places:
        log.debug(f"instance {place.index} runs on cores {list_ranges(place.cpus) or 'of any kind'}")
    command = build_command(launch)
    if log.level >= Level.INFO:
        log.info(f"running command: {quote_words(command)}")
    output.style = replace(output.style, hosts=_hosts(launch))
    if attempt := _attempt(launch):
        end_standard_input()
    across, environ = _across(launch), {**environ, **launch.mpirun_variables}
    started = StartedJob(command, across, output.style.columns, environ)

    # Loaded while mpirun starts the agents. What is loaded by then stays, so no collection has to look through it.
    from poprun.monitor.attempts import Attempt
    from poprun.supervisor.supervision import JobSupervisor

    watching = watch()
    watching.viewers.attempt = attempt
    supervisor = JobSupervisor(started, len(launch.places), output, log, across, environ, watching.viewers)
    gc.freeze()
    gc.enable()
    ended = supervisor.run()
    duration_s = time.monotonic() - started.began_s
    machine = supervisor.machine
    watching.note(Attempt(tuple(machine.facts), duration_s, ended, tuple(machine.losses), tuple(machine.carriers)))
    return ended


def _attempt(launch: Launch) -> int:
    """Return the number of restarts so far."""
    if launch.settings.on_failure == "stop":
        return 0
    from popdist.records.faults import ATTEMPT_VARIABLE

    return int(launch.extra.get(ATTEMPT_VARIABLE, "0"))


def end_standard_input() -> None:
    """Connect standard input to /dev/null: an earlier attempt has read some of it, or all runs need equal input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _hosts(launch: Launch) -> tuple[str, ...]:
    return tuple(place.host for place in launch.places)


def _across(launch: Launch) -> Across:
    settings, remote = launch.settings, launch.remote
    return Across(
        interface="" if remote is None else remote.address,
        silence_s=settings.host_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        spares=sum(place.is_spare for place in launch.places),
        reserves=sum(place.is_reserve for place in launch.places),
        most_new=settings.max_restarts if settings.regrow else 0,
        first_pause_s=settings.restart_backoff_s,
        replicas=settings.num_replicas,
        least=settings.min_instances if settings.carries_on else 0,
        tells_notice=settings.on_notice == "leave-host",
        stuck_timeout_s=settings.stuck_timeout_s,
        others=tuple(host.name for host in launch.hosts if not host.is_this_machine),
        names={} if remote is None else remote.names,
        ssh=() if remote is None else remote.shell,
    )
