"""The choice of the exchange, and the interface between an engine and the path of its gradients.

Each instance adds the gradients of its replicas on the device, as far as the tree allows (`collectives.tree.subtrees`).
A path turns these sums into the means over all replicas. Every path gives the same bits as the exchange on the host.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from collectives import Communicator
from collectives.dlpack import ExportedArray
from collectives.plans.spread import Spread
from collectives.tree import TreeNode
from strategies.errors import DeviceError
from strategies.typing import Leaf

DeviceArray: TypeAlias = Leaf
"""A flat array on a device, of the engine's framework. The device may still be computing it."""

AUTO, COMPILED, WINDOW, HOST = "auto", "compiled", "window", "host"
EXCHANGES = (AUTO, COMPILED, WINDOW, HOST)
"""The exchanges: chosen by the instances' devices; compiled collectives; windows on devices; through the host."""


class DeviceArithmetic(Protocol):
    """The arithmetic of a framework on its devices, with the same bits as `collectives.reduction.Reduction`.

    A path calls it. No method waits for the device. After an error the sums may be used up.
    """

    def mean(
        self, nodes: Sequence[TreeNode], sums: Sequence[DeviceArray], dtype: np.dtype, replicas: int
    ) -> DeviceArray:
        """Return the mean: the sum of nodes that form the whole tree, divided once by R, rounded once to `dtype`.

        Args:
            nodes: Neighbouring nodes in order; together they are the root.
            sums: Sums of these nodes; the call may reuse their memory. The sum of a single replica may have the narrow
                dtype in which it travels.
            dtype: Dtype of the mean.
            replicas: R.
        """

    def means(
        self,
        nodes: Sequence[TreeNode],
        sums: Sequence[Sequence[DeviceArray]],
        dtypes: Sequence[np.dtype],
        replicas: int,
    ) -> Sequence[DeviceArray]:
        """Return the means of several buffers, each as `mean` returns it.

        Args:
            nodes: Neighbouring nodes in order; together they are the root.
            sums: Sums of all buffers, for each node.
            dtypes: Dtypes of the means.
            replicas: R.
        """
        pairs = zip(zip(*sums, strict=True), dtypes, strict=True)
        return [self.mean(nodes, of_buffer, dtype, replicas) for of_buffer, dtype in pairs]


class DeviceViews(Protocol):
    """The memory behind a framework's arrays, for paths that copy by themselves."""

    def view(self, array: ExportedArray) -> DeviceArray:
        """Return an array that views memory of the path, without a copy.

        A path makes a new view after each change of that memory, and gives views only to the framework's programs.
        """

    def addresses(self, arrays: Sequence[DeviceArray]) -> list[int]:
        """Wait until contiguous arrays have been computed, and return their addresses."""

    def dtype_of(self, array: DeviceArray) -> np.dtype:
        """Return the NumPy dtype of an array."""

    def taken(self, view: DeviceArray, starts: Sequence[int], sizes: Sequence[int]) -> list[DeviceArray]:
        """Wait for, and return, copies of parts of a flat view; no copy shares the view's memory.

        Args:
            view: Array that `view` returned.
            starts: First elements of the parts.
            sizes: Sizes of the parts in elements.
        """

    def stacked(self, rows: Sequence[DeviceArray]) -> DeviceArray:
        """Wait for, and return, a copy of flat views, stacked along a new first axis."""


