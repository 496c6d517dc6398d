"""The original's constructors and loops with its own arguments, for programs that run unchanged under `popdist.compat`.

Names of devices and options of the original's hardware are accepted and have no effect.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from strategies import loops
from strategies.compat.estimator.variables import CrossReplicaOptimizer, EstimatorOptimizer, accumulating
from strategies.data.datasets import DistributedDataset
from strategies.jax.feeds.infeed import InfeedMode, InfeedQueue
from strategies.jax.feeds.outfeed import OutfeedQueue
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.job_strategies import IPUHorovodStrategy as _Horovod
from strategies.job_strategies import IPUMultiWorkerStrategy as _Workers
from strategies.job_strategies import LocalStrategy
from strategies.job_strategies import PopDistStrategy as _Job
from strategies.measure import bottleneck
from strategies.typing import Data, Function, Scalar, Tree
from strategies.values import PerReplica

__all__ = [
    "CrossReplicaGradientAccumulationOptimizer",
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizer",
    "GradientAccumulationOptimizerV2",
    "IPUHorovodStrategy",
    "IPUInfeedQueue",
    "IPUMultiWorkerStrategy",
    "IPUOutfeedQueue",
    "IPUStrategy",
    "PopDistStrategy",
    "ScopedIPUOutfeedQueue",
    "dataset_benchmark",
    "infeed_benchmark",
    "ipu_scope",
    "repeat",
    "replication_index",
    "while_loop",
]


_WITHOUT_EFFECT = {
    *("ipu_device", "device_ordinal", "enable_dataset_iterators", "enable_keras_extensions"),
    *("name", "optimise_latency", "use_while_v1", "verify_usage"),
}


def _row(target: Function, arguments: str, **renamed: str) -> Function:
    """Return a function with the original's arguments, in their order; it passes on those with an effect.

    Args:
        target: Function or class of this project.
        arguments: The original's names.
        renamed: Names of this project for some of them.
    """
    has_reductions = "add_ipu_cross_replica_reductions" in inspect.signature(target).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=None) for name in arguments.split()])

    def called(*given: Tree, **named: Tree) -> Tree:
        bound = signature.bind(*given, **named).arguments
        if "ipu_device" in bound:
            _require_device(bound["ipu_device"])
        ours = {renamed.get(name, name): value for name, value in bound.items() if name not in _WITHOUT_EFFECT}
        if not has_reductions:
            _require_reductions(ours.pop("add_ipu_cross_replica_reductions", True))
        return target(**ours)

    called.__doc__ = f"Call `{getattr(target, 'func', target).__qualname__}`, which has some of these arguments."
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


_EXTENSIONS = "enable_dataset_iterators enable_keras_extensions"
_REDUCTIONS = "ipu_device add_ipu_cross_replica_reductions"
# By default variables lie on the host, as in the original.
IPUStrategy = _row(LocalStrategy, f"ipu_device {_EXTENSIONS}")
PopDistStrategy = _row(_Job, f"{_REDUCTIONS} {_EXTENSIONS}")
IPUMultiWorkerStrategy = _row(
    partial(_Workers, variables_on_host=True), f"cluster_resolver {_REDUCTIONS} variables_on_host"
)
IPUHorovodStrategy = _row(partial(_Horovod, variables_on_host=True), f"{_REDUCTIONS} variables_on_host")
IPUOutfeedQueue = _row(OutfeedQueue, "outfeed_mode device_ordinal buffer_depth optimise_latency", outfeed_mode="mode")
ScopedIPUOutfeedQueue = _row(OutfeedQueue, "outfeed_mode device_ordinal", outfeed_mode="mode")  # deletes itself
repeat = _row(loops.repeat, "n body inputs infeed_queue use_while_v1", infeed_queue="infeed")
while_loop = _row(
    loops.while_loop,
    "condition body inputs infeed_queue maximum_iterations use_while_v1",
    infeed_queue="infeed",
)


_UPDATES = "offload_weight_update_variables replicated_optimizer_state_sharding dtype reduction_method name"
GradientAccumulationOptimizerV2 = _row(accumulating, f"opt num_mini_batches {_UPDATES}")
GradientAccumulationOptimizer = _row(accumulating, "opt num_mini_batches verify_usage name")


def _average_accumulated(opt: AnyOptimizer, *arguments: Tree, **named: Tree) -> EstimatorOptimizer:
    return accumulating(CrossReplicaOptimizer(opt), *arguments, **named)


CrossReplicaGradientAccumulationOptimizerV2 = _row(_average_accumulated, f"opt num_mini_batches {_UPDATES}")
CrossReplicaGradientAccumulationOptimizer = _row(_average_accumulated, "opt num_mini_batches verify_usage name")


def _infeed(dataset: Data, prefetch_depth: int | None = None) -> InfeedQueue:
    """Make an `InfeedQueue`; as in the original, an iterable has the elements of local replicas."""
    has_own = isinstance(dataset, DistributedDataset | PerReplica)
    return InfeedQueue(dataset, prefetch_depth, None if has_own else InfeedMode.INSTANCE)


IPUInfeedQueue = _row(_infeed, "dataset device_ordinal prefetch_depth optimise_latency")


def dataset_benchmark(*arguments: Tree, **named: Tree) -> list[str]:
    """Return the result of `strategies.dataset_benchmark`, with the same arguments, as the original's list of one."""
    return [bottleneck.dataset_benchmark(*arguments, **named)]


def infeed_benchmark(*arguments: Tree, **named: Tree) -> list[str]:
    """Return the result of `strategies.infeed_benchmark`, with the same arguments, as the original's list of one."""
    return [bottleneck.infeed_benchmark(*arguments, **named)]


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
