"""The original's `IPUConfig`, with which a program configures its devices, and its effects in this project.

Attributes have the original's names, types and defaults. One without an effect concerns tiles, memory or instructions
of an IPU; programs of the original may set it. The number of replicas of a device follows from its IPUs by arithmetic,
as in the original: a replica takes a power of two of IPUs, and a device has as many replicas as fit.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, final

from strategies.compat.config_tree import Category
from strategies.defaults import Defaults, Selection, put_in_force

logger = logging.getLogger("strategies.config")

if TYPE_CHECKING:
    _Declared = Category  # programs find the attributes of a declaration in a category
else:
    _Declared = object

SYSTEM_IPUS = 16
"""The size of the system whose groups `select_ipus` names, as listed in the original's documentation."""

_BYTES = 4  # of an element of float32

_in_force: IPUConfig | None = None

_named: set[str] = set()
"""Attributes without an effect that a log line has already named."""

SelectionOrder = Enum("SelectionOrder", ["AUTO", "ZIGZAG", "SNAKE", "HOOF"], start=0)
SelectionOrder.__doc__ = "The order in which the original assigns IPUs to shards. Simulated devices have no order."

DeviceConnectionType = Enum("DeviceConnectionType", ["ALWAYS", "ON_DEMAND", "NEVER", "PRE_COMPILE"], start=0)
DeviceConnectionType.__doc__ = (
    "The time when the original attaches to devices: at configuration, when a program needs them, or never."
)

MergeRemoteBuffersBehaviour = Enum("MergeRemoteBuffersBehaviour", ["NO_MERGING", "MERGE", "IF_BENEFICIAL"], start=0)
MergeRemoteBuffersBehaviour.__doc__ = "The original's rule for merging several remote buffers into one."

SchedulingAlgorithm = Enum(
    "SchedulingAlgorithm", ["CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"], start=0
)
SchedulingAlgorithm.__doc__ = "The original's algorithm for ordering the instructions of a program."

StochasticRoundingBehaviour = Enum("StochasticRoundingBehaviour", ["OFF", "ON", "REPLICA_IDENTICAL_ONLY"], start=0)
StochasticRoundingBehaviour.__doc__ = (
    "The rounding of updates to 16-bit variables: to nearest or stochastic. Replicas draw the same numbers here, so "
    "ON and REPLICA_IDENTICAL_ONLY are the same."
)

_Devices: TypeAlias = int | list[int] | tuple[int, ...]
_Options: TypeAlias = dict[str, str]


class _Convolutions(_Declared):
    """Convolutions.

    Attributes:
        poplar_options: Options of PopLibs for convolutions.
    """

    poplar_options: _Options = {}


class _DeviceConnection(_Declared):
    """The time when a process attaches to devices.

    Attributes:
        type: The time to attach to devices. Effect: NEVER: strategies are refused, because they would run programs; the
            other values do not differ, and programs also run under PRE_COMPILE.
        version: The kind of IPU to compile for if none is attached.
        enable_remote_buffers: Whether devices that are attached later have remote buffers.
    """

    type: DeviceConnectionType = DeviceConnectionType.ALWAYS
    version: str = ""
    enable_remote_buffers: bool = False


class _Slices(_Declared):
    """Slices and embeddings.

    Attributes:
        poplar_options: Options of PopLibs for slices.
    """

    poplar_options: _Options = {}


class _ExperimentalAttributes(_Declared):
    """Experimental attributes.

    Attributes:
        always_rearrange_copies_on_the_host: Whether the host changes layouts of streamed data.
        enable_remote_buffer_embedding: Whether embeddings of the host use remote buffers.
        enable_prng_stability: Whether replicas that round stochastically draw the same numbers. Effect: none: replicas
            always draw the same numbers.
    """

    always_rearrange_copies_on_the_host: bool = False
    enable_remote_buffer_embedding: bool = False
    enable_prng_stability: bool = False
    multi_replica_distribution: _MultiReplicaDistribution


