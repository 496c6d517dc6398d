"""The strategies for several instances, connected by MPI, by Horovod, or over a network without a launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, final, get_args

from typing_extensions import override

import popdist
from collectives import Communicator
from popdist import horovod, spares
from popdist.context import join_cluster, own_communicator
from popdist.environments.tf_config import Cluster
from popdist.instance import Instance
from popdist.leaving import is_to_carry_on
from strategies.argument_checks import positive
from strategies.core.journal import JournalMember
from strategies.defaults import Defaults
from strategies.exchange.choice import GRPC, HOROVOD
from strategies.jax.replicas.membership import Membership
from strategies.launched import join_as_configured, refuse_other_process, replicas_of_instance
from strategies.strategy import Strategy

OnFailure = Literal["stop", "shrink"]


@final
class JobJournal(JournalMember):
    """The part of this process in the journal that popdist keeps and passes on."""

    @property
    @override
    def is_spare(self) -> bool:
        return spares.is_spare()

    @property
    @override
    def keeps_journal(self) -> bool:
        return spares.keeps_journal()

    @override
    def may_change(self, is_so: bool, was_so: bool = False) -> None:
        spares.may_change(is_so, was_so)

    @override
    def takes_values(self) -> None:
        spares.takes_values()

    @override
    def publish(self, entry: Callable[[], bytes]) -> None:
        spares.publish(entry)

    @override
    def next_entry(self) -> bytes | None:
        return spares.next_entry()


@final
class MpiJob(Membership):
    """The membership in a job of a launcher, connected by MPI; without a launcher, a job of one instance."""

    @override
    def join(self) -> tuple[Instance, Communicator]:
        instance = join_as_configured(self.defaults, self._ipus_per_replica)
        self._shrinks = is_to_carry_on()  # each step asks, and reading the environment takes longer than the answer
        return instance, own_communicator()

    @property
    @override
    def is_chief(self) -> bool:
        return self.instance.is_leader and popdist.is_chief()  # False everywhere once the chief has ended normally

    @property
    @override
    def can_carry_on(self) -> bool:
        return self._shrinks and popdist.can_carry_on()

    @property
    @override
    def journal_member(self) -> JournalMember:
        return JobJournal()

    @override
    def join_survivors(self) -> tuple[Instance, Communicator]:
        return popdist.carry_on(), own_communicator()


@final
class PopDistStrategy(Strategy):
    """The replicas of all instances of a job, connected by MPI; calls `popdist.init`.

    Without a launcher it works as one instance. If no launcher gives the number of replicas, the configuration in force
    (`strategies.config`) does; without a configuration each instance has one replica.

    Example::

        strategy = strategies.PopDistStrategy()  # poprun --num-instances 2 --num-replicas 8 python program.py
        strategy.num_replicas_in_sync            # 8
        strategy.local_replicas                  # range(0, 4) on instance 0

    Args:
        add_ipu_cross_replica_reductions: If False, reductions inside functions that `run` compiles return their
            arguments unchanged. The original has an option of this name.
        ipus_per_replica: The number of devices per replica, for pipelines; None for `poprun --ipus-per-replica`.
        defaults: Default options of everything made for this strategy; see `Strategy.defaults`.

    Raises:
        TypeError: If `ipus_per_replica` is not an integer.
        ValueError: If `ipus_per_replica` is not positive, or differs from poprun's number.
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
    """The membership in a job that Horovod connects; if one instance is lost, the job ends for all."""

    adds_in_order: ClassVar[bool] = False
    members: ClassVar[str] = "instances that Horovod connects"
    transport: ClassVar[str] = HOROVOD

    @override
    def join(self) -> tuple[Instance, Communicator]:
        return join_as_configured(self.defaults, self._ipus_per_replica), horovod.communicator()


