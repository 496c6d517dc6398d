"""The original's `IPUConfig`, with which a program configures its devices, and its effects in this project.

    config = strategies.config.IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    strategy = strategies.LocalStrategy()  # four replicas

This module does not need JAX.
"""

from strategies.compat.config_tree import AttributeMetadata, UnknownAttributeError
from strategies.compat.ipu_config import (
    DeviceConnectionType,
    IPUConfig,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
    configure_ipu_system,
    get_ipu_config,
    reset_ipu_configuration,
)

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