class _MultiReplicaDistribution(_Declared):
    """The processes that share the replicas; `set_ipu_config` sets its attributes.

    Attributes:
        process_index: The index of this process. Effect: must be the index of the instance that a launcher has started.
        process_count: The number of processes that share the replicas; 0 for a single process. Effect: must be the
            number of instances that a launcher has started.
    """

    process_index: int = 0
    process_count: int = 0


class _FloatingPointBehaviour(_Declared):
    """Exceptions of floating-point arithmetic, and rounding.

    Attributes:
        inv: Whether an invalid operation is an error. Effect: a Trainer without loss scaling raises
            NonFiniteGradientError for gradients that are NaN or infinite.
        div0: Whether a division by zero is an error. Effect: a Trainer without loss scaling raises
            NonFiniteGradientError for gradients that are NaN or infinite.
        oflo: Whether an overflow is an error. Effect: a Trainer without loss scaling raises NonFiniteGradientError for
            gradients that are NaN or infinite.
        nanoo: Whether an overflow of float16 gives NaN instead of the largest number. Effect: none: an overflow always
            gives infinity.
        esr: Whether 16-bit numbers are rounded stochastically; True and False are deprecated. Effect: ON and
            REPLICA_IDENTICAL_ONLY: a Trainer of JAX has `stochastic_rounding` by default.
        set_all: Whether all other attributes of this category count as switched on. Effect: True: the effects of inv,
            div0, oflo, nanoo and esr.
    """

    inv: bool = False
    div0: bool = False
    oflo: bool = False
    nanoo: bool = False
    esr: StochasticRoundingBehaviour | bool = StochasticRoundingBehaviour.OFF
    set_all: bool = False


class _IOTiles(_Declared):
    """Tiles for input and output.

    Attributes:
        num_io_tiles: Tiles that are reserved for input and output.
        place_ops_on_io_tiles: Whether operations of input and output run on I/O tiles.
        available_memory_proportion: The proportion of the memory of I/O tiles that data may fill.
    """

    num_io_tiles: int = 0
    place_ops_on_io_tiles: bool = False
    available_memory_proportion: float = 0.9


class _IPUModel(_Declared):
    """The original's simulation of an IPU.

    Attributes:
        compile_ipu_code: Whether code of the IPU is compiled.
        tiles_per_ipu: The number of tiles of an IPU; 0 for the number of the version.
        version: The kind of IPU.
    """

    compile_ipu_code: bool = True
    tiles_per_ipu: int = 0
    version: str = "ipu2"


class _MatMuls(_Declared):
    """Matrix products.

    Attributes:
        clear_pass_type: Whether to hide from PopLibs which pass a product belongs to.
        poplar_options: Options of PopLibs for matrix products.
    """

    clear_pass_type: bool = False
    poplar_options: _Options = {}


class _Norms(_Declared):
    """Normalisation.

    Attributes:
        use_stable_statistics: Whether variances are computed from differences to the mean.
    """

    use_stable_statistics: bool = False
    experimental: _NormsExperimental


class _NormsExperimental(_Declared):
    """Experimental attributes of normalisation.

    Attributes:
        distributed_batch_norm_replica_group_size: The number of consecutive replicas over which batch normalisation
            computes its statistics.
    """

    distributed_batch_norm_replica_group_size: int = 1


