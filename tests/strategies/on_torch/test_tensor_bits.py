"""Comparison of tensors of PyTorch with arrays of NumPy by bits."""

from __future__ import annotations

import pytest
import torch

import strategies
from strategies.torch.tensors import have_same_bits

ZERO = torch.zeros(3)
NAN = torch.full((3,), torch.nan)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (ZERO, torch.zeros(3), True),
        (ZERO, -torch.zeros(3), False),
        (NAN, NAN.clone(), True),
        (NAN, NAN.copysign(-torch.ones(3)), False),
        (ZERO, torch.zeros(2), False),
        (ZERO, torch.zeros(3, dtype=torch.int32), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T.contiguous(), True),
        (torch.tensor(0.0, dtype=torch.bfloat16), torch.tensor(-0.0, dtype=torch.bfloat16), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.tensor([1 + 0j]).conj().imag, torch.tensor([0.0]), False),
    ],
)
def test_bits_are_compared_and_not_numbers(one, other, expected):
    assert have_same_bits(one, other) is expected


def test_a_parameter_is_compared_with_its_copy():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert have_same_bits(parameter, parameter.detach().clone())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_fingerprint_of_tensors_is_that_of_their_bits(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")
    tensors = [torch.arange(6).to(dtype).reshape(2, 3), torch.tensor(-1).to(dtype)]
    arrays = [one.view(torch.int16).numpy() if dtype is torch.bfloat16 else one.numpy() for one in tensors]
    assert strategies.fingerprint([one.to(device) for one in tensors]) == strategies.fingerprint(arrays)
