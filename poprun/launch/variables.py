"""The environment variables of instances."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from popdist.environments.poprun import (
    DEVICE,
    IPUS,
    LOCAL,
    LOCAL_INSTANCE,
    NUM_SPARES_VARIABLE,
    OFFSET,
    RESERVE_VARIABLE,
    SHRINKS_VARIABLE,
    SPARE_VARIABLE,
    TOTAL,
    UNIFORM,
)
from popdist.xla import FLAGS_VARIABLE, is_measured, right_sums_setting
from poprun.cli.settings import PARTITION_VARIABLE, LaunchSettings
from poprun.hosts.hosts import Host
from poprun.launch.placement import InstancePlace
from poprun.launch.program import is_in_same_environment

_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_768)  # below Linux' ip_local_port_range, from which the kernel gives ports to connections
_SILENT = "6"
HASH_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True)
class InstanceVariables:
    """The environment variables of one instance.

    Attributes:
        own: The variables that poprun sets and the user's `-x` cannot change.
        every: All variables of the instance, with those of the user's `-x`. None: the value in poprun's environment.
    """

    own: dict[str, str]
    every: dict[str, str | None]


def instance_variables(
    settings: LaunchSettings, places: Sequence[InstancePlace], extra: Mapping[str, str], forwarded: Sequence[str]
) -> tuple[InstanceVariables, ...]:
    """Return the variables of each instance; an `-x` for one instance takes precedence over an `-x` for all."""
    common, arguments = job_variables(settings), settings.mpi
    if any(place.is_reserve for place in places):
        common[NUM_SPARES_VARIABLE] = str(sum(place.is_spare for place in places))
    found = []
    ranks = rank_variables(places)
    for place in places:
        of_instance = arguments.of(place.index)
        unset = {name: value for name, value in extra.items() if name not in of_instance.exports}
        own = popdist_variables(settings, place) | ranks[place.index] | unset | common
        of_user = {**arguments.everywhere.exports, **of_instance.exports}
        exported = {name: value for name, value in of_user.items() if name not in own}
        found.append(InstanceVariables(own, {**own, **dict.fromkeys(forwarded), **exported}))
    return tuple(found)


def popdist_variables(settings: LaunchSettings, place: InstancePlace) -> dict[str, str]:
    """Return the variables that describe an instance to its program, in the original's order."""
    variables = {
        TOTAL: str(settings.num_replicas),
        IPUS: str(settings.ipus_per_replica),
        LOCAL: str(len(place.replicas)),
        UNIFORM: "1",
        OFFSET: str(place.replicas.start),
        LOCAL_INSTANCE: str(place.local_index),
    }
    if settings.executable_cache_path is not None:
        variables["POPDIST_EXECUTABLE_CACHE_PATH"] = settings.executable_cache_path
    if settings.spares:
        variables[NUM_SPARES_VARIABLE] = str(settings.spares)
    if place.is_spare:
        variables[SPARE_VARIABLE] = "1"
    if place.is_reserve:
        variables[RESERVE_VARIABLE] = "1"
    if place.device is not None:
        variables[DEVICE] = str(place.device)
    if settings.vipu_partition is not None and settings.uses_partition:
        variables[PARTITION_VARIABLE] = settings.vipu_partition
    return variables


def job_variables(settings: LaunchSettings) -> dict[str, str]:
    """Return the variables that all instances share: injected faults, shrinking, recording and metrics.

    What only some options need is loaded for them, because it delays every launch otherwise.
    """
    variables = {}
    if settings.inject:
        from popdist.records.faults import VARIABLE as FAULTS_VARIABLE

        variables[FAULTS_VARIABLE] = ";".join(settings.inject)
    if settings.carries_on:
        variables[SHRINKS_VARIABLE] = "1"
    if settings.timeline is not None:
        from popdist.timeline.asked import FOLDER_VARIABLE, LIMIT_VARIABLE, PROFILE_VARIABLE, folder_beside

        variables[FOLDER_VARIABLE] = str(folder_beside(settings.timeline))
        if settings.timeline_limit is not None:
            variables[LIMIT_VARIABLE] = str(settings.timeline_limit)
        if settings.profile is not None:
            variables[PROFILE_VARIABLE] = settings.profile
    if settings.metrics:
        from popdist.records.metric_words import RUN_VARIABLE, parse_words
        from popdist.records.metric_words import VARIABLE as METRICS_VARIABLE

        variables[METRICS_VARIABLE] = ",".join(str(word.absolute) for word in parse_words(settings.metrics))
        variables[RUN_VARIABLE] = settings.metrics_run
    if settings.norms_every or settings.histograms_every:
        from popdist.records.distribution_settings import HISTOGRAMS_VARIABLE, NORMS_VARIABLE

        variables[NORMS_VARIABLE] = str(settings.norms_every)
        variables[HISTOGRAMS_VARIABLE] = str(settings.histograms_every)
    return variables


