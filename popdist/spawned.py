"""Child processes of an instance, which must not join the job in its place."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import MutableMapping
from typing import NoReturn

from popdist.environments.single import ALONE_VARIABLE
from popdist.environments.tf_config import Cluster
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.records.progress import page_owner

JOINED_VARIABLE = "POPDIST_JOINED"
"""`pid:job`: the process that takes part in the job. Its child processes inherit the variable and stay outside."""

_OF_THE_JOB = ("POPDIST_", "POPRUN_", "OMPI_", "PMIX_", "TF_CONFIG")
_NAMES_OF_JOBS = ("PMIX_NAMESPACE", "TF_CONFIG")
_joined: set[int] = set()


def refuse_while_spawned() -> None:
    """Stop a child process that runs the whole program again, before it joins the job as an instance.

    Raises:
        LifeCycleError: `multiprocessing` is importing the program's main module. Python itself reports this
            mistake only if the child starts processes in turn.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LifeCycleError(
            "this process was started by the program (to load data, say) and ran the program again when it "
            "imported its main module; put the program's statements under `if __name__ == '__main__':`"
        )


def join_once(instance: Instance, cluster: Cluster | None, environ: MutableMapping[str, str]) -> None:
    """Note that this process joins the job, unless an ancestor of it has joined.

    A launcher connects one process per instance; a second one would wait for ever. The program may be started by
    wrappers that do not join themselves (`bash -c`, `env`, `numactl`).

    Args:
        instance: Instance that the environment describes.
        cluster: Workers, if the program gives them.
        environ: Environment variables of this process, which its children inherit.

    Raises:
        LifeCycleError: Another process has joined as this instance.
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
        f"process {pid} is already instance {instance.index} of {instance.count}, and {how} (pid {os.getpid()}). "
        f"Call popdist.init in only one of the two, or start this one with {ALONE_VARIABLE}=1 in its environment to "
        "run it separately"
    )


def leave_job(environ: MutableMapping[str, str]) -> None:
    """Forget the job of the parent process if POPDIST_ALONE=1, so that this process runs on its own.

    Metrics, timeline and faults stay with the parent. A job that this process starts is an ordinary one.
    """
    if environ.get(ALONE_VARIABLE) == "1":
        for name in [name for name in environ if name.startswith(_OF_THE_JOB)]:
            del environ[name]
