"""The original's `popdist.tensorflow`, without TensorFlow: it fills in a configuration of `strategies.config`."""

from __future__ import annotations

from typing import Protocol, TypeVar

from popdist.context import instance
from popdist.queries import getDeviceId
from popdist.switches import require_switches


class _Distribution(Protocol):
    process_index: int
    process_count: int


class _Experimental(Protocol):
    multi_replica_distribution: _Distribution


class _Config(Protocol):
    """The part of an `IPUConfig` that this module uses."""

    select_ipus: int | list[int] | tuple[int, ...]
    experimental: _Experimental


Config = TypeVar("Config", bound=_Config)


def set_ipu_config(config: Config, ipus_per_replica: int = 0, configure_device: bool = True) -> Config:
    """Write this instance's device, index and number of instances into a configuration.

    The configuration takes effect with `config.configure_ipu_system()`. Semantics: the original's function of this
    name.

    Args:
        config: Configuration, which is changed and returned.
        ipus_per_replica: Number of devices that one replica needs; 0 stands for the launched number.
        configure_device: Whether to set `select_ipus`.

    Raises:
        TypeError: `configure_device` is not True or False.
        ValueError: The job was launched with another number of devices.
        EnvironmentMismatchError: The variable that names the device holds no number.
    """
    require_switches(configure_device=configure_device)
    if configure_device:
        config.select_ipus = [getDeviceId(ipus_per_replica)]
    own = instance()
    config.experimental.multi_replica_distribution.process_count = own.count
    config.experimental.multi_replica_distribution.process_index = own.index
    return config
