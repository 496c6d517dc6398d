"""PyTorch's sums and means of gradients have the bits of NumPy's on every available device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.arrays import bfloat16
from collectives.reduction import Reduction
from collectives.tree import TreeNode, subtrees
from strategies.torch.tensors import TorchArithmetic, as_array, as_tensor, divide

DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), bfloat16]
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
SIZE = 5003


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")
    return request.param


def contribution(replica: int, dtype: np.dtype, size: int = SIZE) -> np.ndarray:
    """Return denormal numbers, random bits and infinities; a NaN only appears where infinities are added."""
    rng = np.random.default_rng(replica)
    found = rng.standard_normal(size).astype(np.float32)
    found[: size // 4] *= np.float32(1e-40)
    found[size // 4 : size // 2] = rng.integers(0, 2**32, len(found[size // 4 : size // 2]), np.uint32).view(np.float32)
    found[~np.isfinite(found)] = np.inf if replica % 2 else -np.inf
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def leaves(replicas: int) -> list[TreeNode]:
    return [TreeNode(replica, replica + 1) for replica in range(replicas)]


def assert_same_bits(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Assert equal bits; for a NaN only its place counts, since its bits depend on the processor."""
    array = as_array(found.cpu())
    assert array.dtype == wanted.dtype
    are_nan = np.isnan(wanted.astype(np.float32, copy=False)) if wanted.itemsize < 8 else np.isnan(wanted)
    bits = BITS[wanted.itemsize]
    np.testing.assert_array_equal(array.view(bits)[~are_nan], wanted.view(bits)[~are_nan])
    assert np.isnan(as_tensor(array).double().numpy()[are_nan]).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_on_a_device_has_the_bits_of_the_host(device: str, dtype: np.dtype, replicas: int) -> None:
    own = [contribution(replica, dtype) for replica in range(replicas)]
    wanted = np.empty(SIZE, dtype)
    Reduction("mean", dtype).reduce(own, wanted, replicas)
    given = [as_tensor(array.copy()).to(device) for array in own]
    assert_same_bits(TorchArithmetic().mean(leaves(replicas), given, dtype, replicas), wanted)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("divisor", [1.0, 3.0, 2.0**10, 2.0**-3, 2.0**127, 1e-30, 14.2, 2.0**24 - 1, 0.0])
def test_a_quotient_on_a_device_has_the_bits_of_the_host(device: str, divisor: float) -> None:
    own = [contribution(replica, dtype) for replica, dtype in enumerate(DTYPES[:2])]
    given = [as_tensor(array.copy()).to(device) for array in own]
    divide(given, divisor)
    for found, array in zip(given, own, strict=True):
        with np.errstate(all="ignore"):
            assert_same_bits(found, array / array.dtype.type(divisor))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_blocks_are_added_to_the_same_mean(device: str, dtype: np.dtype) -> None:
    """Blocks that are not aligned have several nodes; a node of one replica travels in its narrow dtype."""
    arithmetic, replicas = TorchArithmetic(), 7
    own = [as_tensor(contribution(replica, dtype)).to(device) for replica in range(replicas)]
    wanted = arithmetic.mean(leaves(replicas), [one.clone() for one in own], dtype, replicas)
    nodes = [node for block in ((0, 3), (3, 5), (5, 7)) for node in subtrees(*block, replicas)]
    sums = []
    for first, stop in nodes:
        parts = [one.clone() for one in own[first:stop]]
        inside = [TreeNode(replica, replica + 1) for replica in range(first, stop)]
        sums.append(parts[0] if len(parts) == 1 else arithmetic.total(inside, parts))
    assert len(nodes) > 3
    assert_same_bits(arithmetic.mean(nodes, sums, dtype, replicas), as_array(wanted.cpu()))


def test_a_sum_of_one_narrow_contribution_is_widened() -> None:
    found = TorchArithmetic().total(leaves(1), [torch.ones(3, dtype=torch.bfloat16)])
    assert found.dtype is torch.float32


@pytest.mark.parametrize("replicas", [1, 3])
def test_empty_buffers_have_empty_means(replicas: int) -> None:
    given = [torch.empty(0) for _ in range(replicas)]
    assert TorchArithmetic().mean(leaves(replicas), given, np.dtype(np.float32), replicas).shape == (0,)
