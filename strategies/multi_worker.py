"""The strategy of workers that share nothing but a network."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, final

import popdist
from collectives import Communicator
from popdist.context import join_cluster
from popdist.environments import Cluster
from popdist.instance import Instance
from strategies.argument_checks import positive
from strategies.config.configured import in_force
from strategies.config.launched import refuse_other_process, replicas_of_instance
from strategies.replicas.membership import Membership
from strategies.strategy import Strategy


class ClusterResolver(Protocol):
    """What the strategy needs of a cluster resolver; `popdist.TFConfigClusterResolver` is one."""

    @property
    def task_type(self) -> str:
        """The job of this task: "chief" or "worker"."""

    @property
    def task_id(self) -> int:
        """Its index in that job."""

    def cluster_spec(self) -> Any:
        """The cluster; `as_dict` gives the addresses of each job."""


@final
class WorkerCluster(Membership):
    """The workers of a cluster, connected by a ring over gRPC; who is lost ends the job of all.

    Args:
        cluster: who they are.
        num_local_replicas: replicas of each.
        ipus_per_replica: devices that each replica spans.
    """

    members: ClassVar[str] = "workers of a cluster"

    def __init__(self, cluster: Cluster, num_local_replicas: int, ipus_per_replica: int) -> None:
        self._cluster = cluster
        self._num_local_replicas = num_local_replicas
        super().__init__(ipus_per_replica)

    def join(self) -> tuple[Instance, Communicator]:
        """See `Membership`; returns when all workers have come."""
        join_cluster(self._cluster, self._num_local_replicas * len(self._cluster.addresses))
        refuse_other_process(in_force(), popdist.instance())
        return popdist.instance(), popdist.communicator()


@final
class IPUMultiWorkerStrategy(Strategy):
    """The replicas of all workers of a cluster, connected by a ring over gRPC; no launcher, no MPI.

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
    ) -> None:
        positive("ipus_per_replica", ipus_per_replica)
        if num_local_replicas is None:
            num_local_replicas = replicas_of_instance(in_force(), ipus_per_replica) or 1
        positive("num_local_replicas", num_local_replicas)
        membership = WorkerCluster(_cluster_of(cluster_resolver), num_local_replicas, ipus_per_replica)
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