class DevicePath(ABC):
    """A path on which sums on devices become means over all replicas of all instances.

    A step calls `means` and `gather` in the same order on all instances. If a call fails, the sums may be used up, and
    other instances may still wait in it, up to the communicator's time limit. Then only `close` may follow; after a
    loss the survivors make a new path.

    Args:
        spread: Spread of the replicas over the instances; `spread.sums` has the nodes that each instance adds itself.
        rank: Rank of this instance.
    """

    path_name: ClassVar[str]
    """One of `EXCHANGES`."""

    def __init__(self, spread: Spread, rank: int) -> None:
        self.spread = spread
        self.rank = rank

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """The nodes whose sums this instance contributes."""
        return self.spread.sums[self.rank]

    @abstractmethod
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        """Return the mean of each buffer of a bucket. Collective. The call need not wait for the device.

        The caller has compared the layouts of the instances.

        Args:
            name: Name of the bucket.
            sums: Sums of `nodes` for each buffer: flat, of equal length, and of the accumulators' dtype. The sum of a
                single replica may have the dtype in which it travels. The call may reuse their memory. A buffer may be
                empty.
            dtypes: Dtype of each buffer's mean, in which gradients travel.
        """

    @abstractmethod
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        """Return the flat arrays of all instances, of equal size, as one row for each instance. Collective.

        Args:
            name: Name of the collective.
            own: Array of this instance.
        """

    def close(self) -> None:  # noqa: B027  # most paths have nothing to give back
        """Release the memory of the path. Not collective. No other method may be called afterwards."""


# ---- the choice

logger = logging.getLogger("strategies.exchange")

VARIABLE = "POPDIST_EXCHANGE"
"""Exchange of gradients on devices: `compiled`, `window` or `host`. Default: `auto`."""
LOCAL = "local"
"""The path of a job of one instance: gradients are added on its device, without an exchange."""
CPU, GPU = "cpu", "gpu"
MPI, GRPC, HOROVOD, SINGLE = "MPI", "gRPC", "Horovod", "single"
FACTS = f"facts of instances on accelerators, by which the exchange is chosen ({VARIABLE})"
"""The name of the collective in messages."""
_FACTS_BYTES = 1024


