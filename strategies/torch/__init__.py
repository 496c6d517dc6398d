"""Training of PyTorch modules under the strategies, with the same bits for every number of instances."""

from typing import TYPE_CHECKING

from popdist.extras import describe_missing
from strategies.late_names import late_names
from strategies.quick_imports import without_collections

try:
    with without_collections():
        import torch  # noqa: F401
except ModuleNotFoundError as error:
    if text := describe_missing(error, __name__):
        raise ModuleNotFoundError(text, name=error.name) from None
    raise

from strategies.torch.process_group.registration import register

if TYPE_CHECKING:
    from strategies.torch.collated import CollatedBatch as CollatedBatch
    from strategies.torch.distributed_data import (
        DistributedSampler as DistributedSampler,
    )
    from strategies.torch.distributed_data import (
        distribute_dataset as distribute_dataset,
    )
    from strategies.torch.distributed_model.model import DistributedModel as DistributedModel
    from strategies.torch.options import TorchOptions as TorchOptions
    from strategies.torch.outcomes import loss_weight as loss_weight
    from strategies.torch.replicas.generators import seed_of as seed_of
    from strategies.torch.replicas.groups import ReplicaGroups as ReplicaGroups
    from strategies.torch.replicas.groups import group_replicas as group_replicas
    from strategies.torch.state_dicts import StateDicts as StateDicts
    from strategies.torch.state_dicts import load_state_dicts as load_state_dicts
    from strategies.torch.trainer import Trainer as Trainer

register()

_PLACES = {
    "CollatedBatch": "strategies.torch.collated",
    "DistributedModel": "strategies.torch.distributed_model.model",
    "DistributedSampler": "strategies.torch.distributed_data",
    "ReplicaGroups": "strategies.torch.replicas.groups",
    "StateDicts": "strategies.torch.state_dicts",
    "TorchOptions": "strategies.torch.options",
    "Trainer": "strategies.torch.trainer",
    "distribute_dataset": "strategies.torch.distributed_data",
    "group_replicas": "strategies.torch.replicas.groups",
    "load_state_dicts": "strategies.torch.state_dicts",
    "loss_weight": "strategies.torch.outcomes",
    "seed_of": "strategies.torch.replicas.generators",
}
"""The public names, and the modules that have them; a name is imported at its first use."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:
    __getattr__, __dir__ = late_names(__name__, _PLACES)
