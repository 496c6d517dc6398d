"""Strategies of several instances: started by a launcher and connected by MPI or Horovod, or over a network alone."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, final

import popdist
from collectives import Communicator
from popdist import horovod
from popdist.context import join_cluster
from popdist.environments import Cluster
from popdist.instance import Instance
from strategies.argument_checks import positive
from strategies.defaults import Defaults
from strategies.exchange.choice import GRPC, HOROVOD
from strategies.jax.replicas.membership import Membership
from strategies.launched import join_as_configured, refuse_other_process, replicas_of_instance
from strategies.strategy import Strategy


@final
class MpiJob(Membership):
    """The instances that a launcher started, connected by MPI; one alone without a launcher."""

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; calls `popdist.init`."""
        return join_as_configured(self.defaults, self._ipus_per_replica), popdist.communicator()

    @property
    def is_chief(self) -> bool:
        """It is none of those who carry on after the chief has come to its end."""
        return self.instance.is_leader and popdist.is_chief()

    @property
    def can_carry_on(self) -> bool:
        """Under poprun --on-failure shrink."""
        return popdist.can_carry_on()

    def join_survivors(self) -> tuple[Instance, Communicator]:
        return popdist.carry_on(), popdist.communicator()


@final
class PopDistStrategy(Strategy):
    """The replicas of all instances of the job, connected by MPI; calls `popdist.init`.

    Works without a launcher too, as one instance. Where no launcher has said how many replicas there are, the
    configuration in force (`strategies.config`) does; otherwise there is one for each instance.

    Args:
        add_ipu_cross_replica_reductions: if False, reductions inside functions that `run` compiles leave the values as
            they are (the original's option of the same name).
        ipus_per_replica: devices that each replica spans, for pipelines; None: what `poprun --ipus-per-replica` says.
        defaults: see `Strategy.defaults`.

    Raises:
        TypeError, ValueError: if `ipus_per_replica` is no positive whole number, or not what poprun says.
    """

    def __init__(
        self,
        add_ipu_cross_replica_reductions: bool = True,
        ipus_per_replica: int | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        membership = MpiJob(ipus_per_replica, defaults)
        super().__init__(membership, popdist.progress(), add_ipu_cross_replica_reductions)


@final
class HorovodJob(Membership):
    """The instances of the job, connected by Horovod; who is lost ends the job of all."""

    adds_in_order: ClassVar[bool] = False
    members: ClassVar[str] = "instances that Horovod connects"
    transport: ClassVar[str] = HOROVOD

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; calls `popdist.init` and `horovod.init`."""
        return join_as_configured(self.defaults, self._ipus_per_replica), horovod.communicator()


@final
class IPUHorovodStrategy(Strategy):
    """The replicas of all instances of the job, connected by Horovod; calls `popdist.init` and `horovod.init`.

    Works under poprun, under mpirun and, as one instance, without a launcher. The gradients of an instance's replicas
    are added in their order, and the sums of the instances by Horovod, in the order that MPI chooses: the variables
    are the same to the last bit on all instances, and close to those of `PopDistStrategy` (docs: horovod.md). With
    `variables_on_host`, `Trainer` streams gradients: what the backward pass has finished travels while the rest of it
    still runs.

    Semantics: the original's `IPUHorovodStrategyV1`, with several replicas per instance.

    Args:
        variables_on_host: keep variables and optimizer state once per instance in host memory.
        ipus_per_replica: devices that each replica spans, for pipelines; None: what `poprun --ipus-per-replica` says.
        defaults: see `Strategy.defaults`.

    Raises:
        TypeError, ValueError: if `ipus_per_replica` is no positive whole number, or not what poprun says.
        MissingBackendError: Horovod is not installed; the message names the script that builds it.
        LifeCycleError: Horovod and the launcher disagree about who is there.
    """

    def __init__(
        self, variables_on_host: bool = False, ipus_per_replica: int | None = None, defaults: Defaults | None = None
    ) -> None:
        membership = HorovodJob(ipus_per_replica, defaults)
        super().__init__(membership, popdist.progress(), variables_on_host=variables_on_host)


class ClusterResolver(Protocol):
    """The interface of a cluster resolver; `popdist.TFConfigClusterResolver` is one."""

    @property
    def task_type(self) -> str:
        """The job of this task: "chief" or "worker"."""

    @property
    def task_id(self) -> int:
        """Its index in that job."""

    def cluster_spec(self) -> Any:
        """Return the cluster; `as_dict` gives the addresses of each job."""


@final
class WorkerCluster(Membership):
    """The workers of a cluster, connected over gRPC; who is lost ends the job of all.

    Args:
        cluster: who they are.
        num_local_replicas: replicas of each. None: as many as the IPUs of `defaults` are enough for, otherwise one.
        ipus_per_replica: devices that each replica spans.
        defaults: see `Membership`.
    """

    members: ClassVar[str] = "workers of a cluster"
    transport: ClassVar[str] = GRPC

    def __init__(
        self, cluster: Cluster, num_local_replicas: int | None, ipus_per_replica: int, defaults: Defaults | None
    ) -> None:
        self._cluster = cluster
        self._num_local_replicas = num_local_replicas
        super().__init__(ipus_per_replica, defaults)

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; returns when all workers have come."""
        each = self._num_local_replicas
        if each is None:
            each = replicas_of_instance(self.defaults, self._ipus_per_replica) or 1
        join_cluster(self._cluster, positive("num_local_replicas", each) * len(self._cluster.addresses))
        refuse_other_process(self.defaults, popdist.instance())
        return popdist.instance(), popdist.communicator()


@final
class IPUMultiWorkerStrategy(Strategy):
    """The replicas of all workers of a cluster, connected over gRPC; no launcher, no MPI.

    Every worker makes it at the beginning of the program; it returns when all of them have come. Gradients are added
    in the order of the tree, so the variables have the same bits as under `IPUStrategy` and `PopDistStrategy` with
    equally many replicas. With `variables_on_host`, `Trainer` streams gradients: what the backward pass has finished
    travels while the rest of it still runs.

    Semantics: the original's `IPUMultiWorkerStrategyV1`, with several replicas per worker.

    Args:
        cluster_resolver: says who the workers are and which one this is.
        variables_on_host: keep variables and optimizer state once per worker in host memory.
        num_local_replicas: replicas of each worker, the same on all of them. None: as many as the IPUs of the
            configuration in force (`strategies.config`) are enough for; one where there is none.
        ipus_per_replica: devices that each replica spans, for pipelines.
        defaults: see `Strategy.defaults`.

    Raises:
        TypeError: `cluster_resolver` is none.
        EnvironmentMismatchError: the cluster makes no sense.
        PeerRefusedError: this worker's address is in use, or another worker refuses it.
        SecurityError: workers on several machines need certificates.
        CollectiveTimeoutError: a worker has not come in time.
        ValueError: if `num_local_replicas` or `ipus_per_replica` is not positive.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variables_on_host: bool = False,
        num_local_replicas: int | None = None,
        ipus_per_replica: int = 1,
        defaults: Defaults | None = None,
    ) -> None:
        membership = WorkerCluster(_cluster_of(cluster_resolver), num_local_replicas, ipus_per_replica, defaults)
        super().__init__(membership, popdist.progress(), variables_on_host=variables_on_host)


def _cluster_of(resolver: ClusterResolver) -> Cluster:
    if not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            f"cluster_resolver is {resolver!r}, a {type(resolver).__name__}; use popdist.TFConfigClusterResolver()"
        )
    jobs = resolver.cluster_spec().as_dict()
    return Cluster(
        chief=tuple(jobs.get("chief", ())),
        worker=tuple(jobs.get("worker", ())),
        task_type=resolver.task_type,
        task_id=resolver.task_id,
    )
