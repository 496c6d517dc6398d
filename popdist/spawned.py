"""Processes that a program of the job has started: none of them takes part as the instance that started it."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import MutableMapping
from typing import NoReturn

from popdist.environments import Cluster
from popdist.environments.single import ALONE_VARIABLE
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.records.progress import page_owner

JOINED_VARIABLE = "POPDIST_JOINED"
"""`pid:job`: the process that takes part in the job. Its child processes inherit the variable and stay outside."""

_OF_THE_JOB = ("POPDIST_", "POPRUN_", "OMPI_", "PMIX_", "TF_CONFIG")
_NAMES_OF_JOBS = ("PMIX_NAMESPACE", "TF_CONFIG")
_joined: set[int] = set()


def refuse_while_spawned() -> None:
    """Stop a program that a process it has started runs again, before that takes part in the job as an instance.

    Raises:
        LifeCycleError: if `multiprocessing` is importing the program's main module; it says so itself only where
            that starts processes in turn.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LifeCycleError(
            "this process was started by the program (to load data, say), and has run the program again when it "
            "imported its main module; put what the program does under `if __name__ == '__main__':`"
        )


def join_once(instance: Instance, cluster: Cluster | None, environ: MutableMapping[str, str]) -> None:
    """Note that this process takes part in the job, unless one that it descends from does.

    Launchers connect one process of each instance; a second one would wait for ever. Wrappers that do not take part
    themselves (`bash -c`, `env`, `numactl`) may start the program.

    Args:
        instance: what the environment says that this process is.
        cluster: the workers, if the program names them.
        environ: the variables of this process, which those that it starts inherit.

    Raises:
        LifeCycleError: if another process takes part as this instance.
    """
    if instance.count == 1:
        return
    described = (instance, cluster, *(environ.get(name) for name in _NAMES_OF_JOBS))
    job = f"{zlib.crc32(repr(described).encode()):08x}"
    starter, _, joined = environ.get(JOINED_VARIABLE, "").partition(":")
    if joined == job and int(starter) not in _joined:
        _refuse(int(starter), "has started this one", instance)
    if (owner := page_owner(environ)) > 0 and owner != os.getpid():
        _refuse(owner, "runs beside this one", instance)
    _joined.add(os.getpid())
    environ[JOINED_VARIABLE] = f"{os.getpid()}:{job}"


def _refuse(pid: int, how: str, instance: Instance) -> NoReturn:
    raise LifeCycleError(
        f"process {pid} takes part in the job as instance {instance.index} of {instance.count}, and {how} "
        f"(pid {os.getpid()}), which cannot be the same instance; start this one with {ALONE_VARIABLE}=1 "
        "in its environment to let it run by itself, or call popdist.init in one of the two only"
    )


def leave_job(environ: MutableMapping[str, str]) -> None:
    """Forget the job that started the parent of this process, if it is to run by itself.

    Metrics, timeline and faults are those of the parent. A job that this process starts in turn is one like any other.
    """
    if environ.get(ALONE_VARIABLE) == "1":
        for name in [name for name in environ if name.startswith(_OF_THE_JOB)]:
            del environ[name]
