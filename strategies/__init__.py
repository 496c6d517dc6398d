"""What distribution means to a training program: replicas, steps, data and reductions."""

from strategies.datasets import DistributedDataset, Masked, Position
from strategies.errors import DeviceError, NonFiniteGradientError, StrategyError
from strategies.fingerprints import fingerprint
from strategies.input_context import InputContext
from strategies.ipu import IPUStrategy
from strategies.multi_worker import IPUMultiWorkerStrategy
from strategies.per_replica import PerReplica
from strategies.popdist_strategy import PopDistStrategy
from strategies.replica_context import ReplicaContext, get_replica_context
from strategies.strategy import Strategy, get_strategy
from strategies.trainer import Metrics, Trainer, TrainState
from strategies.variables import MirroredVariable, SyncOnReadVariable

__all__ = [
    "DeviceError",
    "DistributedDataset",
    "IPUMultiWorkerStrategy",
    "IPUStrategy",
    "InputContext",
    "Masked",
    "Metrics",
    "MirroredVariable",
    "NonFiniteGradientError",
    "PerReplica",
    "PopDistStrategy",
    "Position",
    "ReplicaContext",
    "Strategy",
    "StrategyError",
    "SyncOnReadVariable",
    "TrainState",
    "Trainer",
    "fingerprint",
    "get_replica_context",
    "get_strategy",
]
