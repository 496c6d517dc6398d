"""The words of PopTorch's options, with its names and numbers."""

from __future__ import annotations

from enum import Enum, IntEnum


class OutputMode(IntEnum):
    """Which outputs a call returns: those of the last micro-batch, of every n-th, of all, or their sum."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode
"""The name of `OutputMode` before PopTorch 2.3."""


class ReductionType(IntEnum):
    """How gradients are reduced over micro-batches and replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """How a mean is accumulated: by a running mean, or by losses that are divided before."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(IntEnum):
    """Whether batches are made when they are asked for, or ahead in another thread."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """How a data set gets into the process that reads ahead; a thread does here."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class HalfFloatCastingBehavior(IntEnum):
    """What becomes of float16 that meets float32; PyTorch makes float32 of it."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class MatMulSerializationMode(Enum):
    """Along which axis a product of matrices is computed piece by piece; all of it is computed at once here."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class AutoStage(IntEnum):
    """How stages are made of blocks: one for each device, or a new one at each block."""

    SameAsIpu = 0
    AutoIncrement = 1


class Liveness(IntEnum):
    """When tensors of phases are in the memory of a device; all are in that of the host here."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class OverlapMode(IntEnum):
    """When tensors are copied to a device and back; they are not copied here."""

    NoOverlap = 0
    OverlapAccumulationLoop = 1
    OverlapDeviceIterationLoop = 2


class ConnectionType(IntEnum):
    """When a device is attached; there is none to attach here."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(IntEnum):
    """How devices wait for each other; bits do not depend on it."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class CommGroupType(IntEnum):
    """Which replicas have a parameter in common: all, those beside each other, those dealt out in turn, or none."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """What the module gets of a parameter that groups of replicas have of their own; the first alone is there."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


class MultiConvPlanType(IntEnum):
    """How convolutions are planned together; they run one after another here."""

    Parallel = 0
    Serial = 1
