"""Instances started by poprun: POPDIST_* variables describe the replicas, Open MPI's variables the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist.environments.environment import Environment, LaunchedProcess, quote, read_whole_number, require_all
from popdist.environments.open_mpi import VARIABLES as OPEN_MPI_VARIABLES
from popdist.environments.open_mpi import is_set as is_started_by_open_mpi
from popdist.environments.open_mpi import read_process
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
"""Number of replicas of all instances: `--num-replicas`."""
IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
"""Number of devices of one replica: `--ipus-per-replica`."""
LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
"""Number of replicas of this instance."""
UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
"""1: every instance has the same number of replicas."""
OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
"""Global index of the first replica of this instance."""
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
"""Index of this instance among the instances of its host."""
DEVICE = "POPDIST_DEVICE_ID"
"""Device that `popdist.getDeviceId()` returns. Set only for a job on a simulated partition."""
LEFT_OUT_VARIABLE = "POPDIST_REPLICAS_LEFT_OUT"
"""1 if `--num-replicas` was left out, so that the number of replicas follows the number of instances."""

SHRINKS_VARIABLE = "POPDIST_SHRINKS"
"""1 if the job continues without lost instances: `--on-failure shrink` and `replace`."""
NUM_SPARES_VARIABLE = "POPDIST_NUM_SPARES"
"""Number of spares of the job, on all its processes; unset without spares. The last processes are spares at first."""
SPARE_VARIABLE = "POPDIST_SPARE"
"""1 on a process that is a spare at first. Its other variables are those of the last instance."""
RESERVE_VARIABLE = "POPDIST_RESERVE"
"""The pid of the agent, on a spare whose program begins only when poprun starts it: `--regrow`."""

ADDRESS_VARIABLE = "POPDIST_LAUNCH_ADDRESS"
"""Name of the local socket of the process that called `popdist.launch`."""
NETWORK_VARIABLE = "POPDIST_LAUNCH_NETWORK"
"""`ADDRESS PORT` of the process that called `popdist.launch`, for instances on other hosts; poprun sets it."""
TOKEN_VARIABLE = "POPDIST_LAUNCH_TOKEN"  # noqa: S105 - the name of a variable
"""Secret of a call of `popdist.launch`, which the processes of its job inherit."""
LAUNCH_VARIABLES = (ADDRESS_VARIABLE, NETWORK_VARIABLE, TOKEN_VARIABLE)

VARIABLES = (TOTAL, IPUS, LOCAL, UNIFORM, OFFSET, LOCAL_INSTANCE)
"""Variables that poprun always sets, in the order of its command line."""


@dataclass(frozen=True)
class _Replicas:
    """The values of poprun's variables."""

    total: int
    ipus: int
    local: int
    uniform: bool
    offset: int
    local_instance: int


class PopRunEnvironment(Environment):
    """A job of poprun, or one process that drives all replicas with POPDIST_* set by hand."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return any(name in environ for name in VARIABLES)

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        require_all(environ, VARIABLES, "poprun")
        replicas = _read(environ)
        if num_replicas is not None and num_replicas != replicas.total:
            raise EnvironmentMismatchError(
                f"the program asks for num_replicas={num_replicas}, but poprun started {replicas.total} "
                f"({quote(environ, [TOTAL])}); give both the same number"
            )
        if is_started_by_open_mpi(environ):
            return _one_of_many(replicas, read_process(environ), environ)
        return _alone(replicas, environ)


def _read(environ: Mapping[str, str]) -> _Replicas:
    return _Replicas(
        total=read_whole_number(environ, TOTAL, 1),
        ipus=read_whole_number(environ, IPUS, 1),
        local=read_whole_number(environ, LOCAL, 1),
        uniform=bool(read_whole_number(environ, UNIFORM, 0)),
        offset=read_whole_number(environ, OFFSET, 0),
        local_instance=read_whole_number(environ, LOCAL_INSTANCE, 0),
    )


def num_spares(environ: Mapping[str, str]) -> int:
    """Return the number of processes of the job that are spares at first."""
    return read_whole_number(environ, NUM_SPARES_VARIABLE, 1) if NUM_SPARES_VARIABLE in environ else 0


def process_index(environ: Mapping[str, str], instance: Instance) -> int:
    """Return the number of a process in poprun's messages: of a spare its rank, of an instance its index."""
    return read_process(environ).rank if SPARE_VARIABLE in environ else instance.index


def _one_of_many(replicas: _Replicas, process: LaunchedProcess, environ: Mapping[str, str]) -> Instance:
    count = process.size - num_spares(environ)
    index = min(process.rank, count - 1)
    is_block = count * replicas.local == replicas.total and index * replicas.local == replicas.offset
    agree = (
        replicas.offset + replicas.local <= replicas.total
        and replicas.local_instance == process.local_rank
        and (not replicas.uniform or is_block)
        and count >= 1
        and (process.rank >= count) == (environ.get(SPARE_VARIABLE) == "1")
    )
    if not agree:
        of_spares = (name for name in (NUM_SPARES_VARIABLE, SPARE_VARIABLE) if name in environ)
        raise EnvironmentMismatchError(
            "the variables of poprun and of Open MPI contradict each other: "
            f"{quote(environ, (*VARIABLES, *of_spares, *OPEN_MPI_VARIABLES))}; start the program with "
            "poprun"
        )
    return _instance(replicas, index, count)


def _alone(replicas: _Replicas, environ: Mapping[str, str]) -> Instance:
    is_one_of_several = replicas.total != replicas.local or replicas.offset or replicas.local_instance
    if is_one_of_several or SPARE_VARIABLE in environ:
        raise EnvironmentMismatchError(
            "the variables of poprun describe one of several instances, but the variables of Open MPI are unset: "
            f"{quote(environ, VARIABLES)}; start the program with poprun or unset POPDIST_*"
        )
    return _instance(replicas, index=0, count=1)


def _instance(replicas: _Replicas, index: int, count: int) -> Instance:
    return Instance(
        index=index,
        count=count,
        local_replicas=replicas.local,
        replica_offset=replicas.offset,
        total_replicas=replicas.total,
        local_index=min(replicas.local_instance, count - 1),
        ipus_per_replica=replicas.ipus,
        uniform=replicas.uniform,
        launcher="poprun",
    )