class _Optimizations(_Declared):
    """Optimizations by the compiler, and memory.

    Attributes:
        prefetch_data_streams: Whether data are prepared while programs run. Effect: False: data sets and infeeds
            without a prefetch depth of their own prefetch as little as possible.
        combine_embedding_lookups: Whether lookups in one table are combined.
        combine_matmuls: Whether matrix products with a common operand are combined.
        enable_graph_outlining: Whether equal operations share their code.
        merge_infeed_io_copies: Whether all inputs are copied to the device together.
        maximum_cross_replica_sum_buffer_size: Maximum bytes of sums over replicas that wait for more.
        maximum_reduce_scatter_buffer_size: Maximum bytes of reduce-scatters that wait for more.
        maximum_inter_ipu_copies_buffer_size: Maximum bytes of copies between IPUs that wait for more.
        maximum_send_recv_cluster_size: Maximum bytes of transfers with the host that wait for more.
        maximum_reduce_many_buffer_size: Maximum bytes of reductions that wait for more.
        maximum_all_gather_buffer_size: Maximum bytes of all-gathers that wait for more.
        minimum_remote_tensor_size: The smallest size in bytes of a tensor outside of the device. Effect: a quarter of
            it is the default of `min_elements_for_sharding` of a Trainer.
        merge_remote_buffers: Whether several remote buffers are merged.
        enable_gather_simplifier: Whether lookups are simplified.
        triangular_solve_expander_block_size: Rows of a block of triangular systems; 0 for the default.
        cholesky_block_size: Rows of a block of Cholesky factors; 0 for the default.
        enable_fast_math: The former name of `math.fast`.
        enable_dynamic_slice_replacement: Whether dynamic slices become lookups.
    """

    DEPRECATED = {"enable_fast_math": "'enable_fast_math' has been moved to 'optimizations.math.fast'."}
    math: _Math
    prefetch_data_streams: bool = True
    combine_embedding_lookups: bool = False
    combine_matmuls: bool = False
    enable_graph_outlining: bool = True
    merge_infeed_io_copies: bool = True
    maximum_cross_replica_sum_buffer_size: int = 0
    maximum_reduce_scatter_buffer_size: int = 0
    maximum_inter_ipu_copies_buffer_size: int = 0
    maximum_send_recv_cluster_size: int = 0
    maximum_reduce_many_buffer_size: int = 0
    maximum_all_gather_buffer_size: int = 0
    minimum_remote_tensor_size: int = 128
    merge_remote_buffers: MergeRemoteBuffersBehaviour = MergeRemoteBuffersBehaviour.IF_BENEFICIAL
    enable_gather_simplifier: bool = True
    triangular_solve_expander_block_size: int = 0
    cholesky_block_size: int = 0
    enable_fast_math: bool = False
    enable_dynamic_slice_replacement: bool = True


class _Math(_Declared):
    """The simplification of expressions.

    Attributes:
        fast: Whether expressions may be rewritten in ways that change the result.
        dot_strength: Whether products without a contraction become elementwise products.
    """

    fast: bool = False
    dot_strength: bool = True


class _Pooling(_Declared):
    """Pooling.

    Attributes:
        poplar_options: Options of PopLibs for pooling.
    """

    poplar_options: _Options = {}


class _Scheduling(_Declared):
    """The order of instructions.

    Attributes:
        algorithm: The algorithm that finds the order.
        maximum_scheduler_lookahead_depth: The number of instructions that LOOK_AHEAD looks ahead.
        maximum_scheduler_search_space_size: The number of orders that LOOK_AHEAD examines.
    """

    algorithm: SchedulingAlgorithm = SchedulingAlgorithm.CHOOSE_BEST
    maximum_scheduler_lookahead_depth: int = 5
    maximum_scheduler_search_space_size: int = 64


