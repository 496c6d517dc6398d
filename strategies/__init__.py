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

import os
from typing import TYPE_CHECKING

from popdist.records.recording import FOLDER_VARIABLE
from strategies.late_names import late_names

if TYPE_CHECKING:
    from strategies import (
        config as config,
    )
    from strategies import (
        cross_replica_ops as cross_replica_ops,
    )
    from strategies import (
        loops as loops,
    )
    from strategies import (
        metrics as metrics,
    )
    from strategies import (
        within_replica_ops as within_replica_ops,
    )
    from strategies.checkpoints.checkpoint_folder import Best as Best
    from strategies.checkpoints.checkpoints import Checkpoints as Checkpoints
    from strategies.checkpoints.loading import load_variables as load_variables
    from strategies.checkpoints.own_loop import OwnLoop as OwnLoop
    from strategies.compat import estimator as estimator
    from strategies.compat import pipelining_ops as pipelining_ops
    from strategies.core.evaluation import Evaluation as Evaluation
    from strategies.core.metrics import Metrics as Metrics
    from strategies.core.options import GradientAccumulationReductionMethod as GradientAccumulationReductionMethod
    from strategies.data.casts import Cast as Cast
    from strategies.data.casts import casting as casting
    from strategies.data.datasets import DistributedDataset as DistributedDataset
    from strategies.data.grain_source import GrainSource as GrainSource
    from strategies.data.layout import Position as Position
    from strategies.data.sources import InputContext as InputContext
    from strategies.data.sources import Masked as Masked
    from strategies.defaults import Defaults as Defaults
    from strategies.errors import (
        CheckpointError as CheckpointError,
    )
    from strategies.errors import (
        DeviceError as DeviceError,
    )
    from strategies.errors import (
        DisagreementError as DisagreementError,
    )
    from strategies.errors import (
        DivergenceError as DivergenceError,
    )
    from strategies.errors import (
        EndOfDataError as EndOfDataError,
    )
    from strategies.errors import (
        FailedPreconditionError as FailedPreconditionError,
    )
    from strategies.errors import (
        FeedError as FeedError,
    )
    from strategies.errors import (
        LostPartError as LostPartError,
    )
    from strategies.errors import (
        NonFiniteGradientError as NonFiniteGradientError,
    )
    from strategies.errors import (
        SpareError as SpareError,
    )
    from strategies.errors import (
        StrategyError as StrategyError,
    )
    from strategies.errors import (
        UnappliedStepError as UnappliedStepError,
    )
    from strategies.errors import (
        WeightError as WeightError,
    )
    from strategies.errors import (
        ZeroWeightError as ZeroWeightError,
    )
    from strategies.jax.comparing.digest import fingerprint as fingerprint
    from strategies.jax.evaluation.mean import Mean as Mean
    from strategies.jax.feeds.feed_streams import InfeedMode as InfeedMode
    from strategies.jax.feeds.infeed import InfeedQueue as InfeedQueue
    from strategies.jax.feeds.outfeed import OutfeedMode as OutfeedMode
    from strategies.jax.feeds.outfeed import OutfeedQueue as OutfeedQueue
    from strategies.jax.options import StepOptions as StepOptions
    from strategies.jax.programs.gradient_capture import (
        GradientCaptureContext as GradientCaptureContext,
    )
    from strategies.jax.programs.gradient_capture import (
        capture_upstream_gradients as capture_upstream_gradients,
    )
    from strategies.jax.programs.recomputation import (
        recomputation_checkpoint as recomputation_checkpoint,
    )
    from strategies.jax.programs.recomputation import (
        recomputing as recomputing,
    )
    from strategies.jax.replicas.replica_context import (
        ReplicaContext as ReplicaContext,
    )
    from strategies.jax.replicas.replica_context import (
        get_replica_context as get_replica_context,
    )
    from strategies.jax.replicas.variables import (
        MirroredVariable as MirroredVariable,
    )
    from strategies.jax.replicas.variables import (
        SyncOnReadVariable as SyncOnReadVariable,
    )
    from strategies.jax.updates.arithmetic import clip_by_global_norm as clip_by_global_norm
    from strategies.jax.updates.optimizers import MapGradientOptimizer as MapGradientOptimizer
    from strategies.job_strategies import (
        IPUHorovodStrategy as IPUHorovodStrategy,
    )
    from strategies.job_strategies import (
        IPUMultiWorkerStrategy as IPUMultiWorkerStrategy,
    )
    from strategies.job_strategies import (
        PopDistStrategy as PopDistStrategy,
    )
    from strategies.local_strategy import IPUStrategy as IPUStrategy
    from strategies.local_strategy import LocalStrategy as LocalStrategy
    from strategies.loss_scaling import LossScale as LossScale
    from strategies.loss_scaling import LossScaling as LossScaling
    from strategies.measure.input_benchmarks import (
        dataset_benchmark as dataset_benchmark,
    )
    from strategies.measure.input_benchmarks import (
        infeed_benchmark as infeed_benchmark,
    )
    from strategies.outcome import Outcome as Outcome
    from strategies.per_replica import PerReplica as PerReplica
    from strategies.pipelines.marks import ipu_shard as ipu_shard
    from strategies.pipelines.marks import pipeline_stage as pipeline_stage
    from strategies.pipelines.pipelining import Pipelining as Pipelining
    from strategies.strategy import Strategy as Strategy
    from strategies.strategy import get_strategy as get_strategy
    from strategies.table_rows import take_rows as take_rows
    from strategies.train_state import TrainState as TrainState
    from strategies.trainer import Trainer as Trainer

