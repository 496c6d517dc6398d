"""The membership of an instance in a job, and JAX's multi-process runtime.

`jax.distributed.initialize` needs a coordinator: instance 0 starts it at a free port and tells the others through the
communicator. The launcher and the communicator decide how a job ends. So JAX's heartbeats, its barrier at the end and
its handler of SIGTERM are kept from doing so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, final

import numpy as np

from collectives import Communicator
from popdist.errors import LifeCycleError
from popdist.instance import Instance, this_host
from popdist.membership.leaving import has_failed, leave_first
from popdist.membership.process import process
from popdist.tuning import read_limits
from popdist.xla import own_autotuning_setting
from strategies.argument_checks import positive
from strategies.core.journal import JournalMember, NoJournal
from strategies.defaults import Defaults, in_force
from strategies.errors import DeviceError
from strategies.exchange.choice import MPI
from strategies.exchange.window_path import LOOPBACK, own_address_towards
from strategies.late_jax import distributed, is_jax_loaded, jax, xla_bridge


class Membership(ABC):
    """The membership of this instance in a job: its identity, and its connection with the other instances.

    There is one subclass for each way to connect instances, beside the strategy that chooses it. Making an object joins
    the job, in a collective call of all instances. After a loss `Replicas` calls `carry_on`, on all survivors.

    Args:
        ipus_per_replica: Number of devices that a replica spans; None: the launcher's number.
        defaults: Defaults of the strategy; None: the defaults of `IPUConfig`, read when something is made for it.

    Attributes:
        instance: Identity of this process and its replicas, by the present numbers of the instances.
        communicator: Communicator of the instances that are left.
        members: Name of the instances in messages, plural.
        transport: Transport between them: `MPI`, `GRPC` or `HOROVOD` of `strategies.exchange.choice`.

    Raises:
        TypeError, ValueError: `ipus_per_replica` is not a positive integer, or not poprun's number.
    """

    members: ClassVar[str] = "these instances"
    transport: ClassVar[str] = MPI

    def __init__(self, ipus_per_replica: int | None = None, defaults: Defaults | None = None) -> None:
        self._given_defaults = defaults
        self._ipus_per_replica = None if ipus_per_replica is None else positive("ipus_per_replica", ipus_per_replica)
        instance, self.communicator = self.join()
        self.instance = self._spanning(instance)

    @abstractmethod
    def join(self) -> tuple[Instance, Communicator]:
        """Connect with the other instances. Called once, before any other method."""

    @final
    @property
    def defaults(self) -> Defaults:
        """The defaults for objects made for the strategy, see `Strategy.defaults`."""
        return in_force() if self._given_defaults is None else self._given_defaults

    @property
    def is_chief(self) -> bool:
        """Whether this instance prints and writes for all; after a loss another instance may become the chief."""
        return self.instance.is_leader

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on if an instance is lost."""
        return False

    @property
    def journal_member(self) -> JournalMember:
        """The part of this instance in the journal for instances that join later; by default there is no journal."""
        return NoJournal()

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """Connect with the instances that are left. Collective among them. If it raises, this object is unchanged.

        Returns:
            The new identity of this instance, and the communicator of the instances that are left.

        Raises:
            LifeCycleError: The job cannot go on.
        """
        raise LifeCycleError(
            f"{self.members} cannot go on without a lost instance; use PopDistStrategy under poprun --on-failure "
            "shrink, which can"
        )

    @final
    def carry_on(self) -> None:
        """Go on with the instances that are left, see `join_survivors`. If it raises, this object is unchanged."""
        instance, self.communicator = self.join_survivors()
        self.instance = self._spanning(instance)

    def _spanning(self, instance: Instance) -> Instance:
        """Return an instance with the number of devices per replica that the program wants."""
        wanted = self._ipus_per_replica
        if wanted is None:
            return instance
        if instance.ipus_per_replica not in (1, wanted):
            raise ValueError(
                f"ipus_per_replica is {wanted}, but {instance.launcher} says {instance.ipus_per_replica}; leave it "
                f"out, or start the job with --ipus-per-replica {wanted}"
            )
        return replace(instance, ipus_per_replica=wanted)


