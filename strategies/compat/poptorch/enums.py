"""The words of PopTorch's options, with its names and numbers."""

from enum import Enum, IntEnum

OutputMode = IntEnum("OutputMode", ["Final", "EveryN", "All", "Sum", "Default"], start=0)
OutputMode.__doc__ = (
    "The outputs that a call returns: those of the last micro-batch, of every n-th, of all, or their sum."
)

AnchorMode = OutputMode
"""The name of `OutputMode` before PopTorch 2.3."""

ReductionType = IntEnum("ReductionType", ["Sum", "Mean", "NoReduction"], start=0)
ReductionType.__doc__ = "The reduction of gradients over micro-batches and replicas."

MeanReductionStrategy = IntEnum("MeanReductionStrategy", ["Running", "Post", "PostAndLoss"], start=0)
MeanReductionStrategy.__doc__ = "The accumulation of a mean: by a running mean, or by losses that are divided before."

DataLoaderMode = IntEnum("DataLoaderMode", ["Sync", "Async", "AsyncRebatched"], start=0)
DataLoaderMode.__doc__ = "Whether batches are made when they are asked for, or ahead in another thread."

SharingStrategy = IntEnum("SharingStrategy", ["SharedMemory", "FileSystem", "Fork", "ForkServer"], start=0)
SharingStrategy.__doc__ = "The way of a data set into the process that reads ahead; a thread does here."

HalfFloatCastingBehavior = IntEnum(
    "HalfFloatCastingBehavior", ["FloatDowncastToHalf", "HalfUpcastToFloat", "Default"], start=0
)
HalfFloatCastingBehavior.__doc__ = "The dtype of a result where float16 meets float32; PyTorch makes float32 of it."

MatMulSerializationMode = Enum(
    "MatMulSerializationMode",
    {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
)
MatMulSerializationMode.__doc__ = "The axis along which a product of matrices is cut; here it is computed at once."

AutoStage = IntEnum("AutoStage", ["SameAsIpu", "AutoIncrement"], start=0)
AutoStage.__doc__ = "The stages that blocks make: one for each device, or a new one at each block."

Liveness = IntEnum(
    "Liveness", ["AlwaysLive", "OffChipAfterFwd", "OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"], start=0
)
Liveness.__doc__ = "The time that tensors of phases spend in the memory of a device; all are in that of the host here."

OverlapMode = IntEnum("OverlapMode", ["NoOverlap", "OverlapAccumulationLoop", "OverlapDeviceIterationLoop"], start=0)
OverlapMode.__doc__ = "The time at which tensors are copied to a device and back; they are not copied here."

ConnectionType = IntEnum("ConnectionType", ["Always", "OnDemand", "Never"], start=0)
ConnectionType.__doc__ = "The time at which a device is attached; there is none to attach here."

SyncPattern = IntEnum("SyncPattern", ["Full", "SinglePipeline", "ReplicaAndLadder"], start=0)
SyncPattern.__doc__ = "The way in which devices wait for each other; bits do not depend on it."

CommGroupType = IntEnum("CommGroupType", ["All", "Consecutive", "Orthogonal", "NoGrouping"], start=0)
CommGroupType.__doc__ = (
    "The replicas that have a parameter in common: all, those beside each other, those dealt out in turn, or none."
)

VariableRetrievalMode = IntEnum("VariableRetrievalMode", ["OnePerGroup", "AllReduceReplicas", "AllReplicas"], start=0)
VariableRetrievalMode.__doc__ = (
    "The value that the module gets of a parameter that differs between groups of replicas; only OnePerGroup is there."
)

MultiConvPlanType = IntEnum("MultiConvPlanType", ["Parallel", "Serial"], start=0)
MultiConvPlanType.__doc__ = "The plan of several convolutions; they run one after another here."
