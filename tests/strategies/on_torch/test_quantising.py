"""Encoding of gradients as int8: NumPy, XLA and PyTorch give the same bytes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from strategies.exchange.int8 import NUMPY, ArrayLibrary, Int8Layout, encode
from strategies.jax.gradients.leaving import XLA

SHAPES = ((200,), (3, 70), (1,), (), (64,), (0, 4), (5, 64), (63,))
LAYOUT = Int8Layout(SHAPES)


def written(into, values, start):
    into[start : start + len(values)] = values
    return into


TORCH = ArrayLibrary(torch, torch.nn.functional.pad, written, tuple)


def of_numpy(leaves, residuals):
    return encode(LAYOUT, leaves, residuals, np.empty(LAYOUT.payload_size, np.int8), NUMPY)


def of_torch(leaves, residuals):
    leaves, residuals = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), (leaves, residuals))
    return encode(LAYOUT, leaves, residuals, torch.empty(LAYOUT.payload_size, dtype=torch.int8), TORCH)


@functools.partial(jax.jit, static_argnums=2)
def compiled(leaves, residuals, layout):
    return encode(layout, leaves, residuals, jnp.zeros(layout.payload_size, jnp.int8), XLA)


def of_xla(leaves, residuals):
    return compiled(leaves, residuals, LAYOUT)


def leaves_of(rng):
    return [np.float32(rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 30)) for shape in SHAPES]


@pytest.fixture
def given(seed):
    """Return gradients with numbers of every kind but subnormal ones, and smaller residuals."""
    rng = np.random.default_rng(seed)
    leaves = leaves_of(rng)
    leaves[0][[7, 70, 130]] = np.inf, -np.inf, np.nan
    leaves[0][190:] = 0
    leaves[1][2, 69] = -np.nan
    leaves[2][0] = -0.0
    leaves[4][...] = 0
    leaves[6][:, 3] = np.finfo(np.float32).max, np.finfo(np.float32).tiny, -1, 127.5, 126.5
    return leaves, [np.float32(0.01) * leaf for leaf in leaves_of(rng)]


@pytest.mark.parametrize("other", [of_xla, of_torch])
def test_numbers_of_every_kind_have_the_same_bytes_in_every_library(given, other, bits):
    payload, lost = of_numpy(*given)
    same_payload, same_lost = other(*given)
    assert bits(np.asarray(same_payload)) == bits(payload)
    assert [bits(np.asarray(leaf)) for leaf in same_lost] == [bits(leaf) for leaf in lost]


@pytest.fixture
def subnormal(seed):
    """Return gradients with subnormal numbers, in blocks of their own and beside larger numbers."""
    leaves = leaves_of(np.random.default_rng(seed))
    tiny = np.finfo(np.float32).tiny
    leaves[0][:64] = np.linspace(-tiny, tiny, 64, dtype=np.float32)
    leaves[1][0, ::2] = tiny / 3
    return leaves, LAYOUT.residuals_of_each(LAYOUT.new_residuals(1), 1)[0]


def test_subnormal_numbers_have_the_same_bytes_in_numpy_and_pytorch(subnormal, bits):
    payload, lost = of_numpy(*subnormal)
    assert payload[:64].any()
    same_payload, same_lost = of_torch(*subnormal)
    assert bits(same_payload.numpy()) == bits(payload)
    assert [bits(leaf.numpy()) for leaf in same_lost] == [bits(leaf) for leaf in lost]


def test_subnormal_numbers_are_zeros_for_xla(subnormal):
    leaves, residuals = subnormal
    zeros = [np.where(np.abs(leaf) < np.finfo(np.float32).tiny, np.float32(0), leaf) for leaf in leaves]
    payload, lost = of_xla(leaves, residuals)
    expected_payload, expected_lost = of_numpy(zeros, residuals)
    np.testing.assert_array_equal(payload, expected_payload)
    for leaf, expected in zip(lost, expected_lost, strict=True):
        np.testing.assert_array_equal(leaf, expected)
