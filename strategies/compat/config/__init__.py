"""How a program configures its system of devices: the original's `IPUConfig`, and what follows from it here.

    config = strategies.config.IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    strategy = strategies.IPUStrategy()  # four replicas

Nothing here needs JAX.
"""

from strategies.compat.config.attributes import (
    DeviceConnectionType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)
from strategies.compat.config.category import AttributeMetadata, UnknownAttributeError
from strategies.compat.config.configured import IPUConfig, configure_ipu_system, get_ipu_config, reset_ipu_configuration

__all__ = [
    "AttributeMetadata",
    "DeviceConnectionType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "StochasticRoundingBehaviour",
    "UnknownAttributeError",
    "configure_ipu_system",
    "get_ipu_config",
    "reset_ipu_configuration",
]