# The private state behind `jax.distributed`. No public function tells the number of processes before JAX starts, or
# leaves the coordinator without waiting for the other processes.

logger = logging.getLogger(__name__)

_TEXT_BYTES = 256  # for a host's name, or an address
_LEAST_PATIENCE_S = 100  # JAX's default for heartbeats; our own limits may be shorter
_NO_PROXY = "no_grpc_proxy"  # gRPC reads it before no_proxy
_OTHER_WAY = "POPDIST_EXCHANGE=host"


class RuntimeState(IntEnum):
    """The state of JAX in this process with regard to other processes."""

    UNSTARTED = 0
    CONNECTED = 1
    """Connected, with as many processes as there are instances."""
    ALONE = 2
    """Started, without knowledge of other processes."""
    ELSEWHERE = 3
    """Connected by the program, with another number of processes."""


WHY_UNCONNECTED = {
    RuntimeState.ALONE: (
        "JAX started before it could be connected with the other instances; make the strategy before the first "
        "array and the first call of jax.devices()"
    ),
    RuntimeState.ELSEWHERE: (
        "jax.distributed.initialize was called for another number of processes than this job has instances; remove the "
        "call"
    ),
}
"""The states in which JAX cannot be connected, with the reason and the way out."""


def runtime_state(instances: int) -> RuntimeState:
    """Return the state of JAX in this process, without starting JAX.

    Args:
        instances: Number of instances, n.
    """
    if not is_jax_loaded():
        return RuntimeState.UNSTARTED
    state = distributed.global_state
    if state.client is not None:
        return RuntimeState.CONNECTED if state.num_processes == instances else RuntimeState.ELSEWHERE
    return RuntimeState.ALONE if xla_bridge.backends_are_initialized() else RuntimeState.UNSTARTED


def own_process() -> int | None:
    """Return the number of this process in JAX's runtime, or None if JAX knows no other process; JAX is not started."""
    if not is_jax_loaded():
        return None
    state = distributed.global_state
    return state.process_id if state.client is not None and state.num_processes > 1 else None


def why_unconnected(states: Sequence[RuntimeState]) -> str:
    """Return the reason why JAX's processes cannot be connected, or "" if they can be or are.

    Args:
        states: States of all instances.
    """
    for state, why in WHY_UNCONNECTED.items():
        if state in states:
            return f"on {_ranks(states, state)} {why}"
    if len(set(states)) > 1:
        connected = _ranks(states, RuntimeState.CONNECTED)
        return f"jax.distributed.initialize was called on {connected} only; remove the call, or make it on all"
    return ""


def _ranks(states: Sequence[RuntimeState], state: RuntimeState) -> str:
    ranks = [str(rank) for rank, each in enumerate(states) if each == state]
    return f"instance{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def connect_processes(communicator: Communicator) -> None:
    """Connect JAX with the JAX of the other instances before it starts here, unless the program has. Collective.

    Afterwards `jax.process_count()` is n, and `jax.devices()` lists the devices of all instances. A program finds its
    own devices by `jax.local_devices()`.

    Raises:
        DeviceError: On all instances, if JAX has started on one of them, or could not connect.
    """
    own = np.array([runtime_state(communicator.size)], np.int32)
    of_all = communicator.all_gather(own, name="state of JAX").ravel().tolist()
    states = [RuntimeState(state) for state in of_all]
    if why := why_unconnected(states):
        raise DeviceError(f"compiled collectives need connected JAX processes, but {why}; or set {_OTHER_WAY}")
    if states[0] == RuntimeState.UNSTARTED:
        with _reserved_port() if communicator.rank == 0 else contextlib.nullcontext(0) as port:
            _initialize(_Coordinator.agreed(communicator, port), communicator)
        leave_first()  # JAX, imported later than popdist, would wait for an instance that has not left yet
    atexit.unregister(_leave_if_failed)
    atexit.register(_leave_if_failed)
    _delay_abort()


