"""The `poprun` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from popdist.environments.threads import thread_pool_setting
from popdist.instance import this_host
from poprun.command import FORWARDED, Launch, build_command, extra_variables
from poprun.command_line import read_command_line
from poprun.cores import format_cpus, usable_cores
from poprun.errors import PopRunError
from poprun.log import Log, level_from
from poprun.lookup import check_program, check_user, find_mpirun, quote_words
from poprun.options import describe_options
from poprun.placement import place_instances
from poprun.settings import Settings, settings_from
from poprun.topology import draw_topology


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words after `poprun`; by default those of this process.

    Returns:
        The exit status: that of the instance that failed, 128 + n after signal n, 2 for a wrong command line.
    """
    words = sys.argv[1:] if argv is None else argv
    _open_missing_streams()
    try:
        return _run(words, os.environ)
    except PopRunError as error:
        Log().error(str(error))
        return error.exit_status


def plan_launch(settings: Settings, environ: Mapping[str, str]) -> Launch:
    """Decide everything about a launch; nothing is started.

    Raises:
        PopRunError: mpirun or the program cannot be found.
    """
    cores = usable_cores()
    mpirun = find_mpirun(sys.executable, environ)
    check_program(settings.program[0], environ)
    pool = thread_pool_setting(environ, settings.num_replicas)
    return Launch(
        settings=settings,
        places=place_instances(settings, this_host(), cores),
        mpirun=mpirun,
        python=sys.executable,
        extra=extra_variables(settings, pool, environ),
        forwarded=tuple(name for name in FORWARDED if name in environ),
        oversubscribes=settings.num_instances > len(cores),
    )


def _open_missing_streams() -> None:
    """Make sure that 0, 1 and 2 are open, or the next file would become a standard stream of the programs."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    line = read_command_line(words)
    if line.values.get("help"):
        print(describe_options())
        return 0
    if line.values.get("version"):
        from poprun.version import describe_version  # reads the metadata of every package

        print(describe_version(str(line.values.get("version-format", "text"))))
        return 0
    settings = settings_from(line)
    launch = plan_launch(settings, environ)
    log = Log(level_from(settings.verbosity, environ))
    if settings.shows_topology:
        print(draw_topology(launch.places), flush=True)
    command = build_command(launch)
    if settings.dry_run:
        print(quote_words(command))
        return 0
    check_user(settings, os.geteuid(), environ)
    return _launch(launch, command, environ, log)


def _launch(launch: Launch, command: Sequence[str], environ: Mapping[str, str], log: Log) -> int:
    from poprun.output import Output
    from poprun.supervision import Supervisor

    for place in launch.places:
        log.debug(f"instance {place.index} runs on cores {format_cpus(place.cpus) or 'of any kind'}")
    log.info(f"running command: {quote_words(command)}")
    output = Output(launch.settings.only_output_from)
    return Supervisor(command, len(launch.places), output, log).run(environ)


if __name__ == "__main__":
    sys.exit(main())
