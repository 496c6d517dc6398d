"""What distribution means to a training program: replicas, steps, data and reductions."""

from strategies import cross_replica_ops, loops, within_replica_ops
from strategies.accumulation import GradientAccumulationReductionMethod
from strategies.best import Best
from strategies.casts import Cast, casting
from strategies.checkpoints import Checkpoints
from strategies.clipping import clip_by_global_norm
from strategies.datasets import DistributedDataset, Masked, Position
from strategies.errors import (
    CheckpointError,
    DeviceError,
    DisagreementError,
    DivergenceError,
    EndOfDataError,
    FeedError,
    NonFiniteGradientError,
    StrategyError,
)
from strategies.feed_streams import InfeedMode
from strategies.fingerprints import fingerprint
from strategies.grain_source import GrainSource
from strategies.horovod_strategy import IPUHorovodStrategy
from strategies.infeed import InfeedQueue
from strategies.input_benchmarks import dataset_benchmark, infeed_benchmark
from strategies.input_context import InputContext
from strategies.ipu import IPUStrategy
from strategies.loading import load_variables
from strategies.loss_scaling import LossScale, LossScaling
from strategies.metrics import Metrics
from strategies.multi_worker import IPUMultiWorkerStrategy
from strategies.outfeed import OutfeedMode, OutfeedQueue
from strategies.own_loop import OwnLoop
from strategies.per_replica import PerReplica
from strategies.popdist_strategy import PopDistStrategy
from strategies.recomputation import recomputation_checkpoint
from strategies.replica_context import ReplicaContext, get_replica_context
from strategies.strategy import Strategy, get_strategy
from strategies.trainer import Trainer, TrainState
from strategies.variables import MirroredVariable, SyncOnReadVariable

__all__ = [
    "Best",
    "Cast",
    "CheckpointError",
    "Checkpoints",
    "DeviceError",
    "DisagreementError",
    "DistributedDataset",
    "DivergenceError",
    "EndOfDataError",
    "FeedError",
    "GradientAccumulationReductionMethod",
    "GrainSource",
    "IPUHorovodStrategy",
    "IPUMultiWorkerStrategy",
    "IPUStrategy",
    "InfeedMode",
    "InfeedQueue",
    "InputContext",
    "LossScale",
    "LossScaling",
    "Masked",
    "Metrics",
    "MirroredVariable",
    "NonFiniteGradientError",
    "OutfeedMode",
    "OutfeedQueue",
    "OwnLoop",
    "PerReplica",
    "PopDistStrategy",
    "Position",
    "ReplicaContext",
    "Strategy",
    "StrategyError",
    "SyncOnReadVariable",
    "TrainState",
    "Trainer",
    "casting",
    "clip_by_global_norm",
    "cross_replica_ops",
    "dataset_benchmark",
    "fingerprint",
    "get_replica_context",
    "get_strategy",
    "infeed_benchmark",
    "load_variables",
    "loops",
    "recomputation_checkpoint",
    "within_replica_ops",
]