@dataclass(frozen=True)
class InstanceFacts:
    """The facts about one instance that decide the exchange.

    Attributes:
        platform: Kind of the devices that compute its replicas, in JAX's words: "cpu", "gpu", "tpu".
        gpu: UUID of its first GPU; "" without a GPU or without a driver that knows the UUID.
        machine: Identity of the memory; equal for all processes that can map each other's memory.
        transport: Transport to the other instances: MPI, GRPC, HOROVOD or SINGLE.
        has_nccl: Whether NCCL is installed.
        can_carry_on: Whether the other instances go on if an instance is lost.
        variables_on_host: Whether variables and optimizer state live in host memory.
        can_connect: Whether the framework can still connect to the other instances, for compiled collectives.
    """

    platform: str
    gpu: str = ""
    machine: str = ""
    transport: str = MPI
    has_nccl: bool = True
    can_carry_on: bool = False
    variables_on_host: bool = False
    can_connect: bool = True

    def pack(self) -> np.ndarray:
        """Return the facts as uint8[1024]; the size is the same for all instances."""
        packed = json.dumps(asdict(self)).encode()
        return np.frombuffer(packed.ljust(_FACTS_BYTES), np.uint8)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> InstanceFacts:
        """Return the facts that `pack` has packed."""
        return cls(**json.loads(packed.tobytes()))


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange that was chosen.

    Attributes:
        path_name: COMPILED, WINDOW or HOST; LOCAL if one instance adds on its device.
        is_on_device: Whether the gradients of the local replicas are added on the device.
        reason: Reason for the choice, for the log.
        connects: Whether the JAX runtimes of all instances are to be connected before JAX starts, for compiled
            collectives. If JAX has started already, engines of other frameworks can still use that exchange.
        shares_gpu: Whether two or more instances compute on the same GPU.
    """

    path_name: str
    is_on_device: bool
    reason: str
    connects: bool = False
    shares_gpu: bool = False


ON_CPUS = ExchangeChoice(HOST, False, "replicas compute on CPUs")
"""The default choice on CPUs."""
_ON_ONE_INSTANCE = ExchangeChoice(LOCAL, True, "one instance drives all replicas")


def asked_exchange(default: str, environ: Mapping[str, str]) -> str:
    """Return the exchange that the job asks for: the program's choice, or else the environment's.

    Args:
        default: `Defaults.exchange` of the program.
        environ: Environment variables; `VARIABLE` may name an exchange.

    Raises:
        ValueError: The word is not in `EXCHANGES`.
    """
    for said_by, path_name in (("Defaults.exchange", default), (VARIABLE, environ.get(VARIABLE) or AUTO)):
        if path_name not in EXCHANGES:
            raise ValueError(f"{said_by} is {path_name!r}, which is not an exchange; use one of {', '.join(EXCHANGES)}")
    return default if default != AUTO else environ.get(VARIABLE) or AUTO


def are_facts_needed(platform: str, asked: str) -> bool:
    """Return whether instances tell each other their facts: always on accelerators, on CPUs only for a device path."""
    return platform != CPU or asked in (COMPILED, WINDOW)


def agreed_choice(communicator: Communicator, own: InstanceFacts, asked: str) -> ExchangeChoice:
    """Return the choice of all instances, and log it. Collective: all instances for which `are_facts_needed` call it.

    If an instance needs no facts, it enters another collective, and the communicator refuses both.

    Args:
        communicator: Communicator of the instances.
        own: Facts of this instance.
        asked: Result of `asked_exchange`; the same on all instances.

    Raises:
        DeviceError: Instances compute on devices of different kinds, or the exchange asked for cannot work.
        LayoutMismatchError: Only some instances have accelerators, or instances ask for different exchanges.
    """
    facts = [own]
    if communicator.size > 1:
        gathered = communicator.all_gather(own.pack(), name=f"{FACTS}: {asked}")
        facts = [InstanceFacts.unpack(row) for row in gathered]
    chosen = replace(choose_exchange(facts, asked), shares_gpu=_sharing(facts) is not None)
    if communicator.rank == 0:
        where = "on the device" if chosen.is_on_device else "on the host"
        logger.info("exchange %s: gradients are added %s (%s)", chosen.path_name, where, chosen.reason)
    return chosen


def choose_exchange(facts: Sequence[InstanceFacts], asked: str) -> ExchangeChoice:
    """Return the exchange for the instances of a job.

    Args:
        facts: Facts of all instances, in order of their index.
        asked: One of `EXCHANGES`.

    Raises:
        DeviceError: Instances compute on devices of different kinds, or the exchange asked for cannot work.
    """
    _check_same_platform(facts)
    if asked == HOST:
        return ExchangeChoice(HOST, False, "it was asked for")
    if asked == AUTO:
        return _as_found(facts)
    obstacle = _obstacle_on_devices(facts) or _obstacle(asked, facts)
    if obstacle is not None:
        raise DeviceError(f"the exchange {asked!r} was asked for, but {obstacle}")
    if len(facts) == 1:
        return _ON_ONE_INSTANCE
    return ExchangeChoice(asked, True, "it was asked for", asked == COMPILED and _obstacle_of_start(facts) is None)


def _as_found(facts: Sequence[InstanceFacts]) -> ExchangeChoice:
    if facts[0].platform == CPU:
        return ON_CPUS
    obstacle = _obstacle_on_devices(facts)
    if obstacle is not None:
        return ExchangeChoice(HOST, False, obstacle)
    if len(facts) == 1:
        return _ON_ONE_INSTANCE
    if facts[0].transport == GRPC:
        return ExchangeChoice(HOST, False, "gRPC connects the instances, and they open no other connection")
    if facts[0].platform != GPU:
        return ExchangeChoice(HOST, False, f"replicas compute on devices of the kind {facts[0].platform}")
    without_compiled = _obstacle(COMPILED, facts) or _obstacle_of_start(facts)
    if without_compiled is None:
        return ExchangeChoice(COMPILED, True, "each instance has a GPU of its own, and NCCL is installed", True)
    without_window = _obstacle(WINDOW, facts)
    if without_window is None:
        return ExchangeChoice(WINDOW, True, f"all instances are on one host, and {without_compiled}")
    return ExchangeChoice(HOST, False, f"{without_compiled}; {without_window}")


def _check_same_platform(facts: Sequence[InstanceFacts]) -> None:
    platforms = [each.platform for each in facts]
    other = next((index for index, each in enumerate(platforms) if each != platforms[0]), None)
    if other is not None:
        raise DeviceError(
            f"instance 0 computes on {platforms[0]!r} and instance {other} on {platforms[other]!r}, which give "
            "different bits; let all instances see the same devices, or set JAX_PLATFORMS=cpu for all"
        )


# ---- obstacles: a fact, and the way out; None without an obstacle


def _obstacle_on_devices(facts: Sequence[InstanceFacts]) -> str | None:
    """Return the reason why gradients cannot be added on devices, or None."""
    if facts[0].transport == HOROVOD:
        return "Horovod adds on the host, in its own order; use PopDistStrategy for an exchange on devices"
    if any(each.variables_on_host for each in facts):
        return "variables_on_host keeps variables and gradients on the host; leave variables_on_host out"
    return None


def _obstacle(path_name: str, facts: Sequence[InstanceFacts]) -> str | None:
    if len(facts) == 1:
        return None
    return _obstacle_to_compiled(facts) if path_name == COMPILED else _obstacle_to_window(facts)


def _obstacle_to_compiled(facts: Sequence[InstanceFacts]) -> str | None:
    if any(each.can_carry_on for each in facts):
        return (
            "compiled collectives cannot go on without a lost instance, which --on-failure shrink requires; "
            "use --on-failure restart"
        )
    if facts[0].platform != GPU:
        return None
    unknown = [index for index, each in enumerate(facts) if not each.gpu]
    if unknown:
        return f"the CUDA driver does not know the GPU of instance {unknown[0]}; use the exchange 'host'"
    if sharing := _sharing(facts):
        return (
            f"instances {sharing[0]} and {sharing[1]} share the GPU {facts[sharing[0]].gpu}, which NCCL refuses; "
            "start one instance per GPU, or use the exchange 'window'"
        )
    without = [index for index, each in enumerate(facts) if not each.has_nccl]
    if without:
        return f"NCCL is not installed for instance {without[0]}; install the nvidia-nccl package of your CUDA"
    return None


def _sharing(facts: Sequence[InstanceFacts]) -> tuple[int, int] | None:
    """Return the first two instances that compute on the same GPU, or None."""
    gpus = [each.gpu for each in facts]
    repeated = ((gpus.index(gpu), index) for index, gpu in enumerate(gpus) if gpu and gpus.index(gpu) != index)
    return next(repeated, None)


def _obstacle_of_start(facts: Sequence[InstanceFacts]) -> str | None:
    """Return the reason why JAX cannot be connected, or None.

    If the job asks for compiled collectives, the engine raises instead: it may be PyTorch's, which needs no JAX.
    """
    started = [index for index, each in enumerate(facts) if not each.can_connect]
    if not started:
        return None
    return (
        f"JAX started on instance {started[0]} before it could be connected with the others; make the strategy "
        "before you use JAX"
    )


def _obstacle_to_window(facts: Sequence[InstanceFacts]) -> str | None:
    without = [index for index, each in enumerate(facts) if each.platform == GPU and not each.gpu]
    if facts[0].platform not in (CPU, GPU):
        return f"windows need GPUs or CPUs, not {facts[0].platform}; use the exchange 'host'"
    if without:
        return f"windows need the CUDA driver, and instance {without[0]} has none; use the exchange 'host'"
    machines = {each.machine for each in facts}
    if len(machines) > 1:
        return f"windows need all instances on one host, and these are on {len(machines)}; use the exchange 'compiled'"
    return None