def extra_variables(settings: LaunchSettings, given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables besides POPDIST_*; variables that the user has set or exports stay unchanged."""
    # Output goes through a pipe; without this, a Python program's lines would be held back until 8 KiB are full.
    # With one hash seed for all instances and jobs, a set of strings has one order; see decisions_bits.md.
    defaults = {**given, "PYTHONUNBUFFERED": "1", HASH_SEED: "0"}
    if settings.profile is not None:
        from popdist.timeline.profiles import TORCH, WantedProfile

        if WantedProfile.parse(settings.profile).profiler == TORCH:
            defaults["KINETO_LOG_LEVEL"] = _SILENT  # otherwise Kineto reports its start and end on standard error
    wanted = {name: value for name, value in defaults.items() if name not in environ}
    if settings.offline_mode:
        wanted["JAX_PLATFORMS"] = "cpu"
    exported = {*settings.mpi.everywhere.exports, *settings.mpi.common.exports}
    return {name: value for name, value in wanted.items() if name not in exported}


def sums_setting(settings: LaunchSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep sums right in programs that use JAX without a strategy.

    The result is empty if the program is not of poprun's own Python environment, because XLA ends a process with
    unknown flags. It is also empty if the user exports flags with `-x`.
    """
    if not is_in_same_environment(settings.program[0], environ) or FLAGS_VARIABLE in settings.mpi.exports:
        return {}
    version = find_jaxlib([*environ.get("PYTHONPATH", "").split(":"), *sys.path])
    return right_sums_setting(version, environ) if is_measured(version) else {}


def find_jaxlib(folders: list[str]) -> str:
    """Return the version of the first jaxlib in these folders, or "". This is faster than importing the library."""
    names = (each.name for folder in folders if folder for each in Path(folder).glob("jaxlib-*.dist-info"))
    return next((name.removesuffix(".dist-info").partition("-")[2] for name in names), "")


def meeting_point(hosts: Sequence[Host], here: str, *, is_dry_run: bool = False) -> dict[str, str]:
    """Return the address where instance 0 listens for the others, as torch.distributed reads it.

    The port is drawn at random, and no connection gets it by chance. If instance 0 runs on this machine, the port is
    free now. A dry run always has the same port.

    Args:
        hosts: The hosts of the job, beginning with that of instance 0.
        here: This machine's address for the other hosts. Empty without other hosts, or if a dry run cannot know it.
        is_dry_run: Whether nothing is started.
    """
    first = hosts[0]
    if len(hosts) == 1 and first.is_this_machine:
        address = _LOOPBACK
    else:
        address = here if first.is_this_machine and here else first.name
    return {"MASTER_ADDR": address, "MASTER_PORT": str(_PORTS[0] if is_dry_run else _draw_port(first.is_this_machine))}


def rank_variables(places: Sequence[InstancePlace]) -> list[dict[str, str]]:
    """Return the variables of torch.distributed for each place: its rank among all instances, and on its host.

    Spares have ranks behind those of the instances, and are not counted.
    """
    hosts = {host: str(number) for number, host in enumerate(dict.fromkeys(place.host for place in places))}
    on_host = Counter(place.host for place in places if not place.is_spare)
    size = str(on_host.total())
    return [
        {
            "RANK": str(place.index),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(place.local_index),
            "LOCAL_WORLD_SIZE": str(on_host[place.host]),
            "GROUP_RANK": hosts[place.host],
            "NODE_RANK": hosts[place.host],
        }
        for place in places
    ]


def _draw_port(is_here: bool) -> int:
    """Draw a port, which is free if the job's first instance runs on this machine."""
    while True:
        port = _PORTS[int.from_bytes(os.urandom(4)) % len(_PORTS)]
        if not is_here:
            return port
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
