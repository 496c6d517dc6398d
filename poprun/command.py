"""The command `poprun` without the name of another command: it launches a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from popdist.environments.poprun import LEFT_OUT_VARIABLE, TOKEN_VARIABLE
from poprun.cli.command_line import CommandLine, read_command_line, settings_from
from poprun.cli.log import Level, Log, fault_of_level, level_from, show
from poprun.cli.settings import note_without_effect, warn_of_deprecated, warn_of_output
from poprun.cli.wording import USUAL_COLUMNS, columns_of
from poprun.launch.launch import Launch, build_command
from poprun.launch.plan import plan_launch
from poprun.launch.program import check_sinks, check_word, quote_words, warn_of_hidden

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from poprun.monitor.watching import JobWatch


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Launch a job, or answer a question about the options, and return the exit status.

    Args:
        words: The words after `poprun`.
        environ: The environment of the user.

    Raises:
        PopRunError: The job is impossible.
    """
    line = read_command_line(words)
    if line.values.get("help") or line.values.get("help-all"):
        from poprun.cli.help import describe_options

        show(describe_options(columns_of(environ) or USUAL_COLUMNS, with_rare=bool(line.values.get("help-all"))))
        return 0
    if line.values.get("version"):
        from poprun.cli.help import describe_version

        show(describe_version(str(line.values.get("version-format", "text"))))
        return 0
    if "import-config" in line.values:
        from poprun.cli.config import import_config

        line = import_config(line)
    settings = settings_from(line, environ)
    log = Log(Level.TRACE if settings.debug else level_from(settings.verbosity, environ))
    if not settings.host and settings.hostfile is None:
        check_word(settings.program[0], environ)
    if fault := fault_of_level(environ):
        log.warn(fault)
    if "export-config" in line.values:
        from poprun.cli.config import check_export, export_config

        check_export(line)
    launch = plan_launch(settings, environ, log)
    is_left_out = "num-replicas" not in line.values and settings.num_instances > 1
    if is_left_out or LEFT_OUT_VARIABLE in environ:  # another poprun may have set it
        forwarded = tuple(name for name in launch.forwarded if name != LEFT_OUT_VARIABLE)
        extra = {**launch.extra, LEFT_OUT_VARIABLE: str(int(is_left_out))}
        launch = replace(launch, extra=extra, forwarded=forwarded)
    _comment(line, launch, environ, log)
    if "export-config" in line.values:
        log.info(f"wrote the options in effect to {export_config(line)}")
    command = build_command(launch)
    if settings.dry_run:
        _show_plan(launch, command, environ)
        return 0
    if settings.shows_topology:
        from poprun.launch.display import draw_topology

        show(draw_topology(launch.places, columns_of(environ)))
    return _run_job(launch, environ, log)


def _run_job(launch: Launch, environ: Mapping[str, str], log: Log) -> int:
    """Run the job, write the summary and the timeline if asked for, and return the exit status."""
    from poprun.supervisor.job import run_job

    @cache
    def watch() -> JobWatch:
        from poprun.monitor.watching import watch_job

        return watch_job(launch.settings, log, environ)

    if TOKEN_VARIABLE in environ:
        from poprun.launch.caller import tie_to_caller

        launch, environ = tie_to_caller(launch, environ)
    settings = launch.settings
    check_sinks(settings, launch.hosts, launch.places[0], environ)
    if settings.summary:
        watch()  # refuses a file that cannot be used before anything is started
    if settings.timeline is not None:
        from poprun.trace.command import make_room

        make_room(settings.timeline)
    exit_status = run_job(launch, environ, log, watch).exit_status
    watch().end(exit_status)
    if settings.timeline is not None:
        from poprun.trace.command import write_timeline

        write_timeline(settings.timeline, log)
    return exit_status


def _comment(line: CommandLine, launch: Launch, environ: Mapping[str, str], log: Log) -> None:
    """Log warnings about hidden packages and options without effect; with --debug, log the options in effect."""
    settings, leaves_this_machine = launch.settings, launch.leaves_this_machine
    for text in warn_of_deprecated(line.values):
        log.warn(text)
    if launch.crowding:
        log.warn(launch.crowding)
    for text in warn_of_hidden(settings.program, environ):
        log.warn(text)
    for text in warn_of_output(settings.mpi.words):
        log.warn(text)
    for text in note_without_effect(line.values, settings, leaves_this_machine):
        log.info(text)
    if settings.debug:
        for name, value in line.values.items():
            log.debug(f"option --{name}: {value}")


def _show_plan(launch: Launch, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Print the mpirun command to standard output, and the tables that explain it to standard error."""
    from poprun.launch.display import describe_plan, draw_placement, draw_topology

    if launch.settings.json:
        import json

        show(json.dumps(describe_plan(launch, command), indent=2))
        return
    topology_to = 1 if launch.settings.shows_topology else 2
    show(draw_topology(launch.places, columns_of(environ, topology_to)), topology_to)
    show(draw_placement(launch, columns_of(environ, 2)), 2)
    show(quote_words(command))
