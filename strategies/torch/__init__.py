"""PyTorch under the strategies: modules are trained as they are, with the same bits for every number of instances."""

import strategies.torch.installed  # noqa: F401  before what imports torch
from strategies.torch.distributed_data import distribute_dataset
from strategies.torch.distributed_model import DistributedModel
from strategies.torch.distributed_sampler import DistributedSampler
from strategies.torch.options import TorchOptions
from strategies.torch.randomness import seed_of
from strategies.torch.replica_groups import ReplicaGroups, group_replicas
from strategies.torch.state_dicts import StateDicts, load_state_dicts
from strategies.torch.trainer import Trainer

__all__ = [
    "DistributedModel",
    "DistributedSampler",
    "ReplicaGroups",
    "StateDicts",
    "TorchOptions",
    "Trainer",
    "distribute_dataset",
    "group_replicas",
    "load_state_dicts",
    "seed_of",
]
