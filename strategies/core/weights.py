"""Weighted means: the checks of weights, and the division by the mean weight.

Replica i contributes `w_i * g_i` for its gradients, `w_i * m_i` for its metrics and `w_i` itself. The exchange makes
the means of all three in the order of the tree, and the quotient of two means is `sum(w_i g_i) / sum(w_i)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from strategies.argument_checks import wrong_type
from strategies.errors import WeightError, ZeroWeightError
from strategies.typing import Number

ERROR, SKIP = "error", "skip"
"""The values of the option `zero_weight`."""


def checked_zero_weight(option: object) -> str:
    """Return the option `zero_weight`.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is neither "error" nor "skip".
    """
    if not isinstance(option, str):
        raise wrong_type("zero_weight", option, "use 'error' or 'skip'")
    if option not in (ERROR, SKIP):
        raise ValueError(f"zero_weight is {option!r}; use 'error' or 'skip'")
    return option


def travelling(weight: float) -> np.float32:
    """Return the weight as it travels: NaN for a negative weight, so that no sum of weights hides it."""
    with np.errstate(over="ignore"):
        number = np.float32(weight)
    return number if number >= 0 and np.isfinite(number) else np.float32(np.nan)


def is_weighted(
    weight: float,
    step: int,
    zero_weight: str,
    of_replicas: Callable[[], Sequence[float]] | None = None,
    needs_finite: bool = False,
    least: float = 0.0,
) -> bool:
    """Return whether a step may be applied; False if all weights are zero, and the step is to be skipped.

    The arguments are the same on all instances, so all of them raise, or none does.

    Args:
        weight: Mean weight of all replicas and micro-batches, after `travelling`.
        step: Number of steps so far.
        zero_weight: Option `zero_weight`.
        of_replicas: Returns the weights of all replicas, for the message. May be collective.
        needs_finite: Whether the weight of a loss is also NaN if it was 0 and the loss is not finite.
        least: The least mean weight with which the engine computes right products.

    Raises:
        WeightError: If a weight is negative or not finite, or the mean is too large or too small.
        ZeroWeightError: If all weights are zero, and `zero_weight` is "error".
    """
    if math.isinf(weight):
        largest = [] if of_replicas is None else of_replicas()
        where = f", the largest is {max(largest):.3g} on replica {np.argmax(largest)}" if largest else ""
        raise WeightError(
            f"the sum of the weights of losses overflows float32 at step {step}{where}; the step was not applied: "
            "divide all weights by one number"
        )
    if math.isnan(weight):
        bad = None if of_replicas is None else [n for n, one in enumerate(of_replicas()) if not math.isfinite(one)]
        where = "" if bad is None else f" on the replicas {bad}"
        also, divide = "", ""
        if needs_finite:
            also = ", or it is 0 and the loss is not finite, as a mean over no tokens is,"
            divide = ", and in a pipeline or with collectives divide a sum by jnp.maximum(tokens, 1)"
        raise WeightError(
            f"the weight of a loss is negative or not finite{also} at step {step}{where}; the step was not applied: "
            f"return a weight that is finite and at least 0, such as the number of tokens{divide}"
        )
    if weight and weight < least:
        raise WeightError(
            f"the mean weight of the losses is below {least:.3g} at step {step}, and XLA takes products below 2**-126 "
            "for 0; the step was not applied: multiply all weights by one number"
        )
    if weight == 0 and zero_weight == ERROR:
        raise ZeroWeightError(
            f"all replicas and micro-batches have weight 0 at step {step}, so there is no mean; the step was not "
            "applied: leave such batches out, or use zero_weight='skip'"
        )
    return weight != 0


def check_weights_of_rows(sums: Iterable[Number]) -> None:
    """Check the weights of an evaluation's rows.

    Args:
        sums: Sums of the weights of all rows, after `travelling`.

    Raises:
        WeightError: If a weight is negative or not finite.
    """
    if not all(math.isfinite(each) for each in sums):
        raise WeightError(
            "the weight of a row is negative or not finite in an evaluation; return a weight that is finite and at "
            "least 0, such as the number of tokens"
        )


def weighted_means(means: np.ndarray, weight: float) -> np.ndarray:
    """Return weighted means, float32; NaN if the weight is 0.

    Args:
        means: Means of values that were multiplied by their weights, float32.
        weight: Mean weight.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        found: np.ndarray = np.divide(means, np.float32(weight), dtype=np.float32)
    return found
