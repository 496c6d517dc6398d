"""Data-parallel training on R replicas, with the same bits however the replicas are spread over instances.

A strategy says where the replicas run, a data set gives each replica its rows, and a trainer makes the steps. Models
are functions of JAX, or of Keras (`strategies.keras`); for modules of PyTorch there is `strategies.torch`.

Example::

    strategy = strategies.PopDistStrategy()
    dataset = strategy.distribute_dataset({"image": x, "label": y}, batch_size=32)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-3))
    state = trainer.init(variables)
    for batch in dataset.epoch(0):
        state, metrics = trainer.step(state, batch)
    strategies.fingerprint(state.variables)  # the same on all instances, and for every number of instances
"""

import gc
from types import ModuleType

try:  # JAX and optax make 100,000 permanent objects; garbage collection would take a fifth of this import
    _collects_garbage = gc.isenabled()
    gc.disable()
    import jax  # noqa: F401
    import optax  # noqa: F401
finally:
    if _collects_garbage:
        gc.enable()

from strategies import config, cross_replica_ops, loops, metrics, within_replica_ops
from strategies.checkpoints.checkpoint_folder import Best
from strategies.checkpoints.checkpoints import Checkpoints
from strategies.checkpoints.loading import load_variables
from strategies.checkpoints.own_loop import OwnLoop
from strategies.compat import pipelining_ops
from strategies.core.evaluation import Evaluation
from strategies.core.metrics import Metrics
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.data.casts import Cast, casting
from strategies.data.datasets import DistributedDataset
from strategies.data.grain_source import GrainSource
from strategies.data.layout import Position
from strategies.data.sources import InputContext, Masked
from strategies.defaults import Defaults
from strategies.errors import (
    CheckpointError,
    DeviceError,
    DisagreementError,
    DivergenceError,
    EndOfDataError,
    FailedPreconditionError,
    FeedError,
    NonFiniteGradientError,
    StrategyError,
)
from strategies.ipu import IPUStrategy
from strategies.jax.comparing.digest import fingerprint
from strategies.jax.evaluation.mean import Mean
from strategies.jax.feeds.feed_streams import InfeedMode
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.feeds.outfeed import OutfeedMode, OutfeedQueue
from strategies.jax.gradients.arguments import Outcome
from strategies.jax.options import StepOptions
from strategies.jax.programs.gradient_capture import GradientCaptureContext, capture_upstream_gradients
from strategies.jax.programs.recomputation import recomputation_checkpoint, recomputing
from strategies.jax.replicas.replica_context import ReplicaContext, get_replica_context
from strategies.jax.replicas.variables import MirroredVariable, SyncOnReadVariable
from strategies.jax.updates.arithmetic import clip_by_global_norm
from strategies.jax.updates.optimizers import MapGradientOptimizer
from strategies.job_strategies import IPUHorovodStrategy, IPUMultiWorkerStrategy, PopDistStrategy
from strategies.keras_in_scope import KerasRoom, load_keras_room_with
from strategies.loss_scaling import LossScale, LossScaling
from strategies.measure.input_benchmarks import dataset_benchmark, infeed_benchmark
from strategies.per_replica import PerReplica
from strategies.pipelines.marks import ipu_shard, pipeline_stage
from strategies.pipelines.pipelining import Pipelining
from strategies.strategy import Strategy, get_strategy
from strategies.table_rows import take_rows
from strategies.train_state import TrainState
from strategies.trainer import Trainer


def __getattr__(name: str) -> ModuleType:
    """Return `strategies.keras`; the first access imports it and Keras."""
    if name == "keras":
        import strategies.keras as room

        return room
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _keras_room() -> KerasRoom:
    """Import the part of `strategies.keras` that strategies call, and Keras."""
    from strategies.keras import hook

    return hook


load_keras_room_with(_keras_room)

__all__ = [
    "Best",
    "Cast",
    "CheckpointError",
    "Checkpoints",
    "Defaults",
    "DeviceError",
    "DisagreementError",
    "DistributedDataset",
    "DivergenceError",
    "EndOfDataError",
    "Evaluation",
    "FailedPreconditionError",
    "FeedError",
    "GradientAccumulationReductionMethod",
    "GradientCaptureContext",
    "GrainSource",
    "IPUHorovodStrategy",
    "IPUMultiWorkerStrategy",
    "IPUStrategy",
    "InfeedMode",
    "InfeedQueue",
    "InputContext",
    "LossScale",
    "LossScaling",
    "MapGradientOptimizer",
    "Masked",
    "Mean",
    "Metrics",
    "MirroredVariable",
    "NonFiniteGradientError",
    "Outcome",
    "OutfeedMode",
    "OutfeedQueue",
    "OwnLoop",
    "PerReplica",
    "Pipelining",
    "PopDistStrategy",
    "Position",
    "ReplicaContext",
    "StepOptions",
    "Strategy",
    "StrategyError",
    "SyncOnReadVariable",
    "TrainState",
    "Trainer",
    "capture_upstream_gradients",
    "casting",
    "clip_by_global_norm",
    "config",
    "cross_replica_ops",
    "dataset_benchmark",
    "fingerprint",
    "get_replica_context",
    "get_strategy",
    "infeed_benchmark",
    "ipu_shard",
    "load_variables",
    "loops",
    "metrics",
    "pipeline_stage",
    "pipelining_ops",
    "recomputation_checkpoint",
    "recomputing",
    "take_rows",
    "within_replica_ops",
]
