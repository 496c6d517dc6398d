"""The choice of the exchange: how gradients of several instances become means, from what is known of all instances."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from collectives import Communicator
from strategies.errors import DeviceError
from strategies.exchange.on_device import AUTO, COMPILED, EXCHANGES, HOST, WINDOW

logger = logging.getLogger("strategies.exchange")

VARIABLE = "POPDIST_EXCHANGE"
"""Exchange of gradients on devices: `compiled`, `window` or `host`. Default: `auto`."""
LOCAL = "local"
"""The word of a choice on one instance: gradients are added on the device, and no exchange is needed."""
CPU, GPU = "cpu", "gpu"
MPI, GRPC, HOROVOD, SINGLE = "MPI", "gRPC", "Horovod", "single"
FACTS = f"facts of instances on accelerators, of which the exchange is chosen ({VARIABLE})"
"""The name of the collective, for messages."""
_FACTS_BYTES = 1024
_DEVICE_WORDS = (COMPILED, WINDOW)


@dataclass(frozen=True)
class InstanceFacts:
    """The facts about one instance on which the exchange depends.

    Attributes:
        platform: of the devices where its replicas compute, as JAX calls it: "cpu", "gpu", "tpu".
        gpu: the UUID of its first GPU; "" where there is none, or no driver that tells.
        machine: the same for all processes that can map each other's memory.
        transport: that connects it with the others, one of MPI, GRPC, HOROVOD and SINGLE.
        has_nccl: whether NCCL is installed.
        can_carry_on: whether the others go on where an instance is lost.
        variables_on_host: whether variables and optimizer state live in host memory.
        can_connect: whether its framework can still be connected with those of the others, for compiled collectives.
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
        """Return uint8[1024], the same number of bytes for all instances."""
        packed = json.dumps(asdict(self)).encode()
        return np.frombuffer(packed.ljust(_FACTS_BYTES), np.uint8)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> InstanceFacts:
        """Return what `pack` has packed."""
        return cls(**json.loads(packed.tobytes()))


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange that was chosen.

    Attributes:
        word: COMPILED, WINDOW or HOST; LOCAL where one instance adds on its device.
        is_on_device: whether the local replicas' gradients are added on the device.
        reason: in words.
        connects: whether JAX of all instances is to be connected, for compiled collectives, before it starts. Where it
            has started already, engines of other frameworks can have that exchange.
        shares_gpu: whether some instances compute on the same GPU.
    """

    word: str
    is_on_device: bool
    reason: str
    connects: bool = False
    shares_gpu: bool = False


ON_CPUS = ExchangeChoice(HOST, False, "replicas compute on CPUs")
"""The choice on CPUs where nobody asks for another one."""


def asked_exchange(default: str, environ: Mapping[str, str]) -> str:
    """Return the word that a job asks for; the environment decides where the program leaves it open.

    Args:
        default: `Defaults.exchange`.
        environ: may have `VARIABLE`.

    Raises:
        ValueError: there is no such exchange.
    """
    for said_by, word in (("Defaults.exchange", default), (VARIABLE, environ.get(VARIABLE) or AUTO)):
        if word not in EXCHANGES:
            raise ValueError(f"{said_by} is {word!r}, and no exchange; use one of {', '.join(EXCHANGES)}")
    return default if default != AUTO else environ.get(VARIABLE) or AUTO


def are_facts_needed(platform: str, asked: str) -> bool:
    """Return whether instances tell each other their facts; on CPUs only where a device path is forced."""
    return platform != CPU or asked in _DEVICE_WORDS


def agreed_choice(communicator: Communicator, own: InstanceFacts, asked: str) -> ExchangeChoice:
    """Return the choice of all instances, and log it. Collective, on instances where `are_facts_needed`.

    An instance that needs no facts goes on to another collective, and the communicator refuses both.

    Args:
        communicator: connects the instances.
        own: the facts of this one.
        asked: see `asked_exchange`; the same on all instances.

    Raises:
        DeviceError: see `choose_exchange`.
        LayoutMismatchError: some instances have accelerators and others none, or ask for other words.
    """
    facts = [own]
    if communicator.size > 1:
        gathered = communicator.all_gather(own.pack(), name=f"{FACTS}: {asked}")
        facts = [InstanceFacts.unpack(row) for row in gathered]
    chosen = replace(choose_exchange(facts, asked), shares_gpu=_sharing(facts) is not None)
    if communicator.rank == 0:
        where = "on the device" if chosen.is_on_device else "on the host"
        logger.info("exchange %s: gradients are added %s (%s)", chosen.word, where, chosen.reason)
    return chosen


def choose_exchange(facts: Sequence[InstanceFacts], asked: str) -> ExchangeChoice:
    """Return the exchange for the instances of a job.

    Args:
        facts: of all instances, in order.
        asked: one of `EXCHANGES`.

    Raises:
        DeviceError: instances compute on devices of different kinds, or the exchange that is asked for cannot work.
    """
    _refuse_mixture(facts)
    if asked == HOST:
        return ExchangeChoice(HOST, False, "it was asked for")
    if asked == AUTO:
        return _as_found(facts)
    obstacle = _obstacle_on_devices(facts) or _obstacle(asked, facts)
    if obstacle is not None:
        raise DeviceError(f"the exchange {asked!r} was asked for, and {obstacle}")
    if len(facts) == 1:
        return _local()
    return ExchangeChoice(asked, True, "it was asked for", asked == COMPILED and _obstacle_of_start(facts) is None)


def _as_found(facts: Sequence[InstanceFacts]) -> ExchangeChoice:
    if facts[0].platform == CPU:
        return ON_CPUS
    obstacle = _obstacle_on_devices(facts)
    if obstacle is not None:
        return ExchangeChoice(HOST, False, obstacle)
    if len(facts) == 1:
        return _local()
    if facts[0].transport == GRPC:
        return ExchangeChoice(HOST, False, "gRPC connects the instances, and nothing else is opened between them")
    if facts[0].platform != GPU:
        return ExchangeChoice(HOST, False, f"replicas compute on devices of the kind {facts[0].platform}")
    without_compiled = _obstacle(COMPILED, facts) or _obstacle_of_start(facts)
    if without_compiled is None:
        return ExchangeChoice(COMPILED, True, "each instance has a GPU of its own, and NCCL is there", True)
    without_window = _obstacle(WINDOW, facts)
    if without_window is None:
        return ExchangeChoice(WINDOW, True, f"all instances are on one host, and {without_compiled}")
    return ExchangeChoice(HOST, False, f"{without_compiled}; {without_window}")


def _local() -> ExchangeChoice:
    return ExchangeChoice(LOCAL, True, "one instance drives all replicas")


def _refuse_mixture(facts: Sequence[InstanceFacts]) -> None:
    platforms = [each.platform for each in facts]
    other = next((index for index, each in enumerate(platforms) if each != platforms[0]), None)
    if other is not None:
        raise DeviceError(
            f"instance 0 computes on {platforms[0]!r} and instance {other} on {platforms[other]!r}, which give other "
            "bits; let all instances see the same devices, or set JAX_PLATFORMS=cpu for all"
        )


# ---- obstacles: a fact, and the way out; None where there is none


def _obstacle_on_devices(facts: Sequence[InstanceFacts]) -> str | None:
    """Return why nothing can be added on devices."""
    if facts[0].transport == HOROVOD:
        return "Horovod adds on the host, in an order of its own; use PopDistStrategy for an exchange on devices"
    if any(each.variables_on_host for each in facts):
        return "variables_on_host keeps variables on the host, where gradients go; leave variables_on_host out"
    return None


def _obstacle(word: str, facts: Sequence[InstanceFacts]) -> str | None:
    if len(facts) == 1:
        return None
    return _obstacle_to_compiled(facts) if word == COMPILED else _obstacle_to_window(facts)


def _obstacle_to_compiled(facts: Sequence[InstanceFacts]) -> str | None:
    if any(each.can_carry_on for each in facts):
        return (
            "compiled collectives cannot go on where an instance is lost, as --on-failure shrink wants it; "
            "use --on-failure restart"
        )
    if facts[0].platform != GPU:
        return None
    unknown = [index for index, each in enumerate(facts) if not each.gpu]
    if unknown:
        return f"the GPU of instance {unknown[0]} is not known to the CUDA driver; use the exchange 'host'"
    if sharing := _sharing(facts):
        return (
            f"instances {sharing[0]} and {sharing[1]} share the GPU {facts[sharing[0]].gpu}, which NCCL refuses; "
            "start an instance for each GPU, or use the exchange 'window'"
        )
    without = [index for index, each in enumerate(facts) if not each.has_nccl]
    if without:
        return f"NCCL is not installed for instance {without[0]}; install the nvidia-nccl package of your CUDA"
    return None


def _sharing(facts: Sequence[InstanceFacts]) -> tuple[int, int] | None:
    """Return the first two instances that compute on the same GPU; None if there are none."""
    gpus = [each.gpu for each in facts]
    repeated = ((gpus.index(gpu), index) for index, gpu in enumerate(gpus) if gpu and gpus.index(gpu) != index)
    return next(repeated, None)


def _obstacle_of_start(facts: Sequence[InstanceFacts]) -> str | None:
    """Return why JAX cannot be connected. Where that is asked for the engine says it, which may be PyTorch's."""
    started = [index for index, each in enumerate(facts) if not each.can_connect]
    if not started:
        return None
    return (
        f"JAX has started on instance {started[0]} before it could be connected with the others; make the strategy "
        "before JAX is used"
    )


def _obstacle_to_window(facts: Sequence[InstanceFacts]) -> str | None:
    without = [index for index, each in enumerate(facts) if each.platform == GPU and not each.gpu]
    if facts[0].platform not in (CPU, GPU):
        return f"windows are for GPUs and CPUs, not for {facts[0].platform}; use the exchange 'host'"
    if without:
        return f"windows need GPUs with the CUDA driver, and instance {without[0]} has none; use the exchange 'host'"
    machines = {each.machine for each in facts}
    if len(machines) > 1:
        return f"windows are for instances of one host, and these are on {len(machines)}; use the exchange 'compiled'"
    return None
