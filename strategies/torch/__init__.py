"""Training of PyTorch modules under the strategies, with the same bits for every number of instances."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "strategies.torch needs PyTorch, which is not installed; run pip install '.[torch]' in the project's folder "
        "(PyTorch without CUDA: see torch.md)",
        name="torch",
    ) from None

from strategies.torch.distributed_data import DistributedSampler, distribute_dataset
from strategies.torch.distributed_model import DistributedModel
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
