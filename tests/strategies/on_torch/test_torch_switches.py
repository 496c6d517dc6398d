"""Boolean options of PyTorch's front ends: only True and False are accepted."""

from __future__ import annotations

import pytest
import torch

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch

OPTIONS = (
    "broadcastBuffers",
    "useIpuModel",
    "autoRoundNumIPUs",
    "showCompilationProgressBar",
    "enableStableNorm",
    "enableSyntheticData",
    "relaxOptimizerAttributesChecks",
    "logCycleCount",
)
OF_GROUPS = (
    ("Training", "setAutomaticLossScaling"),
    ("Training", "setConvolutionDithering"),
    ("Precision", "enableStochasticRounding"),
    ("Precision", "runningStatisticsAlwaysFloat"),
    ("Precision", "enableFloatingPointExceptions"),
    ("Jit", "traceModel"),
)
OF_LOCATIONS = ("useOnChipStorage", "useReplicatedTensorSharding", "useIOTilesToLoad", "useIOTilesToStore")
PLACES = [
    *((poptorch.Options, name) for name in OPTIONS),
    *((lambda group=group: getattr(poptorch.Options(), group), name) for group, name in OF_GROUPS),
    *((poptorch.TensorLocationSettings, name) for name in OF_LOCATIONS),
    (lambda: poptorch.SerialPhasedExecution(["B1"]), "useSeparateBackwardPhase"),
    (lambda: poptorch.ParallelPhasedExecution(["B1"]), "sendTensorsOffChipAfterFwd"),
]


@pytest.mark.parametrize(("make", "name"), PLACES, ids=[name for _, name in PLACES])
def test_options_of_poptorch_are_true_or_false(make, name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        getattr(make(), name)("no")
    getattr(make(), name)(False)


@pytest.mark.parametrize("name", ["shuffle", "drop_last", "persistent_workers", "auto_distributed_partitioning"])
def test_options_of_loaders_are_true_or_false(name):
    rows = torch.utils.data.TensorDataset(torch.ones(4))
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        poptorch.DataLoader(poptorch.Options(), rows, **{name: "no"})


def test_shuffle_of_samplers_is_true_or_false():
    with pytest.raises(TypeError, match="^shuffle is 'no'; it is True or False"):
        strategies.torch.DistributedSampler(range(4), strategies.IPUStrategy(1), 1, shuffle="no")


def test_the_mode_is_true_or_false():
    with pytest.raises(TypeError, match="^mode is 'no'; it is True or False"):
        poptorch.inferenceModel(torch.nn.Linear(1, 1)).train("no")


@pytest.mark.parametrize(
    ("kind", "name"), [("AdamW", "bias_correction"), ("LAMB", "bias_correction"), ("RMSprop", "use_tf_variant")]
)
def test_options_of_optimizers_are_true_or_false(kind, name):
    with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
        getattr(poptorch.optim, kind)([torch.nn.Parameter(torch.ones(1))], **{name: "no"})


def test_keep_precision_of_products_is_true_or_false():
    square, mode = torch.ones(1, 1), poptorch.MatMulSerializationMode.Disabled
    with pytest.raises(TypeError, match="^keep_precision is 'no'; it is True or False"):
        poptorch.serializedMatMul(square, square, mode, keep_precision="no")
