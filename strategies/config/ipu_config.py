"""The configuration itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from strategies.config.categories import (
    Convolutions,
    DeviceConnection,
    Experimental,
    FloatingPointBehaviour,
    IOTiles,
    IPUModel,
    Matmuls,
    Norms,
    Optimizations,
    Pooling,
    Scheduling,
    Slices,
)
from strategies.config.category import Category, attribute, category
from strategies.config.choices import DeviceConnectionType, SelectionOrder, StochasticRoundingBehaviour
from strategies.config.configured import Effects, configuration, put_in_force
from strategies.config.selection import select

_BYTES = 4  # of an element of float32


class IPUConfig(Category):
    """All that can be configured. Semantics: the original's `IPUConfig`, attribute by attribute; see docs/config.md.

    A value is checked when it is set: TypeError for another type, `UnknownAttributeError` for another name, which is a
    ValueError and says what may be meant. Nothing else happens before `configure_ipu_system`.
    """

    allow_recompute: bool = attribute(
        False,
        "Whether what backward passes need may be computed again.",
        effect="pipelines recompute; False: they do not, whatever `recomputation_mode` says",
    )
    selection_order: SelectionOrder = attribute(SelectionOrder.AUTO, "In which order IPUs are given to shards.")
    serialization_output_folder: str = attribute(
        "",
        "Where compiled programs are kept.",
        effect="strategies keep executables there, and load them, unless poprun --executable-cache-path names a folder",
    )
    compilation_poplar_options: dict[str, str] = attribute({}, "Options of Poplar's compiler.")
    gcl_poplar_options: dict[str, str] = attribute({}, "Options of Graphcore's library of collectives.")
    auto_select_ipus: int | list[int] | tuple[int, ...] = attribute(
        [],
        "How many IPUs each device of the system has.",
        effect="those of the first device, divided by what a replica spans, are the replicas of an instance",
    )
    select_ipus: int | list[int] | tuple[int, ...] = attribute(
        [],
        "Which IPUs, or groups of them, are the devices of the system.",
        effect="the same, with as many IPUs as the first group has in a system of 16",
    )
    convolutions: Convolutions = category(Convolutions, "Convolutions.")
    device_connection: DeviceConnection = category(DeviceConnection, "When a process attaches to devices.")
    slices: Slices = category(Slices, "Slices and embeddings.")
    experimental: Experimental = category(Experimental, "What may still change.")
    floating_point_behaviour: FloatingPointBehaviour = category(
        FloatingPointBehaviour, "Numbers that are none, and rounding."
    )
    io_tiles: IOTiles = category(IOTiles, "Tiles for input and output.")
    ipu_model: IPUModel = category(IPUModel, "The original's simulation of an IPU.")
    matmuls: Matmuls = category(Matmuls, "Matrix products.")
    norms: Norms = category(Norms, "Normalisation.")
    optimizations: Optimizations = category(Optimizations, "What a compiler may do, and memory.")
    pooling: Pooling = category(Pooling, "Pooling.")
    scheduling: Scheduling = category(Scheduling, "The order of instructions.")

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Put this configuration in force; see `strategies.config.configure_ipu_system`."""
        configure_ipu_system(self, device)

    def check(self) -> Effects:
        """Look at whether the attributes go together; returns what follows from them.

        Raises:
            TypeError: if a list or dictionary was changed to one of a wrong type.
            ValueError: if they do not; the message names them.
        """
        for metadata, value in self.attributes():
            metadata.check_type(value)
        for check in (_check_distribution, _check_tiles, _check_norms, _check_connection):
            check(self)
        behaviour = self.floating_point_behaviour
        connection, distribution = self.device_connection.type, self.experimental.multi_replica_distribution
        rounding = StochasticRoundingBehaviour.parse(behaviour.esr)
        return Effects(
            selection=select(_listed(self.auto_select_ipus), _listed(self.select_ipus)),
            process_index=distribution.process_index,
            process_count=distribution.process_count,
            recomputes=self.allow_recompute,
            checks_numerics=behaviour.inv or behaviour.div0 or behaviour.oflo or behaviour.set_all,
            rounds_stochastically=behaviour.set_all or rounding is not StochasticRoundingBehaviour.OFF,
            min_elements_for_sharding=max(1, -(-self.optimizations.minimum_remote_tensor_size // _BYTES)),
            prefetches=self.optimizations.prefetch_data_streams,
            executables=self.serialization_output_folder,
            attaches=connection is not DeviceConnectionType.NEVER,
        )


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Put a configuration in force for strategies, trainers, pipelines and data sets that are made afterwards.

    What these say themselves stays as they say it. Semantics: the original's function of that name.

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
    put_in_force(config, config.check(), reset_configuration)


def get_ipu_config() -> IPUConfig:
    """A copy of the configuration that is in force.

    Raises:
        RuntimeError: if there is none.
    """
    return cast(IPUConfig, configuration())


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
