"""How gradients leave the programs that compute them: flat, one buffer per dtype, or as int8 with error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from strategies.exchange.flat import FLOAT32, FlatLayout
from strategies.exchange.transfer import BLOCK, MANTISSA_BITS, NOT_FINITE, Int8Layout

_MOST = 127  # the largest value of a block
_SHIFT = 6  # a block's largest value is at least 2^6 and below 2^7 in units of its scale
_FLIPPED = 254  # 2^-e has this exponent less that of 2^e


def flatten(
    layout: FlatLayout, leaves: Sequence[jax.Array], tail: jax.Array | None, into: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Write leaves and tail, if any, into buffers, in the order of `layout.buffers`, whose gaps are zero; traceable."""
    written = {buffer.name: array for buffer, array in zip(layout.buffers, into, strict=True)}
    # Written one by one: XLA's CPU backend turns a concatenation into an element-wise loop that pulls whatever
    # produced the parts into it (measured: 50 times slower than the gradients themselves).
    for leaf, (name, start) in zip(jax.lax.optimization_barrier(leaves), layout.places, strict=True):
        flat = leaf.reshape(-1)
        is_alone = flat.size == written[name].size and name != FLOAT32.name
        written[name] = flat if is_alone else jax.lax.dynamic_update_slice(written[name], flat, (start,))
    if tail is not None:
        position = written[FLOAT32.name].size - layout.tail
        written[FLOAT32.name] = jax.lax.dynamic_update_slice(written[FLOAT32.name], tail, (position,))
    return tuple(written.values())


def encode(
    layout: Int8Layout, leaves: Sequence[jax.Array], residuals: Sequence[jax.Array], into: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """One replica's payload, and what it lost; traceable.

    Blocks that are not finite keep the residual that they had. If the step is not applied, keep the old residuals
    of all of them (and where the gradients are multiplied by a loss scale, divide before they are encoded).

    Args:
        layout: where gradients lie in the payload.
        leaves: the gradients, of any floating-point dtypes, in the layout's shapes.
        residuals: what `encode` returned for this replica in its last step that was applied: float32, in the
            layout's shapes; zeros before.
        into: int8 of shape `(payload_size,)`, whose memory the payload may take (donated or not); its values do
            not matter.

    Returns:
        The payload, and the new residuals.
    """
    kept = []
    # As in `flatten`: gradients are computed before, and written one by one.
    for leaf, residual, start in zip(jax.lax.optimization_barrier(leaves), residuals, layout.starts, strict=False):
        values, scales, lost = _quantise(leaf, residual)
        into = jax.lax.dynamic_update_slice(into, values, (start * BLOCK,))
        into = jax.lax.dynamic_update_slice(into, scales, (layout.result_size + start,))
        kept.append(lost)
    return into, tuple(kept)


def _quantise(leaf: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The blocks of a gradient: values int8[n * 64], scales int8[n]; and what they lost, float32 like the gradient."""
    exact = leaf.astype(FLOAT32) + residual
    blocks = _in_blocks(exact)
    largest = jnp.max(jnp.abs(blocks), axis=1)  # NaN if one of them is; of floats, because integers take XLA far longer
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> MANTISSA_BITS & NOT_FINITE
    is_finite = exponents < NOT_FINITE
    scales = jnp.where(is_finite, jnp.maximum(exponents - _SHIFT, 1), NOT_FINITE)
    scales, is_finite = jax.lax.optimization_barrier((scales, is_finite))  # fused, each value would compute its own
    units = _power_of_two(jnp.minimum(scales, _FLIPPED - 1))
    inverses = _power_of_two(jnp.maximum(_FLIPPED - scales, 1))
    values = jnp.clip(jnp.round(blocks * inverses), -_MOST, _MOST)  # multiplied exactly, rounded half to even
    values = jnp.where(is_finite[:, None], values, 0)
    lost = (blocks - values * units).reshape(-1)[: exact.size].reshape(exact.shape)  # exact
    stays = jnp.broadcast_to(~is_finite[:, None], blocks.shape).reshape(-1)[: exact.size].reshape(exact.shape)
    return (
        values.astype(jnp.int8).reshape(-1),
        jax.lax.bitcast_convert_type(scales.astype(jnp.uint8), jnp.int8),
        jnp.where(stays, residual, lost),
    )


def _in_blocks(values: jax.Array) -> jax.Array:
    count = -(-values.size // BLOCK)
    return jnp.pad(values.reshape(-1), (0, count * BLOCK - values.size)).reshape(count, BLOCK)


def _power_of_two(exponents: jax.Array) -> jax.Array:
    """The powers of two that have these exponents in float32, as a column; their bits, because exp2 may round."""
    return jax.lax.bitcast_convert_type(exponents << MANTISSA_BITS, FLOAT32)[:, None]
