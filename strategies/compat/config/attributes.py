"""The attributes of an `IPUConfig`, with the original's names, types and defaults.

An attribute without an `effect` concerns tiles, memory or instructions of an IPU. Programs of the original may set it.
"""

from __future__ import annotations

from enum import Enum

from strategies.compat.config.category import attribute, category, table_of

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

_DEVICES = int | list[int] | tuple[int, ...]
_OPTIONS = dict[str, str]
_ROUNDING = StochasticRoundingBehaviour | bool
_CHECKS = "a Trainer without loss scaling raises NonFiniteGradientError for gradients that are NaN or infinite"

EFFECTS = {
    "allow_recompute": "True: pipelines recompute; False: they do not, whatever `recomputation_mode` says",
    "serialization_output_folder": (
        "strategies save executables in this folder and load them, unless poprun --executable-cache-path names another"
    ),
    "auto_select_ipus": "the number of replicas of an instance: IPUs of the first device divided by IPUs of a replica",
    "select_ipus": "the same, with the number of IPUs of the first group in a system of 16 IPUs",
    "device_connection.type": (
        "NEVER: strategies are refused, because they would run programs; the other values do not differ, and programs "
        "also run under PRE_COMPILE"
    ),
    "experimental.enable_prng_stability": "none: replicas always draw the same numbers",
    "experimental.multi_replica_distribution.process_index": (
        "must be the index of the instance that a launcher has started"
    ),
    "experimental.multi_replica_distribution.process_count": (
        "must be the number of instances that a launcher has started"
    ),
    "floating_point_behaviour.inv": _CHECKS,
    "floating_point_behaviour.div0": _CHECKS,
    "floating_point_behaviour.oflo": _CHECKS,
    "floating_point_behaviour.nanoo": "none: an overflow always gives infinity",
    "floating_point_behaviour.esr": (
        "ON and REPLICA_IDENTICAL_ONLY: a Trainer of JAX has `stochastic_rounding` by default"
    ),
    "floating_point_behaviour.set_all": "True: the effects of inv, div0, oflo, nanoo and esr",
    "optimizations.prefetch_data_streams": (
        "False: data sets and infeeds without a prefetch depth of their own prefetch as little as possible"
    ),
    "optimizations.minimum_remote_tensor_size": (
        "a quarter of it is the default of `min_elements_for_sharding` of a Trainer"
    ),
}
"""The effects of attributes by their full names; all other attributes are only kept."""

