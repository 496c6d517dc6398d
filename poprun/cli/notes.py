"""Remarks about options that are accepted and have no effect. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from poprun.cli.launch_options import OPTIONS, LaunchOptions
from poprun.cli.options import NO_PARTITION, NO_SDK, NO_SERVER, OFFLINE, ONE_HOST, STOPS

INSTEAD: Mapping[str, str] = {
    "--output-filename": "--output-dir",
    "--timestamp-output": "--timestamps",
    "--merge-stderr-to-stdout": "2>&1",
}
"""Options of mpirun for output, each with the option of poprun that has the effect: instances write to poprun."""


def warn_of_deprecated(given: Collection[str]) -> list[str]:
    """Return a line for each deprecated option among the names that were given."""
    return [
        f"--{option.name} is deprecated and has no effect; {option.deprecated}"
        for option in OPTIONS
        if option.deprecated and option.name in given
    ]


def warn_of_output(mpi_args: Collection[str]) -> list[str]:
    """Return a line for each of the user's options for mpirun that concerns output, which mpirun does not see."""
    given = {word.partition("=")[0] for word in mpi_args}
    return [
        f"mpirun's {name} has no effect, because instances write to poprun; use {instead}"
        for name, instead in INSTEAD.items()
        if given & {name, name[1:]}
    ]


def note_without_effect(given: Collection[str], settings: LaunchOptions, leaves_this_machine: bool) -> list[str]:
    """Return one line for each reason why options that were given have no effect."""
    has_partition = settings.vipu_partition is not None
    is_offline = has_partition and settings.offline_mode
    lines = {
        NO_SERVER: (NO_SERVER,),
        NO_SDK: (NO_SDK,),
        NO_PARTITION: () if has_partition else (NO_PARTITION,),
        OFFLINE: (OFFLINE, NO_PARTITION) if is_offline else (),
        ONE_HOST: () if leaves_this_machine else (ONE_HOST,),
        STOPS: (STOPS,) if settings.on_failure == "stop" else (),
    }
    idle = [option for option in OPTIONS if option.without_effect and option.name in given]
    named = ((line, [f"--{each.name}" for each in idle if each.without_effect in of]) for line, of in lines.items())
    return [f"without effect, because {reason}: {', '.join(names)}" for reason, names in named if names]
