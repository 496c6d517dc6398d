"""The categories of an `IPUConfig`, with the original's names, types and defaults.

What has no `effect` is kept for programs of the original: it is about tiles, memory and instructions of an IPU.
"""

from __future__ import annotations

from strategies.config.category import Category, attribute, category
from strategies.config.choices import (
    DeviceConnectionType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    StochasticRoundingBehaviour,
)

_CHECKS = "gradients of a Trainer without loss scaling that are NaN or infinite raise NonFiniteGradientError"


class Convolutions(Category):
    """Of convolutions."""

    poplar_options: dict[str, str] = attribute({}, "Options of PopLibs for convolutions.")


class Matmuls(Category):
    """Of matrix products."""

    clear_pass_type: bool = attribute(False, "Whether PopLibs is not told if a product is of a forward pass.")
    poplar_options: dict[str, str] = attribute({}, "Options of PopLibs for matrix products.")


class Slices(Category):
    """Of slices and embeddings."""

    poplar_options: dict[str, str] = attribute({}, "Options of PopLibs for slices.")


class Pooling(Category):
    """Of pooling."""

    poplar_options: dict[str, str] = attribute({}, "Options of PopLibs for pooling.")


class DeviceConnection(Category):
    """Of the connection with devices."""

    type: DeviceConnectionType = attribute(
        DeviceConnectionType.ALWAYS,
        "When to attach to devices.",
        effect="NEVER: strategies are refused, since they would run programs; the others are the same, and programs "
        "compute what they are for under PRE_COMPILE too",
    )
    version: str = attribute("", "The kind of IPU for which to compile where none is attached.")
    enable_remote_buffers: bool = attribute(False, "Whether devices that are attached later have remote buffers.")


class MultiReplicaDistribution(Category):
    """Of several processes."""

    process_index: int = attribute(
        0, "Which of the processes this is.", effect="must be the index of the instance that a launcher has started"
    )
    process_count: int = attribute(
        0,
        "How many processes share the replicas; 0 for one that is alone.",
        effect="must be the number of instances that a launcher has started",
    )


class Experimental(Category):
    """What may still change."""

    always_rearrange_copies_on_the_host: bool = attribute(False, "Whether the host changes layouts of streamed data.")
    enable_remote_buffer_embedding: bool = attribute(False, "Whether embeddings of the host are in remote buffers.")
    enable_prng_stability: bool = attribute(
        False,
        "Whether replicas that round stochastically draw the same numbers.",
        effect="none that could be switched: they always do",
    )
    multi_replica_distribution: MultiReplicaDistribution = category(
        MultiReplicaDistribution, "Several processes that share the replicas; `set_ipu_config` fills it in."
    )


class FloatingPointBehaviour(Category):
    """Of numbers that are none, and of rounding."""

    inv: bool = attribute(False, "Whether an invalid operation is an error.", effect=_CHECKS)
    div0: bool = attribute(False, "Whether a division by zero is an error.", effect=_CHECKS)
    oflo: bool = attribute(False, "Whether an overflow is an error.", effect=_CHECKS)
    nanoo: bool = attribute(
        False,
        "Whether an overflow of float16 gives NaN, not the largest number.",
        effect="none that could be switched: it always gives infinity",
    )
    esr: StochasticRoundingBehaviour | bool = attribute(
        StochasticRoundingBehaviour.OFF,
        "Whether 16-bit numbers are rounded stochastically; truth values are deprecated.",
        effect="ON and REPLICA_IDENTICAL_ONLY: `stochastic_rounding` of a Trainer that does not say it itself",
    )
    set_all: bool = attribute(
        False, "Whether all of the others count as switched on.", effect="that of inv, div0, oflo, nanoo and esr"
    )


class IOTiles(Category):
    """Of tiles for input and output."""

    num_io_tiles: int = attribute(0, "Tiles that are reserved for input and output.")
    place_ops_on_io_tiles: bool = attribute(False, "Whether operations of input and output run there.")
    available_memory_proportion: float = attribute(0.9, "The part of their memory that data may fill.")


