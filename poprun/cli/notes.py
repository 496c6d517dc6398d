"""What poprun says about options that are accepted and do nothing. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

DEPRECATED: Mapping[str, str] = {
    "numa-aware": "--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own",
    "vipu-cluster": "--vipu-allocation has replaced it",
}

INSTEAD: Mapping[str, str] = {
    "--output-filename": "--output-dir",
    "--timestamp-output": "--timestamps",
    "--merge-stderr-to-stdout": "2>&1",
}
"""What does the same as options of mpirun for output: instances write to poprun, not to mpirun."""

_SERVER = "there is no V-IPU server, partitions are simulated"
_PARTITION = "there is no --vipu-partition"
_ONE_HOST = "the job stays on this machine"

_ALWAYS: Mapping[str, tuple[str, ...]] = {
    _SERVER: (
        "vipu-server-host",
        "vipu-server-port",
        "vipu-server-timeout",
        "vipu-partition-attempts",
        "vipu-cluster",
        "vipu-allocation",
        "reset-partition",
        "remove-partition",
        "sync-type",
    ),
    "there is no Poplar SDK": ("synchronise-poplar-sdk",),
}
IDLE = frozenset(name for names in _ALWAYS.values() for name in names) | DEPRECATED.keys()
"""The options that never have an effect."""

_WITHOUT_PARTITION = ("update-partition",)
_WITHOUT_SURVIVAL = ("max-restarts", "restart-backoff-s", "min-instances")
_ON_ONE_HOST = ("host-subnet", "synchronise-python-venv", "distribute-ssh-key", "host-timeout-s", "skip-checks")


@dataclass(frozen=True)
class Circumstances:
    """On what it depends whether an option has an effect.

    Attributes:
        is_offline: no devices are used.
        has_partition: a simulated partition is named.
        leaves_this_machine: instances run on other hosts.
        on_failure: what happens when an instance fails.
    """

    is_offline: bool = False
    has_partition: bool = False
    leaves_this_machine: bool = False
    on_failure: str = "stop"


def warn_of_deprecated(given: Collection[str]) -> list[str]:
    """A line for each deprecated option that was given, without its dashes."""
    return [
        f"--{name} is deprecated and has no effect; {instead}" for name, instead in DEPRECATED.items() if name in given
    ]


def warn_of_output(mpi_args: Collection[str]) -> list[str]:
    """A line for each of the user's options for mpirun that concerns output which mpirun does not get to see."""
    given = {word.partition("=")[0] for word in mpi_args}
    return [
        f"mpirun's {name} has no effect, because instances write to poprun; use {instead}"
        for name, instead in INSTEAD.items()
        if given & {name, name[1:]}
    ]


def note_without_effect(given: Collection[str], circumstances: Circumstances) -> list[str]:
    """One line for each reason why options that were given do nothing."""
    idle = dict(_ALWAYS)
    if not circumstances.has_partition:
        idle[_PARTITION] = _WITHOUT_PARTITION
    elif circumstances.is_offline:
        idle["--offline-mode is on"] = ("vipu-partition", *_WITHOUT_PARTITION)
    if not circumstances.leaves_this_machine:
        idle[_ONE_HOST] = _ON_ONE_HOST
    if circumstances.on_failure == "stop":
        idle["--on-failure is stop"] = _WITHOUT_SURVIVAL
    named = ((reason, [f"--{name}" for name in names if name in given]) for reason, names in idle.items())
    return [f"without effect, because {reason}: {', '.join(names)}" for reason, names in named if names]
