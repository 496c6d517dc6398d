"""The strategies for one process, and for several instances connected by MPI, by Horovod, or over a network.

The launcher's numbers win. poprun fixes instances and replicas. Open MPI, Slurm and TF_CONFIG fix only the instances;
the defaults give the replicas of each instance. Without a launcher the defaults give them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, final, get_args

from typing_extensions import override

import popdist
from collectives import Communicator, Settings, connect
from collectives.instruments import Instrument, Instruments
from popdist import horovod
from popdist.context import join_cluster, own_communicator
from popdist.environments.tf_config import Cluster
from popdist.instance import Instance
from popdist.membership import leaving, spares
from strategies.argument_checks import positive, wrong_type
from strategies.core.journal import JournalMember
from strategies.defaults import Defaults, rounded_to_power_of_two
from strategies.exchange.choice import GRPC, HOROVOD
from strategies.jax.replicas.processes import Membership
from strategies.strategy import Strategy


def replicas_of_process(defaults: Defaults, ipus_per_replica: int | None) -> tuple[int, int]:
    """Return (replicas, devices per replica) for a strategy of one process that was given no number of replicas.

    Args:
        defaults: Default options of the strategy.
        ipus_per_replica: Devices per replica that the program asks for, or None.

    Raises:
        ValueError: If the configured IPUs are too few.
        EnvironmentMismatchError: If poprun started this process with other numbers than the defaults have.
    """
    if defaults.selection is None:
        return 1, ipus_per_replica or 1
    instance = popdist.instance()
    if instance.launcher == "poprun":
        check_defaults_match(defaults, instance)
        return instance.local_replicas, ipus_per_replica or instance.ipus_per_replica
    return defaults.selection.replicas(ipus_per_replica or 1), ipus_per_replica or 1


def replicas_of_instance(defaults: Defaults, ipus_per_replica: int | None) -> int | None:
    """Return the default number of replicas per instance; None without IPUs, or if poprun fixes the number.

    Raises:
        ValueError: If the configured IPUs are too few.
    """
    if defaults.selection is None or popdist.instance().launcher == "poprun":
        return None
    return defaults.selection.replicas(ipus_per_replica or popdist.instance().ipus_per_replica)


def join_as_configured(defaults: Defaults, ipus_per_replica: int | None) -> Instance:
    """Call `popdist.init` with the number of replicas that the defaults give, unless poprun fixes it.

    Raises:
        ValueError: If the configured IPUs are too few.
        EnvironmentMismatchError: If the defaults contradict the launcher.
    """
    each = None if popdist.isBackendInitialized() else replicas_of_instance(defaults, ipus_per_replica)
    popdist.init(None if each is None else each * popdist.instance().count)
    instance = popdist.instance()
    spanning = instance if ipus_per_replica is None else replace(instance, ipus_per_replica=ipus_per_replica)
    check_defaults_match(defaults, spanning)
    return instance


def check_defaults_match(defaults: Defaults, instance: Instance) -> None:
    """Refuse defaults that describe another instance, or another number of replicas than this instance has.

    Raises:
        EnvironmentMismatchError: If the defaults contradict `instance`.
    """
    check_process_index(defaults, instance)
    selection = defaults.selection
    if selection is None or not selection.is_counted:
        return
    spanned, local, total = instance.ipus_per_replica, instance.local_replicas, instance.total_replicas
    # The number may mean the IPUs of this process, as in the original, or of all instances.
    every = {replicas * ipus for replicas in (local, total) for ipus in (spanned, rounded_to_power_of_two(spanned))}
    if selection.ipus not in every:
        raise popdist.EnvironmentMismatchError(
            f"{selection.said}, but this instance has {local} of {total} replicas that span {spanned} IPUs each "
            f"({instance.launcher}); set it to {local * spanned}, or to {total * spanned} for all instances, leave it "
            "out, or configure before popdist.init"
        )


def check_process_index(defaults: Defaults, instance: Instance) -> None:
    """Refuse defaults that name another process than this instance.

    Raises:
        EnvironmentMismatchError: If `process_index` or `process_count` differ from the instance's.
    """
    count, index = defaults.process_count, defaults.process_index
    if count and (count, index) != (instance.count, instance.index):
        raise popdist.EnvironmentMismatchError(
            f"the configuration has process_index {index} of process_count {count}, but this is instance "
            f"{instance.index} of {instance.count} ({instance.launcher}); leave "
            "experimental.multi_replica_distribution out, or let popdist.tensorflow.set_ipu_config set it"
        )


@final
class SingleProcess(Membership):
    """The membership of one process that drives all replicas.

    Args:
        num_replicas: The number of replicas, R. None: as many as fit on the IPUs of `defaults`; without IPUs, one.
        ipus_per_replica: The number of devices per replica. None: the launcher's number if IPUs are configured.
        attached: Instruments that observe the process.
        defaults: Default options; None for those of `IPUConfig`, read each time they are used.
    """

    members: ClassVar[str] = "replicas of a single process"

    def __init__(
        self,
        num_replicas: int | None,
        ipus_per_replica: int | None,
        attached: Sequence[Instrument],
        defaults: Defaults | None,
    ) -> None:
        self._num_replicas, self._attached = num_replicas, attached
        super().__init__(ipus_per_replica, defaults)

    @override
    def join(self) -> tuple[Instance, Communicator]:
        number, spanned = self._num_replicas, self._ipus_per_replica
        if number is None:
            number, spanned = replicas_of_process(self.defaults, spanned)
        alone = Instance(
            index=0,
            count=1,
            local_replicas=positive("num_replicas", number),
            replica_offset=0,
            total_replicas=number,
            local_index=0,
            ipus_per_replica=spanned or 1,
        )
        return alone, connect("single", Settings(progress=Instruments(*self._attached)))


@final
class LocalStrategy(Strategy):
    """All replicas in threads of this process; the reference for all other strategies.

    Example::

        strategy = strategies.LocalStrategy(num_replicas=8)
        trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-3))

    Unlike the original's, its `num_replicas_in_sync` is the number of replicas, and it averages gradients. So a
    program behaves as under `PopDistStrategy`.

    Args:
        num_replicas: The number of replicas, R. None: as many as fit on the configured IPUs (`strategies.config`);
            without a configuration, one.
        ipus_per_replica: The number of devices per replica, for pipelines. None: one; under poprun with a
            configuration in force, poprun's number.
        attached: Instruments that observe the process (`collectives.instruments`).
        defaults: Default options of everything made for this strategy; see `Strategy.defaults`.

    Raises:
        ValueError: If a number is not positive, or the configured IPUs are too few.
        EnvironmentMismatchError: If poprun started this process with other numbers than the configuration has.
    """

    def __init__(
        self,
        num_replicas: int | None = None,
        ipus_per_replica: int | None = None,
        attached: Sequence[Instrument] = (),
        defaults: Defaults | None = None,
    ) -> None:
        process = SingleProcess(num_replicas, ipus_per_replica, attached, defaults)
        super().__init__(process)
        is_open = num_replicas is None and ipus_per_replica is None and process.instance.ipus_per_replica == 1
        self._divisible = process.defaults.selection if is_open else None
        self._given_defaults = defaults

    @override
    def for_stages(self, stages: int) -> LocalStrategy:
        is_enough = positive("stages", stages) <= self.replicas.grid.ipus_per_replica
        if is_enough or self._divisible is None:
            return self
        return LocalStrategy(self._divisible.replicas(stages), stages, defaults=self._given_defaults)


IPUStrategy = LocalStrategy
"""The name that the original has for a strategy of one process."""


OnFailure = Literal["stop", "shrink"]


class ShrinkingJob(Membership):
    """The membership in a job that popdist connects, and that may go on without a lost instance.

    `join` sets `_shrinks`, whether the job was started to go on.
    """

    _shrinks: bool

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
        return spares

    @override
    def join_survivors(self) -> tuple[Instance, Communicator]:
        return popdist.carry_on(), own_communicator()


@final
class MpiJob(ShrinkingJob):
    """The membership in a job of a launcher, connected by MPI; without a launcher, a job of one instance."""

    @override
    def join(self) -> tuple[Instance, Communicator]:
        instance = join_as_configured(self.defaults, self._ipus_per_replica)
        self._shrinks = leaving.is_to_carry_on()  # each step asks, and reading the environment takes long
        return instance, own_communicator()


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
class WorkerCluster(ShrinkingJob):
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
        check_process_index(self.defaults, popdist.instance())
        return popdist.instance(), own_communicator()


@final
class IPUMultiWorkerStrategy(Strategy):
    """The replicas of all workers of a cluster, connected over gRPC, without a launcher and without MPI.

    Every worker makes this strategy at the beginning of the program. The call returns when all workers have connected.
    Gradients are added in the order of the tree. So the variables have the same bits as under `LocalStrategy` or
    `PopDistStrategy` with as many replicas.

    Example::

        # TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
        strategy = strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(), num_local_replicas=4)

    With `variables_on_host`, a `Trainer` of PyTorch sends finished gradients while the backward pass still runs.

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
        if not hasattr(cluster_resolver, "cluster_spec"):
            raise wrong_type("cluster_resolver", cluster_resolver, "use popdist.TFConfigClusterResolver()")
        jobs = cluster_resolver.cluster_spec().as_dict()
        cluster = Cluster(
            chief=tuple(jobs.get("chief", ())),
            worker=tuple(jobs.get("worker", ())),
            task_type=cluster_resolver.task_type,
            task_id=cluster_resolver.task_id,
        )
        membership = WorkerCluster(cluster, num_local_replicas, ipus_per_replica, defaults, on_failure)
        super().__init__(membership, popdist.progress(), variables_on_host=variables_on_host)
