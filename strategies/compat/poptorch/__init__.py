"""PopTorch's interface without IPUs: programs of PopTorch run with `import strategies.torch.poptorch as poptorch`."""

from difflib import get_close_matches
from typing import Any

import strategies.compat.poptorch.autocasting as autocasting
import strategies.compat.poptorch.optim as optim
import strategies.compat.poptorch.profiling as profiling
from strategies.compat.poptorch.autocasting import autocast
from strategies.compat.poptorch.blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    removeBlocks,
)
from strategies.compat.poptorch.data_loader import AsynchronousDataAccessor, DataLoader
from strategies.compat.poptorch.enums import (
    AnchorMode,
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from strategies.compat.poptorch.errors import ConfigFileError, RecoverableError, SmallDataError, UnrecoverableError
from strategies.compat.poptorch.executor import PoplarExecutor, inferenceModel, load, trainingModel
from strategies.compat.poptorch.operations import (
    CPU,
    Attribute,
    MultiConv,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    isRunningOnIpu,
    nearest,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
    setLogLevel,
)
from strategies.compat.poptorch.option_groups import TensorLocationSettings
from strategies.compat.poptorch.options import Options, PopdistOptions
from strategies.errors import StrategyError as Error

__all__ = [
    "AnchorMode",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PopdistOptions",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "SmallDataError",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "autocast",
    "autocasting",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "nearest",
    "nop",
    "optim",
    "profiling",
    "recomputationCheckpoint",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]

__version__ = "3.3.0"
"""The version of PopTorch that has this interface."""

_WAYS_OUT = {
    "ICustomArgParser": "give models tensors in tuples, lists or dictionaries",
    "accessAttributes": "write a torch.autograd.Function in place of a custom operator",
    "createPoptorchError": "raise poptorch.Error(message)",
    "distributed": "poprun starts instances, and popdist.poptorch.Options() has their numbers",
    "experimental": "call functions as they are, or wrap them in a module for poptorch.inferenceModel",
    "getIpuTensorId": "tensors are in host memory, where tensor.data_ptr() identifies them",
    "poptorch_core": "it is the compiler for IPUs, which is not needed here",
    "registerCustomArgParser": "give models tensors in tuples, lists or dictionaries",
    "registerPostCompileHook": "nothing is compiled; run the hook's code after making the model",
    "registerPreCompileHook": "nothing is compiled; run the hook's code before making the model",
    "testing": "compare tensors with torch.testing.assert_close",
}


def __getattr__(name: str) -> Any:
    """Refuse an unknown name with a message that names a replacement."""
    close = get_close_matches(name, __all__, 1)
    way_out = _WAYS_OUT.get(name) or (
        f"did you mean {close[0]}?" if close else "the documentation (docs: torch) lists all names"
    )
    raise AttributeError(f"strategies.torch.poptorch has no {name}: {way_out}")