@dataclass(frozen=True)
class _Coordinator:
    """The address at which instance 0 coordinates the processes.

    Attributes:
        address: Address at which this instance reaches it.
        bound: Address at which instance 0 listens: on loopback if all instances share a host.
    """

    address: str
    bound: str

    @classmethod
    def agreed(cls, communicator: Communicator, port: int) -> _Coordinator:
        """Return the coordinator's address for this instance. Collective.

        Args:
            communicator: Communicator of the instances.
            port: Free port on the host of instance 0, which chooses it.
        """
        hosts = [_text(row) for row in communicator.all_gather(_bytes(this_host()), name="hosts of JAX")]
        packed = np.stack([_bytes(_place(hosts[0], host, port)) for host in hosts])
        addresses = [_text(row) for row in communicator.broadcast(packed, 0, name="coordinator of JAX")]
        everywhere = "[::]" if any(address.startswith("[") for address in addresses) else "0.0.0.0"
        bound = addresses[0] if len(set(hosts)) == 1 else f"{everywhere}:{addresses[0].rpartition(':')[2]}"
        return cls(addresses[communicator.rank], bound)


def _place(own: str, other: str, port: int) -> str:
    address = LOOPBACK if own == other else own_address_towards(other)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _initialize(coordinator: _Coordinator, communicator: Communicator) -> None:
    limits = read_limits(os.environ)
    # Gloo listens at the address of this machine's name. Without that address JAX would not start, even with GPUs only.
    jax.config.update("jax_cpu_collectives_implementation", "gloo" if _is_known(socket.gethostname()) else None)
    # Its handler would keep SIGTERM from ending this process, and a notice from reaching the strategy.
    jax.config.update("jax_enable_preemption_service", False)
    os.environ.update(own_autotuning_setting(os.environ))
    os.environ.update(no_proxy_setting(os.environ, coordinator.address))
    jax.config.update("jax_check_proxy_envs", False)  # otherwise JAX warns that a proxy may be in the way
    patience_s = max(_LEAST_PATIENCE_S, math.ceil(limits.timeout_s))
    try:
        jax.distributed.initialize(
            coordinator.address,
            communicator.size,
            communicator.rank,
            cluster_detection_method="deactivate",  # otherwise Open MPI's variables would choose a GPU
            initialization_timeout=math.ceil(limits.connect_timeout_s),
            heartbeat_timeout_seconds=patience_s,
            shutdown_timeout_seconds=patience_s,
            coordinator_bind_address=coordinator.bound,
        )
    except RuntimeError as error:
        raise DeviceError(
            f"JAX could not connect with the other instances at {coordinator.address} within connect_timeout_s = "
            f"{limits.connect_timeout_s:g} ({error}); let the hosts reach each other at any port, or set "
            f"{_OTHER_WAY}"
        ) from error
    logger.debug("JAX's processes are connected at %s", coordinator.address)


def no_proxy_setting(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """Return the variable by which gRPC reaches an address directly, and not by an HTTP proxy.

    Args:
        environ: Environment variables of the process.
        address: host:port, or [IPv6]:port.
    """
    without = environ.get(_NO_PROXY) or environ.get("no_proxy", "")
    host = address.rpartition(":")[0].strip("[]")
    return {_NO_PROXY: f"{without},{host}".strip(",")}


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a free port that no other process can take meanwhile. gRPC can listen there, because it shares ports."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("", 0))
        yield taken.getsockname()[1]


def _leave_if_failed() -> None:
    """Leave JAX's runtime at once if the program has failed, because its regular end waits for all other instances."""
    is_child = process.communicator is not None and process.communicator.is_inherited
    if has_failed() or is_child:
        state = distributed.global_state
        for each in (state.client, state.service):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # otherwise its destructor waits
        state.client = state.service = None


def _delay_abort() -> None:
    """Keep this process alive for some seconds when JAX aborts it because the coordinator is lost.

    In that time the launcher ends it, or its own communicator finds and reports the lost instance. The handler is the C
    function `sleep` itself, which gets the number of the signal, 6, as seconds. A handler in Python would not be
    called: `abort` does not return to Python.
    """
    if signal.getsignal(signal.SIGABRT) in (signal.SIG_DFL, None):  # None: Open MPI's, which prints a C++ backtrace
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8).copy()


def _text(row: np.ndarray) -> str:
    return row.tobytes().rstrip(b"\0").decode()
