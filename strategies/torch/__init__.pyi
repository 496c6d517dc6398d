"""The public names of the package, and the modules that have them; `strategies/torch/__init__.py` reads this list."""

from strategies.torch.data import CollatedBatch as CollatedBatch
from strategies.torch.data import DistributedSampler as DistributedSampler
from strategies.torch.data import distribute_dataset as distribute_dataset
from strategies.torch.distributed_model.model import DistributedModel as DistributedModel
from strategies.torch.options import TorchOptions as TorchOptions
from strategies.torch.options import loss_weight as loss_weight
from strategies.torch.replicas.generators import seed_of as seed_of
from strategies.torch.replicas.gradient_map import ReplicaGroups as ReplicaGroups
from strategies.torch.replicas.gradient_map import group_replicas as group_replicas
from strategies.torch.trainer import StateDicts as StateDicts
from strategies.torch.trainer import Trainer as Trainer
from strategies.torch.trainer import load_state_dicts as load_state_dicts
