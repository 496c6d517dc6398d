"""The configuration of this process, which puts its `Defaults` in force.

How many replicas the IPUs of a device are enough for is arithmetic, without any device, and as in the original: a
replica takes a power of two of IPUs, and a device has as many replicas as fit.
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
"""Attributes without an effect that a line of logging has named already."""

SYSTEM_IPUS = 16
"""Of the system whose groups of IPUs `select_ipus` names: those of the listing in the original's documentation."""


@final
class IPUConfig(Category):
    """All that can be configured. Semantics: the original's `IPUConfig`, attribute by attribute; see config.md.

    A value is checked when it is set: TypeError for another type, `UnknownAttributeError` for another name, which is a
    ValueError and says what may be meant. Nothing else happens before `configure_ipu_system`.
    """

    def __init__(self) -> None:
        super().__init__(ATTRIBUTES)

    @property
    def _title(self) -> str:
        return type(self).__name__

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Put this configuration in force; see `strategies.config.configure_ipu_system`."""
        configure_ipu_system(self, device)

    def check(self) -> Defaults:
        """Check whether the attributes go together, and return the defaults that follow from them.

        Raises:
            TypeError: if a list or dictionary was changed to one of a wrong type.
            ValueError: if they do not; the message names them.
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
            f"{name}index must be in the range [0, {name}count), and is {own.process_index} of {own.process_count}; "
            "popdist.tensorflow.set_ipu_config sets both"
        )


def _check_tiles(config: IPUConfig) -> None:
    if config.io_tiles.place_ops_on_io_tiles and config.io_tiles.num_io_tiles == 0:
        raise ValueError("Cannot place ops on I/O tiles when io_tiles.num_io_tiles == 0; set that first")


def _check_norms(config: IPUConfig) -> None:
    name = "norms.experimental.distributed_batch_norm_replica_group_size"
    size = config.norms.experimental.distributed_batch_norm_replica_group_size
    if size < 1:
        raise ValueError(f"{name} must be at least 1, and is {size}")
    if size > 1 and config.io_tiles.num_io_tiles > 0:
        raise ValueError(
            f"{name} is {size}, and io_tiles.num_io_tiles {config.io_tiles.num_io_tiles}: groups of replicas are "
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

    Arguments of these come first, and so do the `Defaults` that a strategy is given. Semantics: the original's function
    of that name.

    Args:
        config: a copy of it is kept, so it may change.
        device: the original's name of the host; nothing depends on it.
        reset_configuration: whether it may take the place of a different configuration, with a warning.

    Raises:
        TypeError: if it is no IPUConfig.
        ValueError: if its attributes do not go together.
        RuntimeError: if there is a different configuration, and it may not take its place.
    """
    if not isinstance(config, IPUConfig):
        raise TypeError(f"the configuration is {config!r}, a {type(config).__name__}; it must be an IPUConfig")
    defaults = config.check()
    if _process.config is not None and _process.config != config:
        if not reset_configuration:
            raise RuntimeError(
                "the IPU system is configured already, in another way; call reset_ipu_configuration() first, or leave "
                "reset_configuration at True"
            )
        logger.warning("Resetting existing IPU configuration before applying new configuration")
    _process.config = copy.deepcopy(config)
    put_in_force(defaults)
    _name_what_is_only_kept(config)


def get_ipu_config() -> IPUConfig:
    """Return a copy of the configuration that is in force.

    Raises:
        RuntimeError: if there is none.
    """
    if _process.config is None:
        raise RuntimeError("No IPU devices configured; call config.configure_ipu_system() first")
    return copy.deepcopy(_process.config)


def reset_ipu_configuration() -> None:
    """Forget the configuration of this process; what was made under it stays as it is."""
    _process.config = None
    put_in_force(Defaults())


def _name_what_is_only_kept(config: IPUConfig) -> None:
    every = config.attributes()
    kept = {metadata.name for metadata, value in every if not metadata.effect and value != metadata.default}
    if new := sorted(kept - _named):
        logger.debug("kept, and without an effect here: %s", ", ".join(new))
        _named.update(new)


def select(auto_select_ipus: Sequence[int], select_ipus: Sequence[int]) -> Selection | None:
    """Return the first device of a configuration; None if it describes none.

    Args:
        auto_select_ipus: how many IPUs each device has.
        select_ipus: the number of a group of IPUs for each device.

    Raises:
        ValueError: if both are given, a device has no IPU, or a group is named twice or does not exist.
    """
    if auto_select_ipus and select_ipus:
        raise ValueError(
            f"auto_select_ipus is {list(auto_select_ipus)}, and select_ipus {list(select_ipus)}: Only one of "
            "`auto_select_ipus` and `select_ipus` can be set; leave the other one at []"
        )
    if few := [count for count in auto_select_ipus if count < 1]:
        raise ValueError(f"auto_select_ipus has a device with {few[0]} IPUs; it must have at least 1")
    if len(set(select_ipus)) < len(select_ipus):
        raise ValueError(
            f"select_ipus is {list(select_ipus)}: All MultiIPU indices in `select_ipus` must be unique; name each once"
        )
    sizes = [ipus_of_group(number) for number in select_ipus]
    if auto_select_ipus:
        return Selection(auto_select_ipus[0], f"auto_select_ipus is {_shown(auto_select_ipus)}", is_counted=True)
    return Selection(sizes[0], f"select_ipus is {_shown(select_ipus)}", is_counted=False) if sizes else None


def ipus_of_group(number: int) -> int:
    """Return the size of a group of IPUs: 0 to 15 are single ones, then come pairs, fours, eights and all 16.

    Raises:
        ValueError: if there is no such group.
    """
    sizes = [size for size in (1, 2, 4, 8, SYSTEM_IPUS) for _ in range(SYSTEM_IPUS // size)]
    if 0 <= number < len(sizes):
        return sizes[number]
    raise ValueError(
        f"select_ipus names {number}, and a system of {SYSTEM_IPUS} IPUs has the groups 0 to {len(sizes) - 1}; name "
        "one of these, or say with auto_select_ipus how many IPUs there are"
    )


def _shown(numbers: Sequence[int]) -> str:
    return str(numbers[0] if len(numbers) == 1 else list(numbers))
