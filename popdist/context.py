"""The life cycle of PopDist in this process: the instance's identity, and the communicator of all instances.

Semantics: Graphcore's PopDist, according to its documentation and its users' programs. `init` may be repeated.
Heavy modules are imported on demand, because poprun imports this package as well.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from popdist.environments.detection import describe_left_out_replicas
from popdist.environments.poprun import RESERVE_VARIABLE, SPARE_VARIABLE, num_spares
from popdist.environments.tf_config import Cluster
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.membership import rejoining
from popdist.membership.connecting import backend_of, check_rank, connect_default
from popdist.membership.leaving import can_carry_on, disconnect, watch_exit
from popdist.membership.places import take_first_places
from popdist.membership.process import ConnectBackend, group, member, process
from popdist.records.faults import ATTEMPT_VARIABLE
from popdist.records.progress import ProgressPage, Role
from popdist.records.watched import show_stack_when_asked
from popdist.spawned import join_once, leave_job, refuse_while_spawned

if TYPE_CHECKING:
    from collectives import Communicator


def init(num_replicas: int | None = None) -> None:
    """Join the instances of this job. Without a launcher the job is one instance. Repeated calls do nothing.

    At exit the instances wait for each other; an instance whose program fails does not wait.

    Args:
        num_replicas: Total number of replicas, if the launcher does not fix it (plain `mpirun`, `srun`, or no
            launcher). Default: the launcher's number, else one per instance.

    Raises:
        EnvironmentMismatchError: The launcher's variables are incomplete, or contradict each other or the argument.
        LifeCycleError: An earlier call fixed another number of replicas.
        TypeError: `num_replicas` is not a whole number.

    Example:
        >>> import popdist
        >>> popdist.init()
        >>> popdist.getNumInstances()
        1
    """
    if num_replicas is not None and (isinstance(num_replicas, bool) or not hasattr(num_replicas, "__index__")):
        raise TypeError(f"num_replicas is {num_replicas!r}; give a whole number, or nothing")
    if process.communicator is not None:
        assert process.instance is not None
        if num_replicas not in (None, process.instance.total_replicas):
            raise LifeCycleError(
                f"init was called with num_replicas={num_replicas}, but an earlier call fixed "
                f"{process.instance.total_replicas}; give the same number"
            )
        return
    process.num_replicas = num_replicas
    if process.connect is None:
        registerDefaultBackend()
    initializeBackend()


def join_cluster(cluster: Cluster, num_replicas: int | None, goes_on: bool = False) -> None:
    """Call `init` as a worker of `cluster`, whatever the environment says.

    Args:
        cluster: Addresses of all workers.
        num_replicas: Total number of replicas. None: one for each worker.
        goes_on: Whether the other workers go on if one is lost; the same on all workers.

    Raises:
        LifeCycleError: This process has already joined another job.
        EnvironmentMismatchError: The replicas cannot be divided evenly.
    """
    wanted = cluster.instance(num_replicas)
    if process.communicator is None:
        process.cluster, process.workers_go_on = cluster, goes_on
    elif process.instance != wanted:
        raise LifeCycleError(
            f"this process is an instance already ({_describe(process.instance)}), but the cluster makes it "
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
    """Register the default backend: MPI for several instances, gRPC for TF_CONFIG, none for a single instance.

    `init` calls this if no backend is registered.
    """
    _register(connect_default)


def registerBackend(path: str | os.PathLike[str]) -> None:
    """Register a user-defined backend.

    Args:
        path: Path of a Python file that defines `connect(settings, instance) -> collectives.Communicator`.

    Raises:
        LifeCycleError: A backend is in use, or the file has no `connect`.
    """
    _register(backend_of(path))


def initializeBackend() -> None:
    """Connect the instances. Call it once, after a backend was registered.

    Raises:
        LifeCycleError: The order is wrong, or the process was started by an instance's program.
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
    member.role = Role.SPARE if os.environ.get(SPARE_VARIABLE) == "1" else Role.ACTIVE
    process.attach(ProgressPage.from_environ(os.environ), instance)
    show_stack_when_asked(os.environ)
    from popdist.hidden_packages import check_packages

    # Hidden packages are found before they are imported. poprun gives the warnings itself, once for all.
    check_packages(says_so=instance.is_leader and not process.progress.is_supervised)
    is_first = os.environ.get(ATTEMPT_VARIABLE, "0") == "0"  # warn once for the job, not at each restart
    left_out = describe_left_out_replicas(instance, process.num_replicas, os.environ)
    if instance.is_leader and is_first and left_out:
        import logging

        logging.getLogger(__name__).warning(left_out)
    process.communicator = everybody = process.connect(process.settings(), instance)
    process.progress.joined()
    if process.timeline is not None:
        process.timeline.meet(process.communicator)
    process.instance = instance
    if process.is_default and (spares := num_spares(os.environ)):
        take_first_places(everybody, spares)
    elif process.workers_go_on and everybody.beside is not None:  # not a cluster of one worker
        rejoining.take_place(everybody)
    elif can_carry_on():
        process.progress.takes_role(is_spare=False)
    watch_exit()
    if RESERVE_VARIABLE in os.environ:
        from popdist.membership.reserve import hold

        hold()


def finalizeBackend() -> None:
    """Wait until all instances finalise, then disconnect. At exit this happens automatically.

    Raises:
        LifeCycleError: The backend is not initialised.
        LayoutMismatchError: Another instance calls a collective instead.
    """
    if process.communicator is None:
        raise LifeCycleError("the backend is not initialised, so it cannot be finalised")
    disconnect()


def isBackendInitialized() -> bool:
    """Return whether the instances are connected."""
    return process.communicator is not None


def instance() -> Instance:
    """Return this instance; before `init`, the instance that the environment describes."""
    return process.instance or process.detect()


def communicator() -> Communicator:
    """Return the communicator of all instances, or inside `execute_on_instances` of the named instances.

    Raises:
        LifeCycleError: `init` has not been called, or this process is a spare.
    """
    if member.role is Role.SPARE:
        raise LifeCycleError(
            "this process is a spare, which takes part in no collective of the instances before it takes the place of "
            "one; use operations of a strategy, whose results spares get, or start the job without --spares"
        )
    return own_communicator()


def own_communicator() -> Communicator:
    """Return what `communicator` returns; on a spare, a communicator of this process alone."""
    current = group.get() or process.communicator
    if current is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    return current


def is_chief() -> bool:
    """Return whether this instance prints and writes for all: instance 0 by the current numbering.

    After a loss another instance may become the chief, so ask each time. If instances continue after the chief has
    finished, none of them is the chief.
    """
    return instance().is_leader and member.role is Role.ACTIVE and not member.has_chief_left


def join_besides(connect: ConnectBackend) -> Communicator:
    """Connect the instances over a second transport, which is closed before the backend.

    Raises:
        LifeCycleError: `init` has not been called, the new communicator numbers the instances differently, or the job
            has spares.
    """
    process.refuse_in_child()
    if process.communicator is None or process.instance is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    if member.journal is not None:
        raise LifeCycleError(
            "this transport connects the same processes to the end, so no spare can join; start the job without "
            "--spares"
        )
    communicator = connect(process.settings(), process.instance)
    check_rank(communicator, process.instance, "connect the same processes, in the same order")
    process.others.append(communicator)
    return communicator


def progress() -> ProgressPage:
    """Return the progress record that the supervisor of this instance reads."""
    return process.progress


# ---- the backends


def _register(connect: ConnectBackend) -> None:
    if process.communicator is not None:
        raise LifeCycleError("a backend is in use; register another one before init")
    process.connect = connect
