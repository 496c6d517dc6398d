"""The configuration of this process, which puts its `Defaults` in force.

The number of replicas of a device follows from its IPUs by arithmetic, as in the original: a replica takes a power of
two of IPUs, and a device has as many replicas as fit. No device is needed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from strategies.compat.config.attributes import ATTRIBUTES, DeviceConnectionType, StochasticRoundingBehaviour
from strategies.compat.config.category import Category
from strategies.defaults import Defaults, Selection, put_in_force

_BYTES = 4  # of an element of float32

logger = logging.getLogger("strategies.config")

_named: set[str] = set()
"""Attributes without an effect that a log line has already named."""

SYSTEM_IPUS = 16
"""The size of the system whose groups `select_ipus` names, as listed in the original's documentation."""


@final
class IPUConfig(Category):
    """The configuration of a system of IPUs. Semantics: the original's `IPUConfig`, attribute by attribute (config.md).

    An assignment checks the value: TypeError for another type, `UnknownAttributeError` for an unknown name. The latter
    is a ValueError and suggests a similar name. Assignments take effect only with `configure_ipu_system`.

    Example::

        config = strategies.config.IPUConfig()
        config.auto_select_ipus = 4
        config.configure_ipu_system()
    """

    def __init__(self) -> None:
        super().__init__(ATTRIBUTES)

    @property
    def _title(self) -> str:
        return type(self).__name__

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Put this configuration in force, as `strategies.config.configure_ipu_system` does."""
        configure_ipu_system(self, device)

    def check(self) -> Defaults:
        """Check that the attributes are consistent, and return the defaults that follow from them.

        Raises:
            TypeError: If a list or dictionary was changed in place and has a wrong type now.
            ValueError: If they are inconsistent; the message names them.
        """
        for metadata, value in self.attributes():
            metadata.check_type(value)
        for check in (_check_distribution, _check_tiles, _check_norms, _check_connection):
            check(self)
        behaviour, distribution = self.floating_point_behaviour, self.experimental.multi_replica_distribution
        return Defaults(
            selection=select(_listed(self.auto_select_ipus), _listed(self.select_ipus)),
            process_index=distribution.process_index,
            process_count=distribution.process_count,
            recomputes=self.allow_recompute,
            checks_numerics=behaviour.inv or behaviour.div0 or behaviour.oflo or behaviour.set_all,
            rounds_stochastically=behaviour.set_all or behaviour.esr not in (False, StochasticRoundingBehaviour.OFF),
            min_elements_for_sharding=max(1, -(-self.optimizations.minimum_remote_tensor_size // _BYTES)),
            prefetches=self.optimizations.prefetch_data_streams,
            executables=self.serialization_output_folder,
            attaches=self.device_connection.type is not DeviceConnectionType.NEVER,
        )


def _listed(devices: int | Sequence[int]) -> list[int]:
    return [devices] if isinstance(devices, int) else list(devices)


def _check_distribution(config: IPUConfig) -> None:
    own = config.experimental.multi_replica_distribution
    if own.process_count < 0 or (own.process_count and not 0 <= own.process_index < own.process_count):
        name = "experimental.multi_replica_distribution.process_"
        raise ValueError(
            f"{name}index must be in the range [0, {name}count), but is {own.process_index} of {own.process_count}; "
            "popdist.tensorflow.set_ipu_config sets both"
        )


def _check_tiles(config: IPUConfig) -> None:
    if config.io_tiles.place_ops_on_io_tiles and config.io_tiles.num_io_tiles == 0:
        raise ValueError("Cannot place ops on I/O tiles when io_tiles.num_io_tiles == 0; set num_io_tiles first")


def _check_norms(config: IPUConfig) -> None:
    name = "norms.experimental.distributed_batch_norm_replica_group_size"
    size = config.norms.experimental.distributed_batch_norm_replica_group_size
    if size < 1:
        raise ValueError(f"{name} must be at least 1, but is {size}")
    if size > 1 and config.io_tiles.num_io_tiles > 0:
        raise ValueError(
            f"{name} is {size}, and io_tiles.num_io_tiles is {config.io_tiles.num_io_tiles}: groups of replicas are "
            "not supported with I/O tiles. Leave one of them at its default"
        )


def _check_connection(config: IPUConfig) -> None:
    own = config.device_connection
    if own.type in (DeviceConnectionType.NEVER, DeviceConnectionType.PRE_COMPILE) and not own.version:
        raise ValueError(
            f"device_connection.version must be set when device_connection.type is {own.type}: 'ipu1' or 'ipu2'"
        )


@dataclass
class _Process:
    config: IPUConfig | None = None


_process = _Process()


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Put a configuration in force for strategies, trainers, pipelines and data sets that are made afterwards.

    Their own arguments take precedence, and so do the `Defaults` given to a strategy. Semantics: the original's
    function of that name.

    Args:
        config: Configuration; it is copied, so later changes to it have no effect.
        device: The original's name of the host; no effect.
        reset_configuration: Whether to replace a different configuration, with a warning.

    Raises:
        TypeError: If `config` is not an IPUConfig.
        ValueError: If its attributes are inconsistent.
        RuntimeError: If a different configuration is in force and `reset_configuration` is False.
    """
    if not isinstance(config, IPUConfig):
        raise TypeError(f"the configuration is {config!r}, a {type(config).__name__}; it must be an IPUConfig")
    defaults = config.check()
    if _process.config is not None and _process.config != config:
        if not reset_configuration:
            raise RuntimeError(
                "the IPU system is already configured differently; call reset_ipu_configuration() first, or leave "
                "reset_configuration at True"
            )
        logger.warning("Resetting existing IPU configuration before applying new configuration")
    _process.config = copy.deepcopy(config)
    put_in_force(defaults)
    _name_what_is_only_kept(config)


