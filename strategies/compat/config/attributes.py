"""The attributes of an `IPUConfig`, with the original's names, types and defaults.

What has no `effect` is kept for programs of the original: it is about tiles, memory and instructions of an IPU.
"""

from __future__ import annotations

from enum import Enum

from strategies.compat.config.category import attribute, category, table_of

SelectionOrder = Enum("SelectionOrder", ["AUTO", "ZIGZAG", "SNAKE", "HOOF"], start=0)
SelectionOrder.__doc__ = "The order in which the original gives IPUs to shards. Simulated devices are all equally near."

DeviceConnectionType = Enum("DeviceConnectionType", ["ALWAYS", "ON_DEMAND", "NEVER", "PRE_COMPILE"], start=0)
DeviceConnectionType.__doc__ = (
    "The time at which the original attaches to devices: when it is configured, when a program needs them, or never."
)

MergeRemoteBuffersBehaviour = Enum("MergeRemoteBuffersBehaviour", ["NO_MERGING", "MERGE", "IF_BENEFICIAL"], start=0)
MergeRemoteBuffersBehaviour.__doc__ = "Whether the original makes one remote buffer of several."

SchedulingAlgorithm = Enum(
    "SchedulingAlgorithm", ["CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"], start=0
)
SchedulingAlgorithm.__doc__ = "The order of a program's instructions in the original."

StochasticRoundingBehaviour = Enum("StochasticRoundingBehaviour", ["OFF", "ON", "REPLICA_IDENTICAL_ONLY"], start=0)
StochasticRoundingBehaviour.__doc__ = (
    "Whether updates of 16-bit variables are rounded by chance. Replicas draw the same numbers here: ON and "
    "REPLICA_IDENTICAL_ONLY are one."
)

_DEVICES = int | list[int] | tuple[int, ...]
_OPTIONS = dict[str, str]
_ROUNDING = StochasticRoundingBehaviour | bool
_CHECKS = "gradients of a Trainer without loss scaling that are NaN or infinite raise NonFiniteGradientError"

EFFECTS = {
    "allow_recompute": "pipelines recompute; False: they do not, whatever `recomputation_mode` says",
    "serialization_output_folder": (
        "strategies keep executables there, and load them, unless poprun --executable-cache-path names a folder"
    ),
    "auto_select_ipus": "those of the first device, divided by what a replica spans, are the replicas of an instance",
    "select_ipus": "the same, with as many IPUs as the first group has in a system of 16",
    "device_connection.type": (
        "NEVER: strategies are refused, since they would run programs; the others are the same, and programs "
        "compute what they are for under PRE_COMPILE too"
    ),
    "experimental.enable_prng_stability": "none that could be switched: they always do",
    "experimental.multi_replica_distribution.process_index": (
        "must be the index of the instance that a launcher has started"
    ),
    "experimental.multi_replica_distribution.process_count": (
        "must be the number of instances that a launcher has started"
    ),
    "floating_point_behaviour.inv": _CHECKS,
    "floating_point_behaviour.div0": _CHECKS,
    "floating_point_behaviour.oflo": _CHECKS,
    "floating_point_behaviour.nanoo": "none that could be switched: it always gives infinity",
    "floating_point_behaviour.esr": (
        "ON and REPLICA_IDENTICAL_ONLY: `stochastic_rounding` of a Trainer of JAX that does not say it itself"
    ),
    "floating_point_behaviour.set_all": "that of inv, div0, oflo, nanoo and esr",
    "optimizations.prefetch_data_streams": (
        "False: data sets and infeeds that do not say it themselves prepare as little ahead as they can"
    ),
    "optimizations.minimum_remote_tensor_size": (
        "a fourth of it is `min_elements_for_sharding` of a Trainer that does not say it itself"
    ),
}
"""What attributes change here, by their full names; all others are only kept."""

