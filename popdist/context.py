"""The life cycle of PopDist in this process: which instance it is, and the communicator of all instances.

Semantics: Graphcore's PopDist, as its documentation and its users' programs show them. `init` may be repeated.
Imports what is heavy only when it is needed: poprun starts with this package too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from popdist.connecting import backend_of, check_rank, connect_default
from popdist.environments import Cluster
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.leaving import disconnect, watch_exit
from popdist.process import ConnectBackend, group, process
from popdist.records import Progress, ProgressPage, show_stack_when_asked
from popdist.spawned import join_once, leave_job, refuse_while_spawned

if TYPE_CHECKING:
    from collectives import Communicator


def init(num_replicas: int | None = None) -> None:
    """Join the instances of this job; works without a launcher (one instance) and may be called again.

    At exit the instances wait for each other, and a program that fails does not.

    Args:
        num_replicas: the replicas of all instances, where the launcher has not fixed them (plain `mpirun`, `srun`,
            or no launcher). Default: what the launcher says, otherwise one per instance.

    Raises:
        EnvironmentMismatchError: if the launcher's variables are incomplete or contradict each other or the argument.
        TypeError: if `num_replicas` is no whole number.
    """
    if num_replicas is not None and (isinstance(num_replicas, bool) or not hasattr(num_replicas, "__index__")):
        raise TypeError(f"num_replicas is {num_replicas!r}; give a whole number, or nothing")
    if process.communicator is not None:
        assert process.instance is not None
        if num_replicas not in (None, process.instance.total_replicas):
            raise LifeCycleError(
                f"init was called for {num_replicas} replicas after it was called for "
                f"{process.instance.total_replicas}; the number of replicas is fixed once"
            )
        return
    process.num_replicas = num_replicas
    if process.connect is None:
        registerDefaultBackend()
    initializeBackend()


def join_cluster(cluster: Cluster, num_replicas: int) -> None:
    """`init` for workers whose cluster the program names, whatever the environment says.

    Raises:
        LifeCycleError: if this process has joined another job already.
        EnvironmentMismatchError: if the replicas cannot be divided evenly.
    """
    wanted = cluster.instance(num_replicas)
    if process.communicator is None:
        process.cluster = cluster
    elif process.instance != wanted:
        raise LifeCycleError(
            f"this process is an instance already ({_describe(process.instance)}), and the cluster makes it "
            f"{_describe(wanted)}; make the strategy instead of calling init, or start the program without a launcher"
        )
    init(num_replicas)


def _describe(instance: Instance | None) -> str:
    assert instance is not None
    return (
        f"{instance.index} of {instance.count} with {instance.local_replicas} of {instance.total_replicas} replicas, "
        f"started by {instance.launcher}"
    )


def registerDefaultBackend() -> None:
    """Choose MPI for several instances, gRPC for those of TF_CONFIG, nothing for one.

    `init` does it where no backend was registered.
    """
    _register(connect_default)


def registerBackend(path: str | os.PathLike[str]) -> None:
    """Choose a backend of one's own.

    Args:
        path: a Python file with `connect(settings, instance) -> collectives.Communicator`.

    Raises:
        LifeCycleError: if a backend is in use, or the file has no `connect`.
    """
    _register(backend_of(path))


def initializeBackend() -> None:
    """Connect the instances; after a backend was registered, and once.

    Raises:
        LifeCycleError: in any other order, or in a process that the program has started.
    """
    refuse_while_spawned()
    if process.connect is None:
        raise LifeCycleError("no backend is registered; call registerDefaultBackend first, or only init")
    if process.communicator is not None:
        raise LifeCycleError("the backend is initialised already; init may be repeated, initializeBackend may not")
    if process.was_finalized:
        raise LifeCycleError("the backend was finalised; MPI cannot be started again in the same process")
    leave_job(os.environ)
    instance = process.detect()
    join_once(instance, process.cluster, os.environ)
    process.attach(ProgressPage.from_environ(os.environ), instance)
    show_stack_when_asked(os.environ)
    _check_packages(instance)
    process.communicator = process.connect(process.settings(), instance)
    process.progress.joined()
    if process.timeline is not None:
        process.timeline.meet(process.communicator)
    process.instance = instance
    watch_exit()


def finalizeBackend() -> None:
    """Wait until all instances finalise, then disconnect; at exit this happens by itself.

    Raises:
        LifeCycleError: if the backend is not initialised.
        LayoutMismatchError: if another instance calls a collective instead.
    """
    if process.communicator is None:
        raise LifeCycleError("the backend is not initialised, so it cannot be finalised")
    disconnect()


def isBackendInitialized() -> bool:
    """Return whether the instances are connected."""
    return process.communicator is not None


def instance() -> Instance:
    """Return this instance; before `init`, what the environment says."""
    return process.instance or process.detect()


def communicator() -> Communicator:
    """Return the communicator of all instances, or inside `execute_on_instances` that of the named ones.

    Raises:
        LifeCycleError: before `init`.
    """
    current = group.get() or process.communicator
    if current is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    return current


def is_chief() -> bool:
    """Return whether this instance prints and writes for all: instance 0, as they are numbered now.

    Where instances are lost it may be another one later, so ask when it matters. Where some carry on after the chief
    has come to its end, it is none of them.
    """
    return instance().is_leader and not process.has_chief_left


def join_besides(connect: ConnectBackend) -> Communicator:
    """Connect the instances over something else besides the backend; it is closed before the backend is.

    Raises:
        LifeCycleError: before `init`, or if the new communicator numbers the instances differently.
    """
    if process.communicator is None or process.instance is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    communicator = connect(process.settings(), process.instance)
    check_rank(communicator, process.instance, "connect the same processes, in the same order")
    process.others.append(communicator)
    return communicator


def progress() -> Progress:
    """Return the line to the supervisor of this instance."""
    return process.progress


# ---- the backends


def _check_packages(instance: Instance) -> None:
    """Before the first import of what belongs to this package; poprun warns too, so one warning is enough."""
    from popdist.hidden_packages import check_packages

    check_packages(says_so=instance.is_leader and not process.progress.is_supervised)


def _register(connect: ConnectBackend) -> None:
    if process.communicator is not None:
        raise LifeCycleError("a backend is in use; register another one before init")
    process.connect = connect
