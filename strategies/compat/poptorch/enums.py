"""The values of PopTorch's options, with its names and numbers."""

from enum import Enum, IntEnum

OutputMode = IntEnum("OutputMode", ["Final", "EveryN", "All", "Sum", "Default"], start=0)
OutputMode.__doc__ = "The outputs that a call returns: of the last micro-batch, of every n-th, of all, or their sum."

AnchorMode = OutputMode
"""The name of `OutputMode` before PopTorch 2.3."""

ReductionType = IntEnum("ReductionType", ["Sum", "Mean", "NoReduction"], start=0)
ReductionType.__doc__ = "The reduction of gradients over micro-batches and replicas."

MeanReductionStrategy = IntEnum("MeanReductionStrategy", ["Running", "Post", "PostAndLoss"], start=0)
MeanReductionStrategy.__doc__ = "The computation of a mean: a running mean, or a sum of losses divided beforehand."

DataLoaderMode = IntEnum("DataLoaderMode", ["Sync", "Async", "AsyncRebatched"], start=0)
DataLoaderMode.__doc__ = "The time when batches are made: when they are asked for, or ahead in another thread."

SharingStrategy = IntEnum("SharingStrategy", ["SharedMemory", "FileSystem", "Fork", "ForkServer"], start=0)
SharingStrategy.__doc__ = "The transfer of a data set to the process that reads ahead; no effect, a thread reads here."

HalfFloatCastingBehavior = IntEnum(
    "HalfFloatCastingBehavior", ["FloatDowncastToHalf", "HalfUpcastToFloat", "Default"], start=0
)
HalfFloatCastingBehavior.__doc__ = "The dtype of a result of float16 and float32; with PyTorch it is float32."

MatMulSerializationMode = Enum(
    "MatMulSerializationMode",
    {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
)
MatMulSerializationMode.__doc__ = "The axis along which to split a matrix product; no effect, it is computed at once."

AutoStage = IntEnum("AutoStage", ["SameAsIpu", "AutoIncrement"], start=0)
AutoStage.__doc__ = "The rule by which blocks make stages: one for each device, or a new one at each block."

Liveness = IntEnum(
    "Liveness", ["AlwaysLive", "OffChipAfterFwd", "OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"], start=0
)
Liveness.__doc__ = "The time that tensors of phases stay in device memory; no effect, all are in host memory."

OverlapMode = IntEnum("OverlapMode", ["NoOverlap", "OverlapAccumulationLoop", "OverlapDeviceIterationLoop"], start=0)
OverlapMode.__doc__ = "The time when tensors are copied to and from a device; no effect, they are not copied."

ConnectionType = IntEnum("ConnectionType", ["Always", "OnDemand", "Never"], start=0)
ConnectionType.__doc__ = "The time when a device is attached; no effect, there is none to attach."

SyncPattern = IntEnum("SyncPattern", ["Full", "SinglePipeline", "ReplicaAndLadder"], start=0)
SyncPattern.__doc__ = "The way in which devices wait for each other; it has no effect on bits."

CommGroupType = IntEnum("CommGroupType", ["All", "Consecutive", "Orthogonal", "NoGrouping"], start=0)
CommGroupType.__doc__ = "The replicas that share a parameter: all, consecutive ones, ones at equal distances, or none."

VariableRetrievalMode = IntEnum("VariableRetrievalMode", ["OnePerGroup", "AllReduceReplicas", "AllReplicas"], start=0)
VariableRetrievalMode.__doc__ = (
    "The value that the module gets for a parameter that differs between groups of replicas; only OnePerGroup works."
)

MultiConvPlanType = IntEnum("MultiConvPlanType", ["Parallel", "Serial"], start=0)
MultiConvPlanType.__doc__ = "The plan of several convolutions; no effect, they run one after another."
