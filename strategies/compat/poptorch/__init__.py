"""PopTorch's interface without IPUs: programs of PopTorch run with `import strategies.torch.poptorch as poptorch`."""

# ruff: noqa: F403, F405
from difflib import get_close_matches
from typing import Any

import strategies.compat.poptorch.names as enums  # noqa: F401
import strategies.compat.poptorch.operations as autocasting
import strategies.compat.poptorch.optim as optim
import strategies.compat.poptorch.options as options  # noqa: F401
from strategies.compat.poptorch.blocks import *
from strategies.compat.poptorch.data_loader import *
from strategies.compat.poptorch.executor import *
from strategies.compat.poptorch.names import *
from strategies.compat.poptorch.operations import *
from strategies.compat.poptorch.options import *
from strategies.errors import StrategyError as Error

__all__ = ["Options", "PopdistOptions", "PoplarExecutor", "inferenceModel", "load", "optim", "trainingModel"]
__all__ += ["AsynchronousDataAccessor", "DataLoader", "TensorLocationSettings", "autocast", "autocasting"]
__all__ += ["BeginBlock", "Block", "BlockFunction", "Phase", "Stage", "removeBlocks"]
__all__ += ["ParallelPhasedExecution", "PipelinedExecution", "SerialPhasedExecution", "ShardedExecution"]
__all__ += ["CPU", "Attribute", "MultiConv", "NameScope", "cond", "for_loop", "identity_loss", "nop"]
__all__ += ["dynamic_slice", "dynamic_update", "ipu_print_tensor", "recomputationCheckpoint", "serializedMatMul"]
__all__ += ["set_available_memory", "set_overlap_for_input", "set_overlap_for_output", "setLogLevel"]
__all__ += ["ipuHardwareIsAvailable", "ipuHardwareVersion", "isRunningOnIpu"]
__all__ += ["ctc_beam_search_decoder", "custom_op", "fps", "nearest"]
__all__ += ["AnchorMode", "AutoStage", "CommGroupType", "ConnectionType", "DataLoaderMode", "HalfFloatCastingBehavior"]
__all__ += ["Liveness", "MatMulSerializationMode", "MeanReductionStrategy", "MultiConvPlanType", "OutputMode"]
__all__ += ["OverlapMode", "ReductionType", "SharingStrategy", "SyncPattern", "VariableRetrievalMode"]
__all__ += ["ConfigFileError", "Error", "RecoverableError", "SmallDataError", "UnrecoverableError"]
__all__.sort()

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
    "profiling": f"mark spans with torch.profiler.record_function(name), or {RECORDED}",
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