@final
class IPUConfig(Category):
    """The configuration of a system of IPUs. Semantics: the original's `IPUConfig`, attribute by attribute (config.md).

    An assignment checks the value: TypeError for another type, `UnknownAttributeError` for an unknown name. The latter
    is a ValueError and suggests a similar name. Assignments take effect only with `configure_ipu_system`.

    Example::

        config = strategies.config.IPUConfig()
        config.auto_select_ipus = 4
        config.configure_ipu_system()

    Attributes:
        allow_recompute: Whether backward passes may recompute activations. Effect: True: pipelines recompute; False:
            they do not, whatever `recomputation_mode` says.
        selection_order: The order in which IPUs are assigned to shards.
        serialization_output_folder: The folder for compiled programs. Effect: strategies save executables in this
            folder and load them, unless poprun --executable-cache-path names another.
        compilation_poplar_options: Options of Poplar's compiler.
        gcl_poplar_options: Options of Graphcore's library of collectives.
        auto_select_ipus: The number of IPUs of each device of the system. Effect: the number of replicas of an
            instance: IPUs of the first device divided by IPUs of a replica.
        select_ipus: The IPUs, or groups of IPUs, that form the devices of the system. Effect: the same, with the number
            of IPUs of the first group in a system of 16 IPUs.
    """

    allow_recompute: bool = False
    selection_order: SelectionOrder = SelectionOrder.AUTO
    serialization_output_folder: str = ""
    compilation_poplar_options: _Options = {}
    gcl_poplar_options: _Options = {}
    auto_select_ipus: _Devices = []
    select_ipus: _Devices = []
    convolutions: _Convolutions
    device_connection: _DeviceConnection
    slices: _Slices
    experimental: _ExperimentalAttributes
    floating_point_behaviour: _FloatingPointBehaviour
    io_tiles: _IOTiles
    ipu_model: _IPUModel
    matmuls: _MatMuls
    norms: _Norms
    optimizations: _Optimizations
    pooling: _Pooling
    scheduling: _Scheduling

    def __init__(self) -> None:
        super().__init__(type(self))

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
        _check_consistency(self)
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


def _check_consistency(config: IPUConfig) -> None:
    distribution, connection = config.experimental.multi_replica_distribution, config.device_connection
    index, count, tiles = distribution.process_index, distribution.process_count, config.io_tiles.num_io_tiles
    if count < 0 or (count and not 0 <= index < count):
        name = "experimental.multi_replica_distribution.process_"
        raise ValueError(
            f"{name}index must be in the range [0, {name}count), but is {index} of {count}; "
            "popdist.tensorflow.set_ipu_config sets both"
        )
    if config.io_tiles.place_ops_on_io_tiles and tiles == 0:
        raise ValueError("Cannot place ops on I/O tiles when io_tiles.num_io_tiles == 0; set num_io_tiles first")
    name = "norms.experimental.distributed_batch_norm_replica_group_size"
    size = config.norms.experimental.distributed_batch_norm_replica_group_size
    if size < 1:
        raise ValueError(f"{name} must be at least 1, but is {size}")
    if size > 1 and tiles > 0:
        raise ValueError(
            f"{name} is {size}, and io_tiles.num_io_tiles is {tiles}: groups of replicas are not supported with I/O "
            "tiles. Leave one of them at its default"
        )
    if connection.type in (DeviceConnectionType.NEVER, DeviceConnectionType.PRE_COMPILE) and not connection.version:
        raise ValueError(
            f"device_connection.version must be set when device_connection.type is {connection.type}: 'ipu1' or 'ipu2'"
        )


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
    global _in_force
    defaults = config.check()
    if _in_force is not None and _in_force != config:
        if not reset_configuration:
            raise RuntimeError(
                "the IPU system is already configured differently; call reset_ipu_configuration() first, or leave "
                "reset_configuration at True"
            )
        logger.warning("Resetting existing IPU configuration before applying new configuration")
    _in_force = copy.deepcopy(config)
    put_in_force(defaults)
    changed = [metadata for metadata, value in config.attributes() if value != metadata.default]
    if new := sorted({metadata.name for metadata in changed if not metadata.effect} - _named):
        logger.debug("kept without effect: %s", ", ".join(new))
        _named.update(new)


def get_ipu_config() -> IPUConfig:
    """Return a copy of the configuration in force.

    Raises:
        RuntimeError: If no configuration is in force.
    """
    if _in_force is None:
        raise RuntimeError("No IPU devices configured; call config.configure_ipu_system() first")
    return copy.deepcopy(_in_force)


def reset_ipu_configuration() -> None:
    """Remove the configuration of this process; objects that were made under it do not change."""
    global _in_force
    _in_force = None
    put_in_force(Defaults())


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
