"""The words of PopTorch's options, with its names and numbers."""

from enum import Enum, IntEnum

OutputMode = IntEnum("OutputMode", ["Final", "EveryN", "All", "Sum", "Default"], start=0)
"""Which outputs a call returns: those of the last micro-batch, of every n-th, of all, or their sum."""

AnchorMode = OutputMode
"""The name of `OutputMode` before PopTorch 2.3."""

ReductionType = IntEnum("ReductionType", ["Sum", "Mean", "NoReduction"], start=0)
"""How gradients are reduced over micro-batches and replicas."""

MeanReductionStrategy = IntEnum("MeanReductionStrategy", ["Running", "Post", "PostAndLoss"], start=0)
"""How a mean is accumulated: by a running mean, or by losses that are divided before."""

DataLoaderMode = IntEnum("DataLoaderMode", ["Sync", "Async", "AsyncRebatched"], start=0)
"""Whether batches are made when they are asked for, or ahead in another thread."""

SharingStrategy = IntEnum("SharingStrategy", ["SharedMemory", "FileSystem", "Fork", "ForkServer"], start=0)
"""How a data set gets into the process that reads ahead; a thread does here."""

HalfFloatCastingBehavior = IntEnum(
    "HalfFloatCastingBehavior", ["FloatDowncastToHalf", "HalfUpcastToFloat", "Default"], start=0
)
"""What becomes of float16 that meets float32; PyTorch makes float32 of it."""

MatMulSerializationMode = Enum(
    "MatMulSerializationMode",
    {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
)
"""Along which axis a product of matrices is computed piece by piece; all of it is computed at once here."""

AutoStage = IntEnum("AutoStage", ["SameAsIpu", "AutoIncrement"], start=0)
"""How stages are made of blocks: one for each device, or a new one at each block."""

Liveness = IntEnum(
    "Liveness", ["AlwaysLive", "OffChipAfterFwd", "OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"], start=0
)
"""When tensors of phases are in the memory of a device; all are in that of the host here."""

OverlapMode = IntEnum("OverlapMode", ["NoOverlap", "OverlapAccumulationLoop", "OverlapDeviceIterationLoop"], start=0)
"""When tensors are copied to a device and back; they are not copied here."""

ConnectionType = IntEnum("ConnectionType", ["Always", "OnDemand", "Never"], start=0)
"""When a device is attached; there is none to attach here."""

SyncPattern = IntEnum("SyncPattern", ["Full", "SinglePipeline", "ReplicaAndLadder"], start=0)
"""How devices wait for each other; bits do not depend on it."""

CommGroupType = IntEnum("CommGroupType", ["All", "Consecutive", "Orthogonal", "NoGrouping"], start=0)
"""Which replicas have a parameter in common: all, those beside each other, those dealt out in turn, or none."""

VariableRetrievalMode = IntEnum("VariableRetrievalMode", ["OnePerGroup", "AllReduceReplicas", "AllReplicas"], start=0)
"""What the module gets of a parameter that groups of replicas have of their own; the first alone is there."""

MultiConvPlanType = IntEnum("MultiConvPlanType", ["Parallel", "Serial"], start=0)
"""How convolutions are planned together; they run one after another here."""