def get_ipu_config() -> IPUConfig:
    """Return a copy of the configuration in force.

    Raises:
        RuntimeError: If no configuration is in force.
    """
    if _process.config is None:
        raise RuntimeError("No IPU devices configured; call config.configure_ipu_system() first")
    return copy.deepcopy(_process.config)


def reset_ipu_configuration() -> None:
    """Remove the configuration of this process; objects that were made under it do not change."""
    _process.config = None
    put_in_force(Defaults())


def _name_what_is_only_kept(config: IPUConfig) -> None:
    every = config.attributes()
    kept = {metadata.name for metadata, value in every if not metadata.effect and value != metadata.default}
    if new := sorted(kept - _named):
        logger.debug("kept without effect: %s", ", ".join(new))
        _named.update(new)


def select(auto_select_ipus: Sequence[int], select_ipus: Sequence[int]) -> Selection | None:
    """Return the first device of a configuration, or None without a device.

    Args:
        auto_select_ipus: Number of IPUs of each device.
        select_ipus: Number of a group of IPUs for each device.

    Raises:
        ValueError: If both are given, a device has no IPU, or a group is named twice or does not exist.
    """
    if auto_select_ipus and select_ipus:
        raise ValueError(
            f"auto_select_ipus is {list(auto_select_ipus)}, and select_ipus is {list(select_ipus)}: Only one of "
            "`auto_select_ipus` and `select_ipus` can be set; leave the other one at []"
        )
    if few := [count for count in auto_select_ipus if count < 1]:
        raise ValueError(f"auto_select_ipus has a device with {few[0]} IPUs; a device needs at least 1")
    if len(set(select_ipus)) < len(select_ipus):
        raise ValueError(
            f"select_ipus is {list(select_ipus)}: All MultiIPU indices in `select_ipus` must be unique; name each once"
        )
    sizes = [ipus_of_group(number) for number in select_ipus]
    if auto_select_ipus:
        return Selection(auto_select_ipus[0], f"auto_select_ipus is {_shown(auto_select_ipus)}", is_counted=True)
    return Selection(sizes[0], f"select_ipus is {_shown(select_ipus)}", is_counted=False) if sizes else None


def ipus_of_group(number: int) -> int:
    """Return the size of a group of IPUs: 0 to 15 are single IPUs, then come pairs, fours, eights and all 16.

    Raises:
        ValueError: If the group does not exist.
    """
    sizes = [size for size in (1, 2, 4, 8, SYSTEM_IPUS) for _ in range(SYSTEM_IPUS // size)]
    if 0 <= number < len(sizes):
        return sizes[number]
    raise ValueError(
        f"select_ipus names group {number}, but a system of {SYSTEM_IPUS} IPUs has the groups 0 to {len(sizes) - 1}; "
        "name one of these, or set auto_select_ipus to the number of IPUs"
    )


def _shown(numbers: Sequence[int]) -> str:
    return str(numbers[0] if len(numbers) == 1 else list(numbers))