_PLACES = {
    "Best": "strategies.checkpoints.checkpoint_folder",
    "Cast": "strategies.data.casts",
    "CheckpointError": "strategies.errors",
    "Checkpoints": "strategies.checkpoints.checkpoints",
    "Defaults": "strategies.defaults",
    "DeviceError": "strategies.errors",
    "DisagreementError": "strategies.errors",
    "DistributedDataset": "strategies.data.datasets",
    "DivergenceError": "strategies.errors",
    "EndOfDataError": "strategies.errors",
    "Evaluation": "strategies.core.evaluation",
    "FailedPreconditionError": "strategies.errors",
    "FeedError": "strategies.errors",
    "GradientAccumulationReductionMethod": "strategies.core.options",
    "GradientCaptureContext": "strategies.jax.programs.gradient_capture",
    "GrainSource": "strategies.data.grain_source",
    "IPUHorovodStrategy": "strategies.job_strategies",
    "IPUMultiWorkerStrategy": "strategies.job_strategies",
    "IPUStrategy": "strategies.local_strategy",
    "InfeedMode": "strategies.jax.feeds.feed_streams",
    "InfeedQueue": "strategies.jax.feeds.infeed",
    "InputContext": "strategies.data.sources",
    "LocalStrategy": "strategies.local_strategy",
    "LossScale": "strategies.loss_scaling",
    "LossScaling": "strategies.loss_scaling",
    "LostPartError": "strategies.errors",
    "MapGradientOptimizer": "strategies.jax.updates.optimizers",
    "Masked": "strategies.data.sources",
    "Mean": "strategies.jax.evaluation.mean",
    "Metrics": "strategies.core.metrics",
    "MirroredVariable": "strategies.jax.replicas.variables",
    "NonFiniteGradientError": "strategies.errors",
    "Outcome": "strategies.outcome",
    "OutfeedMode": "strategies.jax.feeds.outfeed",
    "OutfeedQueue": "strategies.jax.feeds.outfeed",
    "OwnLoop": "strategies.checkpoints.own_loop",
    "PerReplica": "strategies.per_replica",
    "Pipelining": "strategies.pipelines.pipelining",
    "PopDistStrategy": "strategies.job_strategies",
    "Position": "strategies.data.layout",
    "ReplicaContext": "strategies.jax.replicas.replica_context",
    "SpareError": "strategies.errors",
    "StepOptions": "strategies.jax.options",
    "Strategy": "strategies.strategy",
    "StrategyError": "strategies.errors",
    "SyncOnReadVariable": "strategies.jax.replicas.variables",
    "TrainState": "strategies.train_state",
    "Trainer": "strategies.trainer",
    "UnappliedStepError": "strategies.errors",
    "WeightError": "strategies.errors",
    "ZeroWeightError": "strategies.errors",
    "capture_upstream_gradients": "strategies.jax.programs.gradient_capture",
    "casting": "strategies.data.casts",
    "clip_by_global_norm": "strategies.jax.updates.arithmetic",
    "config": "strategies.config",
    "cross_replica_ops": "strategies.cross_replica_ops",
    "dataset_benchmark": "strategies.measure.input_benchmarks",
    "estimator": "strategies.compat.estimator",
    "fingerprint": "strategies.jax.comparing.digest",
    "get_replica_context": "strategies.jax.replicas.replica_context",
    "get_strategy": "strategies.strategy",
    "infeed_benchmark": "strategies.measure.input_benchmarks",
    "ipu_shard": "strategies.pipelines.marks",
    "load_variables": "strategies.checkpoints.loading",
    "loops": "strategies.loops",
    "metrics": "strategies.metrics",
    "pipeline_stage": "strategies.pipelines.marks",
    "pipelining_ops": "strategies.compat.pipelining_ops",
    "recomputation_checkpoint": "strategies.jax.programs.recomputation",
    "recomputing": "strategies.jax.programs.recomputation",
    "take_rows": "strategies.table_rows",
    "within_replica_ops": "strategies.within_replica_ops",
}
"""The public names, and the modules that have them; a name is imported at its first use."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:
    __getattr__, __dir__ = late_names(__name__, {**_PLACES, "keras": "strategies.keras"})

if FOLDER_VARIABLE in os.environ:  # a record begins with the random state that this import finds
    import strategies.jax.step_record  # noqa: F401
