"""The original's constructors and loops with its own arguments, for programs that run unchanged under `popdist.compat`.

Names of devices and options of the original's hardware are accepted and have no effect.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from jax.typing import ArrayLike

from strategies import loops
from strategies.data.datasets import DistributedDataset
from strategies.jax.feeds.feed_streams import InfeedMode
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.feeds.outfeed import OutfeedMode, OutfeedQueue
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.job_strategies import ClusterResolver
from strategies.job_strategies import IPUHorovodStrategy as _Horovod
from strategies.job_strategies import IPUMultiWorkerStrategy as _Workers
from strategies.job_strategies import PopDistStrategy as _Job
from strategies.local_strategy import LocalStrategy as _Alone
from strategies.per_replica import PerReplica
from strategies.typing import Data, Function, Scalar, Tree

__all__ = [
    "IPUHorovodStrategy",
    "IPUInfeedQueue",
    "IPUMultiWorkerStrategy",
    "IPUOutfeedQueue",
    "IPUStrategy",
    "PopDistStrategy",
    "ScopedIPUOutfeedQueue",
    "ipu_scope",
    "repeat",
    "replication_index",
    "while_loop",
]

_FIRST = "/device:IPU:0"


def IPUStrategy(
    ipu_device: str = _FIRST, enable_dataset_iterators: bool = True, enable_keras_extensions: bool = True
) -> _Alone:
    """Make a `strategies.LocalStrategy` with the configured number of replicas."""
    _require_device(ipu_device)
    return _Alone()


def PopDistStrategy(
    ipu_device: str = _FIRST,
    add_ipu_cross_replica_reductions: bool = True,
    enable_dataset_iterators: bool = True,
    enable_keras_extensions: bool = True,
) -> _Job:
    """Make a `strategies.PopDistStrategy`."""
    _require_device(ipu_device)
    return _Job(add_ipu_cross_replica_reductions)


def IPUMultiWorkerStrategy(
    cluster_resolver: ClusterResolver,
    ipu_device: str = _FIRST,
    add_ipu_cross_replica_reductions: bool = True,
    variables_on_host: bool = True,
) -> _Workers:
    """Make a `strategies.IPUMultiWorkerStrategy`; by default variables lie on the host, as in the original."""
    _require_device(ipu_device)
    _require_reductions(add_ipu_cross_replica_reductions)
    return _Workers(cluster_resolver, variables_on_host=variables_on_host)


def IPUHorovodStrategy(
    ipu_device: str = _FIRST, add_ipu_cross_replica_reductions: bool = True, variables_on_host: bool = True
) -> _Horovod:
    """Make a `strategies.IPUHorovodStrategy`; by default variables lie on the host, as in the original."""
    _require_device(ipu_device)
    _require_reductions(add_ipu_cross_replica_reductions)
    return _Horovod(variables_on_host=variables_on_host)


def IPUInfeedQueue(
    dataset: Data, device_ordinal: int | None = None, prefetch_depth: int | None = None, optimise_latency: bool = False
) -> InfeedQueue:
    """Make a `strategies.InfeedQueue`; as in the original, an iterable has the elements of local replicas."""
    has_own = isinstance(dataset, DistributedDataset | PerReplica)
    return InfeedQueue(dataset, prefetch_depth, None if has_own else InfeedMode.INSTANCE)


def IPUOutfeedQueue(
    outfeed_mode: OutfeedMode | None = None,
    device_ordinal: int | None = None,
    buffer_depth: int = 3,
    optimise_latency: bool = False,
) -> OutfeedQueue:
    """Make a `strategies.OutfeedQueue`."""
    return OutfeedQueue(outfeed_mode, buffer_depth)


def ScopedIPUOutfeedQueue(outfeed_mode: OutfeedMode | None = None, device_ordinal: int | None = None) -> OutfeedQueue:
    """Make a `strategies.OutfeedQueue`; like the original's scoped queue, it deletes itself."""
    return OutfeedQueue(outfeed_mode)


def repeat(
    n: ArrayLike,
    body: Function,
    inputs: Tree = None,
    infeed_queue: InfeedQueue | None = None,
    use_while_v1: bool = True,
) -> Tree:
    """Call `strategies.loops.repeat`."""
    return loops.repeat(n, body, inputs, infeed_queue)


def while_loop(
    condition: Function,
    body: Function,
    inputs: Tree = None,
    infeed_queue: InfeedQueue | None = None,
    maximum_iterations: ArrayLike | None = None,
    use_while_v1: bool = True,
) -> Tree:
    """Call `strategies.loops.while_loop`."""
    return loops.while_loop(condition, body, inputs, infeed_queue, maximum_iterations)


def replication_index(name: str | None = None) -> Scalar:
    """Return the index of the replica whose program is being traced, as an int32 scalar."""
    return get_replica_context().replica_id_in_sync_group


def ipu_scope(device: str) -> AbstractContextManager[None]:
    """Return a context that does nothing, because a strategy decides where programs run."""
    _require_device(device)
    return nullcontext()


def _require_device(device: object) -> None:
    """Raise an error if the device was meant for another argument.

    Raises:
        TypeError: If the device is not a string.
    """
    if not isinstance(device, str):
        raise TypeError(
            f"ipu_device is {device!r}, a {type(device).__name__}; as in the original, it is the name of a device: "
            "leave it out, or use the class of the same name from strategies"
        )


def _require_reductions(carried_out: object) -> None:
    if carried_out is not True:
        raise ValueError(
            f"add_ipu_cross_replica_reductions is {carried_out!r}, but only PopDistStrategy can omit reductions; "
            "leave the argument out here"
        )