ATTRIBUTES = table_of(
    EFFECTS,
    allow_recompute=attribute(False, "Whether what backward passes need may be computed again."),
    selection_order=attribute(SelectionOrder.AUTO, "In which order IPUs are given to shards."),
    serialization_output_folder=attribute("", "Where compiled programs are kept."),
    compilation_poplar_options=attribute({}, "Options of Poplar's compiler.", _OPTIONS),
    gcl_poplar_options=attribute({}, "Options of Graphcore's library of collectives.", _OPTIONS),
    auto_select_ipus=attribute([], "How many IPUs each device of the system has.", _DEVICES),
    select_ipus=attribute([], "Which IPUs, or groups of them, are the devices of the system.", _DEVICES),
    convolutions=category(
        "Convolutions.", poplar_options=attribute({}, "Options of PopLibs for convolutions.", _OPTIONS)
    ),
    device_connection=category(
        "When a process attaches to devices.",
        type=attribute(DeviceConnectionType.ALWAYS, "When to attach to devices."),
        version=attribute("", "The kind of IPU for which to compile where none is attached."),
        enable_remote_buffers=attribute(False, "Whether devices that are attached later have remote buffers."),
    ),
    slices=category("Slices and embeddings.", poplar_options=attribute({}, "Options of PopLibs for slices.", _OPTIONS)),
    experimental=category(
        "What may still change.",
        always_rearrange_copies_on_the_host=attribute(False, "Whether the host changes layouts of streamed data."),
        enable_remote_buffer_embedding=attribute(False, "Whether embeddings of the host are in remote buffers."),
        enable_prng_stability=attribute(False, "Whether replicas that round stochastically draw the same numbers."),
        multi_replica_distribution=category(
            "Several processes that share the replicas; `set_ipu_config` fills it in.",
            process_index=attribute(0, "Which of the processes this is."),
            process_count=attribute(0, "How many processes share the replicas; 0 for one that is alone."),
        ),
    ),
    floating_point_behaviour=category(
        "Numbers that are none, and rounding.",
        inv=attribute(False, "Whether an invalid operation is an error."),
        div0=attribute(False, "Whether a division by zero is an error."),
        oflo=attribute(False, "Whether an overflow is an error."),
        nanoo=attribute(False, "Whether an overflow of float16 gives NaN, not the largest number."),
        esr=attribute(
            StochasticRoundingBehaviour.OFF,
            "Whether 16-bit numbers are rounded stochastically; truth values are deprecated.",
            _ROUNDING,
        ),
        set_all=attribute(False, "Whether all of the others count as switched on."),
    ),
    io_tiles=category(
        "Tiles for input and output.",
        num_io_tiles=attribute(0, "Tiles that are reserved for input and output."),
        place_ops_on_io_tiles=attribute(False, "Whether operations of input and output run there."),
        available_memory_proportion=attribute(0.9, "The part of their memory that data may fill."),
    ),
    ipu_model=category(
        "The original's simulation of an IPU.",
        compile_ipu_code=attribute(True, "Whether code of the IPU is compiled."),
        tiles_per_ipu=attribute(0, "How many tiles an IPU has; 0 for as many as the version."),
        version=attribute("ipu2", "The kind of IPU."),
    ),
    matmuls=category(
        "Matrix products.",
        clear_pass_type=attribute(False, "Whether PopLibs is not told if a product is of a forward pass."),
        poplar_options=attribute({}, "Options of PopLibs for matrix products.", _OPTIONS),
    ),
    norms=category(
        "Normalisation.",
        use_stable_statistics=attribute(False, "Whether variances are taken of differences from the mean."),
        experimental=category(
            "What may still change of normalisation.",
            distributed_batch_norm_replica_group_size=attribute(
                1, "Over how many replicas, one after another, batch normalisation takes its statistics."
            ),
        ),
    ),
    optimizations=category(
        "What a compiler may do, and memory.",
        math=category(
            "How expressions are simplified.",
            fast=attribute(False, "Whether expressions may be changed in ways that change the result."),
            dot_strength=attribute(True, "Whether products without a contraction become elementwise ones."),
        ),
        prefetch_data_streams=attribute(True, "Whether data are prepared while programs run."),
        combine_embedding_lookups=attribute(False, "Whether lookups in one table become one."),
        combine_matmuls=attribute(False, "Whether matrix products with a common operand become one."),
        enable_graph_outlining=attribute(True, "Whether equal operations share their code."),
        merge_infeed_io_copies=attribute(True, "Whether inputs are copied to the device at once."),
        maximum_cross_replica_sum_buffer_size=attribute(0, "Bytes of sums over replicas that wait for more."),
        maximum_reduce_scatter_buffer_size=attribute(0, "Bytes of reduce-scatters that wait for more."),
        maximum_inter_ipu_copies_buffer_size=attribute(0, "Bytes of copies between IPUs that wait for more."),
        maximum_send_recv_cluster_size=attribute(0, "Bytes of transfers with the host that wait for more."),
        maximum_reduce_many_buffer_size=attribute(0, "Bytes of reductions that wait for more."),
        maximum_all_gather_buffer_size=attribute(0, "Bytes of all-gathers that wait for more."),
        minimum_remote_tensor_size=attribute(128, "Bytes from which on a tensor may lie outside of the device."),
        merge_remote_buffers=attribute(
            MergeRemoteBuffersBehaviour.IF_BENEFICIAL, "Whether several remote buffers become one."
        ),
        enable_gather_simplifier=attribute(True, "Whether lookups are simplified."),
        triangular_solve_expander_block_size=attribute(0, "Rows of a block of triangular systems; 0 for the usual."),
        cholesky_block_size=attribute(0, "Rows of a block of Cholesky factors; 0 for the usual."),
        enable_fast_math=attribute(
            False,
            "What `math.fast` is now.",
            deprecated_msg="'enable_fast_math' has been moved to 'optimizations.math.fast'.",
        ),
        enable_dynamic_slice_replacement=attribute(True, "Whether dynamic slices become lookups."),
    ),
    pooling=category("Pooling.", poplar_options=attribute({}, "Options of PopLibs for pooling.", _OPTIONS)),
    scheduling=category(
        "The order of instructions.",
        algorithm=attribute(SchedulingAlgorithm.CHOOSE_BEST, "How the order is found."),
        maximum_scheduler_lookahead_depth=attribute(5, "How far LOOK_AHEAD looks."),
        maximum_scheduler_search_space_size=attribute(64, "How many orders LOOK_AHEAD looks at."),
    ),
)
