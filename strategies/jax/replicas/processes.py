"""JAX's multi-process runtime, brought up among the instances of a job, for compiled collectives.

`jax.distributed.initialize` needs a coordinator: instance 0 starts it at a free port and tells the others through the
communicator. JAX's heartbeats, its barrier at the end and its handler of SIGTERM are kept from deciding how a job
ends: the launcher and the communicator do.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import jax
import numpy as np

# The state behind `jax.distributed`, of which nothing public tells the number of processes before JAX starts, or leaves
# the coordinator without waiting for the others.
from jax._src import distributed, xla_bridge

from collectives import Communicator
from popdist.instance import this_host
from popdist.process import process
from popdist.tuning import read_limits
from popdist.xla import own_autotuning_setting
from strategies.errors import DeviceError
from strategies.exchange.host_address import LOOPBACK, own_address_towards

logger = logging.getLogger(__name__)

_TEXT_BYTES = 256  # of a host's name, or an address
_LEAST_PATIENCE_S = 100  # for JAX's heartbeats, as it has it; limits of our own may be shorter
_OTHER_WAY = "POPDIST_EXCHANGE=host"


class RuntimeState(IntEnum):
    """The state of JAX in this process, as far as other processes are concerned."""

    UNSTARTED = 0
    CONNECTED = 1
    """With as many processes as there are instances."""
    ALONE = 2
    """It has started, and knows no other process."""
    ELSEWHERE = 3
    """The program has connected it with another number of processes."""


WHY_UNCONNECTED = {
    RuntimeState.ALONE: (
        "JAX has started before it could be connected with the other instances; make the strategy before the first "
        "array, and the first look at jax.devices()"
    ),
    RuntimeState.ELSEWHERE: (
        "jax.distributed.initialize was called for another number of processes than this job has instances; leave the "
        "call out"
    ),
}
"""The states from which JAX cannot be connected, and what to do."""


def runtime_state(instances: int) -> RuntimeState:
    """Return the state of JAX in this process; JAX is not started.

    Args:
        instances: n.
    """
    state = distributed.global_state
    if state.client is not None:
        return RuntimeState.CONNECTED if state.num_processes == instances else RuntimeState.ELSEWHERE
    return RuntimeState.ALONE if xla_bridge.backends_are_initialized() else RuntimeState.UNSTARTED


def own_process() -> int | None:
    """Return the number of this process among those that JAX knows; None if it knows no other. JAX is not started."""
    state = distributed.global_state
    return state.process_id if state.client is not None and state.num_processes > 1 else None


def why_unconnected(states: Sequence[RuntimeState]) -> str:
    """Return why JAX's processes cannot be connected, or "" if they can or are.

    Args:
        states: of all instances.
    """
    for state, why in WHY_UNCONNECTED.items():
        if state in states:
            return f"on {_ranks(states, state)} {why}"
    if len(set(states)) > 1:
        connected = _ranks(states, RuntimeState.CONNECTED)
        return f"jax.distributed.initialize was called on {connected} only; leave the call out, or make it on all"
    return ""


def _ranks(states: Sequence[RuntimeState], state: RuntimeState) -> str:
    ranks = [str(rank) for rank, each in enumerate(states) if each == state]
    return f"instance{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def states_of_all(communicator: Communicator) -> list[RuntimeState]:
    """Return the state of JAX on each instance. Collective."""
    own = np.array([runtime_state(communicator.size)], np.int32)
    return [RuntimeState(state) for state in communicator.all_gather(own, name="state of JAX").ravel().tolist()]


def connect_processes(communicator: Communicator) -> None:
    """Connect JAX with that of the other instances, before it starts here; nothing if the program has. Collective.

    `jax.process_count()` is n then, and `jax.devices()` lists the devices of all instances: a program finds its own by
    `jax.local_devices()`.

    Raises:
        DeviceError: on all instances, if JAX has started on one of them; or JAX could not connect.
    """
    states = states_of_all(communicator)
    if why := why_unconnected(states):
        raise DeviceError(f"compiled collectives need JAX's processes connected, and {why}; or set {_OTHER_WAY}")
    if states[0] == RuntimeState.UNSTARTED:
        with _reserved_port() if communicator.rank == 0 else contextlib.nullcontext(0) as port:
            _initialize(_Coordinator.agreed(communicator, port), communicator)
    atexit.unregister(_leave_if_failed)
    atexit.register(_leave_if_failed)
    _delay_abort()


@dataclass(frozen=True)
class _Coordinator:
    """Where instance 0 coordinates the processes.

    Attributes:
        address: at which this instance reaches it.
        bound: where instance 0 listens: on loopback if all instances share a host.
    """

    address: str
    bound: str

    @classmethod
    def agreed(cls, communicator: Communicator, port: int) -> _Coordinator:
        """Return the coordinator as this instance reaches it. Collective.

        Args:
            communicator: connects the instances.
            port: free on the host of instance 0, which chooses it.
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
    # Gloo listens at the address of this machine's name. Without one JAX would not start, also where it uses GPUs.
    jax.config.update("jax_cpu_collectives_implementation", "gloo" if _is_known(socket.gethostname()) else None)
    # Its handler would keep SIGTERM from ending this process, and a notice from reaching the strategy.
    jax.config.update("jax_enable_preemption_service", False)
    os.environ.update(own_autotuning_setting(os.environ))
    patience_s = max(_LEAST_PATIENCE_S, math.ceil(limits.timeout_s))
    try:
        jax.distributed.initialize(
            coordinator.address,
            communicator.size,
            communicator.rank,
            cluster_detection_method="deactivate",  # else Open MPI's variables would choose a GPU
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


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a free port, which no other process can take meanwhile; gRPC can listen there, as it shares ports."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("", 0))
        yield taken.getsockname()[1]


def _leave_if_failed() -> None:
    """Leave the coordinator without an end if the program has failed: JAX's own end waits for all other instances."""
    if process.has_failed:
        state = distributed.global_state
        for each in (state.client, state.service):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # else its destructor waits
        state.client = state.service = None


def _delay_abort() -> None:
    """Have this process live on for some seconds when JAX aborts it because the coordinator is lost.

    The launcher ends it in less, or it finds by its own communicator that another instance is lost, and says so. The
    handler is the C function `sleep` itself, which gets the number of the signal, 6, for seconds. A handler in Python
    would not be called: `abort` does not return to Python.
    """
    if signal.getsignal(signal.SIGABRT) in (signal.SIG_DFL, None):  # None: Open MPI's, which writes a trace of C++
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8).copy()


def _text(row: np.ndarray) -> str:
    return row.tobytes().rstrip(b"\0").decode()