@final
class IPUHorovodStrategy(Strategy):
    """The replicas of all instances of a job, connected by Horovod; calls `popdist.init` and `horovod.init`.

    It works under poprun, under mpirun and, as one instance, without a launcher. Each instance adds the gradients of
    its replicas in their order. Horovod adds the sums of the instances in the order that MPI chooses. So the variables
    have the same bits on all instances, and are close to those of `PopDistStrategy` (docs: horovod.md).

    With `variables_on_host`, `Trainer` streams gradients: finished gradients travel while the backward pass still runs.

    Semantics: the original's `IPUHorovodStrategyV1`, with several replicas per instance. Horovod: Sergeev & Del Balso,
    2018 (arXiv:1802.05799).

    Args:
        variables_on_host: Keep variables and optimizer state once per instance, in host memory.
        ipus_per_replica: The number of devices per replica, for pipelines; None for `poprun --ipus-per-replica`.
        defaults: Default options of everything made for this strategy; see `Strategy.defaults`.

    Raises:
        TypeError: If `ipus_per_replica` is not an integer.
        ValueError: If `ipus_per_replica` is not positive, or differs from poprun's number.
        MissingBackendError: If Horovod is not installed; the message names the script that builds it.
        LifeCycleError: If Horovod and the launcher disagree about the instances.
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
        """The job name of this task: "chief" or "worker"."""

    @property
    def task_id(self) -> int:
        """The index of this task in its job."""

    def cluster_spec(self) -> Any:
        """Return the cluster, whose `as_dict()` maps each job name to its addresses."""


@final
class WorkerCluster(Membership):
    """The membership in a cluster of workers, connected over gRPC.

    Args:
        cluster: The addresses of all workers.
        num_local_replicas: The replicas of each worker. None: as many as fit on the IPUs of `defaults`; without IPUs,
            one.
        ipus_per_replica: The number of devices per replica.
        defaults: Default options; None for those of `IPUConfig`, read each time they are used.
        on_failure: "shrink" if the other workers go on without a lost one, else "stop".
    """

    members: ClassVar[str] = "workers of a cluster"
    transport: ClassVar[str] = GRPC

    def __init__(
        self,
        cluster: Cluster,
        num_local_replicas: int | None,
        ipus_per_replica: int,
        defaults: Defaults | None,
        on_failure: OnFailure,
    ) -> None:
        if on_failure not in get_args(OnFailure):
            raise ValueError(f"on_failure is {on_failure!r}; use one of {', '.join(get_args(OnFailure))}")
        self._cluster = cluster
        self._shrinks = on_failure == "shrink"
        self._num_local_replicas = num_local_replicas
        super().__init__(ipus_per_replica, defaults)

    @override
    def join(self) -> tuple[Instance, Communicator]:
        each = self._num_local_replicas
        if each is None:
            each = replicas_of_instance(self.defaults, self._ipus_per_replica)
        num_replicas = None if each is None else positive("num_local_replicas", each) * len(self._cluster.addresses)
        join_cluster(self._cluster, num_replicas, self._shrinks)
        refuse_other_process(self.defaults, popdist.instance())
        return popdist.instance(), own_communicator()

    @property
    @override
    def is_chief(self) -> bool:
        return self.instance.is_leader and popdist.is_chief()  # False everywhere once the chief has ended normally

    @property
    @override
    def can_carry_on(self) -> bool:
        return self._shrinks and popdist.can_carry_on()

    @property
    @override
    def journal_member(self) -> JournalMember:
        return JobJournal()

    @override
    def join_survivors(self) -> tuple[Instance, Communicator]:
        return popdist.carry_on(), own_communicator()


@final
class IPUMultiWorkerStrategy(Strategy):
    """The replicas of all workers of a cluster, connected over gRPC, without a launcher and without MPI.

    Every worker makes this strategy at the beginning of the program. The call returns when all workers have connected.
    Gradients are added in the order of the tree. So the variables have the same bits as under `LocalStrategy` or
    `PopDistStrategy` with as many replicas.

    Example::

        # TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
        strategy = strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(), num_local_replicas=4)

    With `variables_on_host`, `Trainer` streams gradients: finished gradients travel while the backward pass still runs.

    Semantics: the original's `IPUMultiWorkerStrategyV1`, with several replicas per worker.

    Args:
        cluster_resolver: Names the workers, and the worker that this process is.
        variables_on_host: Keep variables and optimizer state once per worker, in host memory.
        num_local_replicas: The replicas of each worker, the same on all of them. None: as many as fit on the configured
            IPUs (`strategies.config`); without a configuration, one.
        ipus_per_replica: The number of devices per replica, for pipelines.
        defaults: Default options of everything made for this strategy; see `Strategy.defaults`.
        on_failure: What happens if a worker is lost; the same on all of them. "stop": the job ends. "shrink": the
            others take over its replicas and go on to the same bits, if they are more than half of the workers, or
            half with the first one (docs: tf_config.md).

    Raises:
        TypeError: If `cluster_resolver` is not a cluster resolver.
        EnvironmentMismatchError: If the description of the cluster is inconsistent.
        PeerRefusedError: If this worker's address is in use, or another worker refuses it.
        SecurityError: If workers on several machines have no certificates, or workers at TCP ports that go on without a
            lost one have neither certificates nor POPDIST_JOB_TOKEN.
        CollectiveTimeoutError: If a worker does not connect in time.
        ValueError: If `num_local_replicas` or `ipus_per_replica` is not positive, or `on_failure` is unknown.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variables_on_host: bool = False,
        num_local_replicas: int | None = None,
        ipus_per_replica: int = 1,
        defaults: Defaults | None = None,
        on_failure: OnFailure = "stop",
    ) -> None:
        cluster = _cluster_of(cluster_resolver)
        membership = WorkerCluster(cluster, num_local_replicas, ipus_per_replica, defaults, on_failure)
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