class IPUModel(Category):
    """Of the original's simulation of an IPU."""

    compile_ipu_code: bool = attribute(True, "Whether code of the IPU is compiled.")
    tiles_per_ipu: int = attribute(0, "How many tiles an IPU has; 0 for as many as the version.")
    version: str = attribute("ipu2", "The kind of IPU.")


class NormsExperimental(Category):
    """What may still change of normalisation."""

    distributed_batch_norm_replica_group_size: int = attribute(
        1, "Over how many replicas, one after another, batch normalisation takes its statistics."
    )


class Norms(Category):
    """Of normalisation."""

    use_stable_statistics: bool = attribute(False, "Whether variances are taken of differences from the mean.")
    experimental: NormsExperimental = category(NormsExperimental, "What may still change of normalisation.")


class Math(Category):
    """Of algebra."""

    fast: bool = attribute(False, "Whether expressions may be changed in ways that change the result.")
    dot_strength: bool = attribute(True, "Whether products without a contraction become elementwise ones.")


class Optimizations(Category):
    """Of what a compiler may do, and of memory."""

    math: Math = category(Math, "How expressions are simplified.")
    prefetch_data_streams: bool = attribute(
        True,
        "Whether data are prepared while programs run.",
        effect="False: data sets and infeeds that do not say it themselves prepare as little ahead as they can",
    )
    combine_embedding_lookups: bool = attribute(False, "Whether lookups in one table become one.")
    combine_matmuls: bool = attribute(False, "Whether matrix products with a common operand become one.")
    enable_graph_outlining: bool = attribute(True, "Whether equal operations share their code.")
    merge_infeed_io_copies: bool = attribute(True, "Whether inputs are copied to the device at once.")
    maximum_cross_replica_sum_buffer_size: int = attribute(0, "Bytes of sums over replicas that wait for more.")
    maximum_reduce_scatter_buffer_size: int = attribute(0, "Bytes of reduce-scatters that wait for more.")
    maximum_inter_ipu_copies_buffer_size: int = attribute(0, "Bytes of copies between IPUs that wait for more.")
    maximum_send_recv_cluster_size: int = attribute(0, "Bytes of transfers with the host that wait for more.")
    maximum_reduce_many_buffer_size: int = attribute(0, "Bytes of reductions that wait for more.")
    maximum_all_gather_buffer_size: int = attribute(0, "Bytes of all-gathers that wait for more.")
    minimum_remote_tensor_size: int = attribute(
        128,
        "Bytes from which on a tensor may lie outside of the device.",
        effect="a fourth of it is `min_elements_for_sharding` of a Trainer that does not say it itself",
    )
    merge_remote_buffers: MergeRemoteBuffersBehaviour = attribute(
        MergeRemoteBuffersBehaviour.IF_BENEFICIAL, "Whether several remote buffers become one."
    )
    enable_gather_simplifier: bool = attribute(True, "Whether lookups are simplified.")
    triangular_solve_expander_block_size: int = attribute(0, "Rows of a block of triangular systems; 0 for the usual.")
    cholesky_block_size: int = attribute(0, "Rows of a block of Cholesky factors; 0 for the usual.")
    enable_fast_math: bool = attribute(
        False,
        "What `math.fast` is now.",
        deprecated="'enable_fast_math' has been moved to 'optimizations.math.fast'.",
    )
    enable_dynamic_slice_replacement: bool = attribute(True, "Whether dynamic slices become lookups.")


class Scheduling(Category):
    """Of the order of instructions."""

    algorithm: SchedulingAlgorithm = attribute(SchedulingAlgorithm.CHOOSE_BEST, "How the order is found.")
    maximum_scheduler_lookahead_depth: int = attribute(5, "How far LOOK_AHEAD looks.")
    maximum_scheduler_search_space_size: int = attribute(64, "How many orders LOOK_AHEAD looks at.")
