"""The choice of the path that gradients of PyTorch take between the instances."""

from __future__ import annotations

from strategies.exchange.on_device import DevicePath
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.on_device.arithmetic import TorchArithmetic
from strategies.torch.on_device.local import LocalPath
from strategies.torch.options import TorchOptions
from strategies.torch.replica_memory import ReplicaMemory


def path_for(replicas: Replicas, memory: ReplicaMemory, options: TorchOptions) -> DevicePath | None:
    """Return the path of gradients that stay on the replicas' device; None where they are exchanged on the host.

    Args:
        replicas: of all instances.
        memory: of this instance's replicas.
        options: of the training.
    """
    if not memory.is_shared or options.transfer.is_quantised:
        return None
    if replicas.num_instances == 1:
        return LocalPath(replicas.num_replicas_in_sync, TorchArithmetic())
    return None