ATTRIBUTES = table_of(
    EFFECTS,
    allow_recompute=attribute(False, "Whether backward passes may recompute activations."),
    selection_order=attribute(SelectionOrder.AUTO, "The order in which IPUs are assigned to shards."),
    serialization_output_folder=attribute("", "The folder for compiled programs."),
    compilation_poplar_options=attribute({}, "Options of Poplar's compiler.", _OPTIONS),
    gcl_poplar_options=attribute({}, "Options of Graphcore's library of collectives.", _OPTIONS),
    auto_select_ipus=attribute([], "The number of IPUs of each device of the system.", _DEVICES),
    select_ipus=attribute([], "The IPUs, or groups of IPUs, that form the devices of the system.", _DEVICES),
    convolutions=category(
        "Convolutions.", poplar_options=attribute({}, "Options of PopLibs for convolutions.", _OPTIONS)
    ),
    device_connection=category(
        "The time when a process attaches to devices.",
        type=attribute(DeviceConnectionType.ALWAYS, "The time to attach to devices."),
        version=attribute("", "The kind of IPU to compile for if none is attached."),
        enable_remote_buffers=attribute(False, "Whether devices that are attached later have remote buffers."),
    ),
    slices=category("Slices and embeddings.", poplar_options=attribute({}, "Options of PopLibs for slices.", _OPTIONS)),
    experimental=category(
        "Experimental attributes.",
        always_rearrange_copies_on_the_host=attribute(False, "Whether the host changes layouts of streamed data."),
        enable_remote_buffer_embedding=attribute(False, "Whether embeddings of the host use remote buffers."),
        enable_prng_stability=attribute(False, "Whether replicas that round stochastically draw the same numbers."),
        multi_replica_distribution=category(
            "The processes that share the replicas; `set_ipu_config` sets its attributes.",
            process_index=attribute(0, "The index of this process."),
            process_count=attribute(0, "The number of processes that share the replicas; 0 for a single process."),
        ),
    ),
    floating_point_behaviour=category(
        "Exceptions of floating-point arithmetic, and rounding.",
        inv=attribute(False, "Whether an invalid operation is an error."),
        div0=attribute(False, "Whether a division by zero is an error."),
        oflo=attribute(False, "Whether an overflow is an error."),
        nanoo=attribute(False, "Whether an overflow of float16 gives NaN instead of the largest number."),
        esr=attribute(
            StochasticRoundingBehaviour.OFF,
            "Whether 16-bit numbers are rounded stochastically; True and False are deprecated.",
            _ROUNDING,
        ),
        set_all=attribute(False, "Whether all other attributes of this category count as switched on."),
    ),
    io_tiles=category(
        "Tiles for input and output.",
        num_io_tiles=attribute(0, "Tiles that are reserved for input and output."),
        place_ops_on_io_tiles=attribute(False, "Whether operations of input and output run on I/O tiles."),
        available_memory_proportion=attribute(0.9, "The proportion of the memory of I/O tiles that data may fill."),
    ),
    ipu_model=category(
        "The original's simulation of an IPU.",
        compile_ipu_code=attribute(True, "Whether code of the IPU is compiled."),
        tiles_per_ipu=attribute(0, "The number of tiles of an IPU; 0 for the number of the version."),
        version=attribute("ipu2", "The kind of IPU."),
    ),
    matmuls=category(
        "Matrix products.",
        clear_pass_type=attribute(False, "Whether to hide from PopLibs which pass a product belongs to."),
        poplar_options=attribute({}, "Options of PopLibs for matrix products.", _OPTIONS),
    ),
    norms=category(
        "Normalisation.",
        use_stable_statistics=attribute(False, "Whether variances are computed from differences to the mean."),
        experimental=category(
            "Experimental attributes of normalisation.",
            distributed_batch_norm_replica_group_size=attribute(
                1, "The number of consecutive replicas over which batch normalisation computes its statistics."
            ),
        ),
    ),
    optimizations=category(
        "Optimizations by the compiler, and memory.",
        math=category(
            "The simplification of expressions.",
            fast=attribute(False, "Whether expressions may be rewritten in ways that change the result."),
            dot_strength=attribute(True, "Whether products without a contraction become elementwise products."),
        ),
        prefetch_data_streams=attribute(True, "Whether data are prepared while programs run."),
        combine_embedding_lookups=attribute(False, "Whether lookups in one table are combined."),
        combine_matmuls=attribute(False, "Whether matrix products with a common operand are combined."),
        enable_graph_outlining=attribute(True, "Whether equal operations share their code."),
        merge_infeed_io_copies=attribute(True, "Whether all inputs are copied to the device together."),
        maximum_cross_replica_sum_buffer_size=attribute(0, "Maximum bytes of sums over replicas that wait for more."),
        maximum_reduce_scatter_buffer_size=attribute(0, "Maximum bytes of reduce-scatters that wait for more."),
        maximum_inter_ipu_copies_buffer_size=attribute(0, "Maximum bytes of copies between IPUs that wait for more."),
        maximum_send_recv_cluster_size=attribute(0, "Maximum bytes of transfers with the host that wait for more."),
        maximum_reduce_many_buffer_size=attribute(0, "Maximum bytes of reductions that wait for more."),
        maximum_all_gather_buffer_size=attribute(0, "Maximum bytes of all-gathers that wait for more."),
        minimum_remote_tensor_size=attribute(128, "The smallest size in bytes of a tensor outside of the device."),
        merge_remote_buffers=attribute(
            MergeRemoteBuffersBehaviour.IF_BENEFICIAL, "Whether several remote buffers are merged."
        ),
        enable_gather_simplifier=attribute(True, "Whether lookups are simplified."),
        triangular_solve_expander_block_size=attribute(0, "Rows of a block of triangular systems; 0 for the default."),
        cholesky_block_size=attribute(0, "Rows of a block of Cholesky factors; 0 for the default."),
        enable_fast_math=attribute(
            False,
            "The former name of `math.fast`.",
            deprecated_msg="'enable_fast_math' has been moved to 'optimizations.math.fast'.",
        ),
        enable_dynamic_slice_replacement=attribute(True, "Whether dynamic slices become lookups."),
    ),
    pooling=category("Pooling.", poplar_options=attribute({}, "Options of PopLibs for pooling.", _OPTIONS)),
    scheduling=category(
        "The order of instructions.",
        algorithm=attribute(SchedulingAlgorithm.CHOOSE_BEST, "The algorithm that finds the order."),
        maximum_scheduler_lookahead_depth=attribute(5, "The number of instructions that LOOK_AHEAD looks ahead."),
        maximum_scheduler_search_space_size=attribute(64, "The number of orders that LOOK_AHEAD examines."),
    ),
)
