"""Gradients as int8 with error feedback, by NumPy: the blocks that `strategies.exchange.transfer` describes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.exchange.transfer import BLOCK, MANTISSA_BITS, NOT_FINITE, Int8Layout

_MOST = 127  # the largest value of a block
_SHIFT = 6  # a block's largest value is at least 2^6 and below 2^7 in units of its scale
_FLIPPED = 254  # 2^-e has this exponent less that of 2^e


def encode(
    layout: Int8Layout, leaves: Sequence[np.ndarray], residuals: Sequence[np.ndarray], into: np.ndarray
) -> list[np.ndarray]:
    """Write one replica's payload, and return what it lost; rules and bits are those of `gradients.encoding`.

    Args:
        layout: where gradients lie in the payload.
        leaves: the gradients, in the layout's shapes.
        residuals: what was lost in the last step that was applied, float32 in the layout's shapes; not changed.
        into: int8 of shape `(payload_size,)`, all of which is written.
    """
    kept = []
    for leaf, residual, start in zip(leaves, residuals, layout.starts, strict=False):
        values, scales, lost = _quantise(leaf, residual)
        into[start * BLOCK : start * BLOCK + values.size] = values
        into[layout.result_size + start : layout.result_size + start + scales.size] = scales
        kept.append(lost)
    return kept


def _quantise(leaf: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks of a gradient: values int8[n * 64], scales int8[n]; and what they lost."""
    exact = leaf.astype(np.float32) + residual
    count = -(-exact.size // BLOCK)
    blocks = np.zeros((count, BLOCK), np.float32)
    blocks.reshape(-1)[: exact.size] = exact.reshape(-1)
    with np.errstate(all="ignore"):
        largest = np.abs(blocks).max(axis=1)
        exponents = largest.view(np.int32) >> MANTISSA_BITS & NOT_FINITE
        is_finite = exponents < NOT_FINITE
        scales = np.where(is_finite, np.maximum(exponents - _SHIFT, 1), NOT_FINITE)
        units = _power_of_two(np.minimum(scales, _FLIPPED - 1))
        inverses = _power_of_two(np.maximum(_FLIPPED - scales, 1))
        values = np.clip(np.rint(blocks * inverses), -_MOST, _MOST)  # multiplied exactly, rounded half to even
        values = np.where(is_finite[:, None], values, np.float32(0))
        lost = blocks - values * units  # exact
    kept_blocks = np.zeros_like(blocks)
    kept_blocks.reshape(-1)[: exact.size] = residual.reshape(-1)
    lost = np.where(is_finite[:, None], lost, kept_blocks)
    new: np.ndarray = lost.reshape(-1)[: exact.size].reshape(exact.shape)
    return values.astype(np.int8).reshape(-1), scales.astype(np.uint8).view(np.int8), new


def _power_of_two(exponents: np.ndarray) -> np.ndarray:
    """The powers of two that have these exponents in float32, as a column."""
    powers: np.ndarray = (exponents.astype(np.int32) << MANTISSA_BITS).view(np.float32)[:, None]
    return powers
