"""The options of a training step that all engines have, and weighted means.

Replica i contributes `w_i * g_i` for its gradients, `w_i * m_i` for its metrics and `w_i` itself. The exchange makes
the means of all three in the order of the tree, and the quotient of two means is `sum(w_i g_i) / sum(w_i)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from typing import Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import at_least, positive, wrong_type
from strategies.defaults import Defaults
from strategies.errors import WeightError, ZeroWeightError
from strategies.exchange.flat import GradientTransfer
from strategies.loss_scaling import LossScaling
from strategies.typing import MapGradient, Number

# ---- weights

ERROR, SKIP = "error", "skip"
"""The values of the option `zero_weight`."""


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


class DtypeOfFramework(Protocol):
    """A dtype of NumPy or PyTorch."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""


Dtype: TypeAlias = str | type | DtypeOfFramework
"""A dtype of NumPy, JAX or PyTorch, or its name."""


class GradientAccumulationReductionMethod(Enum):
    """The reduction of the gradients of a replica's micro-batches to one gradient; the original's enum.

    Micro-batch n of N, from 0, changes the accumulator `acc` by its gradient `g`. SUM adds `g`, and MEAN adds
    `g * (1 / N)`. RUNNING_MEAN sets `acc * n / (n + 1) + g / (n + 1)`. The last two are equal up to rounding, and
    neither leaves the range of float16. With 16-bit accumulators each step is computed in float32, clipped to the
    largest number, and rounded.
    """

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, method: object) -> GradientAccumulationReductionMethod:
        """Return the method of that name, in upper or lower case, or the method itself.

        Raises:
            ValueError: "Cannot parse ..." for anything else.
        """
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        raise ValueError(
            f"Cannot parse {method!r} as one of GradientAccumulationReductionMethod.; use "
            f"{', '.join(repr(name) for name in cls.__members__)}"
        )


class CommonOptionsByName(TypedDict, total=False):
    """The options that the `Trainer` of every engine takes by name; see `CommonOptions`."""

    gradient_accumulation_count: int
    reduction_method: GradientAccumulationReductionMethod | str
    map_gradient: MapGradient | None
    replicated_optimizer_state_sharding: bool | None
    min_elements_for_sharding: int
    compute_dtype: Dtype | None
    loss_scaling: LossScaling | float | str | None
    gradient_transfer_dtype: Dtype | None
    zero_weight: str


@dataclass(frozen=True)
class CommonOptions(ABC):
    """The options of a training step that all engines have.

    With PyTorch, the variables are the parameters of a module.

    Attributes:
        seed: Seed of the keys; with PyTorch, of all random numbers that modules draw.
        check_numerics: Whether to raise `NonFiniteGradientError` for the first mean gradient that is NaN or infinite,
            or for such a mean loss.
        digest_every: Number of steps between comparisons of the state's bits between instances; 0 for none. A
            difference raises `DivergenceError`. Under `poprun --on-failure shrink` the majority's state replaces a
            differing one instead. Parts that only one instance has (sharded optimizer state) are not
            compared.
        gradient_accumulation_count: Micro-batches of each replica for one update. A replica's rows of the batch are
            its micro-batches one after another (`distribute_dataset(gradient_accumulation_count=...)`). Instances
            exchange gradients once per update.
        reduction_method: Reduction over micro-batches: SUM, MEAN or RUNNING_MEAN; see
            `GradientAccumulationReductionMethod`. Over replicas gradients are always averaged. With PyTorch, MEAN
            divides each loss by the count before its backward pass.
        map_gradient: Function `(gradient, variable) -> gradient` for each trained variable, or None. It is called for
            each micro-batch on each replica, before gradients are divided or added, and without the loss scale. With
            JAX it is traced; in a pipeline it excludes `loss_scaling` and variables that several stages use. With
            PyTorch it runs in the replicas' threads, after the hooks of the parameter.
        replicated_optimizer_state_sharding: Whether every replica keeps and updates 1/R of the optimizer state, as in
            ZeRO (Rajbhandari et al., 2020), and the new variables are gathered; the bits are the same. With PyTorch it
            needs an optimizer that computes element by element; with JAX the state of other optimizers is gathered for
            each update. None: False, or with JAX the value of `offload_optimizer_state`.
        min_elements_for_sharding: Variables with fewer elements keep their state whole.
        compute_dtype: bfloat16 or float16. With JAX, variables and batches are cast to it for `loss_fn`. With PyTorch,
            forward passes run under `torch.autocast` of it. Gradients, updates and the variables themselves keep their
            dtype.
        loss_scaling: None, "dynamic", a number for a constant scale, or a `LossScaling`. If a gradient is not finite on
            any replica, the step changes only the scale, on all replicas. Metrics then have "loss_scale" and
            "skipped_steps".
        gradient_transfer_dtype: Dtype in which gradients travel. float16 and bfloat16 have half the bytes of float32;
            they are added in float32, in the order of the tree.
        zero_weight: The end of a step whose losses all have the weight 0. "error": it raises `ZeroWeightError`. "skip":
            it changes no variable, and its metrics are NaN; with loss scaling "skipped_steps" counts it, and the scale
            stays.

    Raises:
        TypeError: If a switch is neither True nor False, or `map_gradient` is not a function.
        ValueError: If an option is out of range, or two options exclude each other.
    """

    seed: int = 0
    check_numerics: bool = False
    digest_every: int = 0
    gradient_accumulation_count: int = 1
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.MEAN
    map_gradient: MapGradient | None = None
    replicated_optimizer_state_sharding: bool | None = False
    min_elements_for_sharding: int = 32
    compute_dtype: Dtype | None = None
    loss_scaling: LossScaling | float | str | None = None
    gradient_transfer_dtype: Dtype | None = None
    zero_weight: str = ERROR

    def __post_init__(self) -> None:
        require_switches(check_numerics=self.check_numerics)
        require_switches_or_none(replicated_optimizer_state_sharding=self.replicated_optimizer_state_sharding)
        at_least(0, "digest_every", self.digest_every)
        positive("gradient_accumulation_count", self.gradient_accumulation_count)
        positive("min_elements_for_sharding", self.min_elements_for_sharding)
        if self.map_gradient is not None and not callable(self.map_gradient):
            raise TypeError(
                f"map_gradient is {self.map_gradient!r}, a {type(self.map_gradient).__name__}; use a function "
                "(gradient, variable) -> gradient, or None"
            )
        if not isinstance(self.zero_weight, str):
            raise wrong_type("zero_weight", self.zero_weight, "use 'error' or 'skip'")
        if self.zero_weight not in (ERROR, SKIP):
            raise ValueError(f"zero_weight is {self.zero_weight!r}; use 'error' or 'skip'")
        _ = self.method, self.scaling, self.transfer  # each raises if its option is out of range
        if self.check_numerics and self.scaling is not None:
            raise ValueError("check_numerics raises for the gradients that loss_scaling expects; use one of them")

    @cached_property
    def method(self) -> GradientAccumulationReductionMethod:
        """The reduction of micro-batches to one gradient."""
        return GradientAccumulationReductionMethod.parse(self.reduction_method)

    @cached_property
    def scaling(self) -> LossScaling | None:
        """The rule of loss scaling; None without scaling."""
        return LossScaling.parse(self.loss_scaling)

    @cached_property
    def transfer(self) -> GradientTransfer:
        """The dtype in which gradients travel."""
        return GradientTransfer.parse(name_of_dtype(self.gradient_transfer_dtype))

    @property
    def shards_state(self) -> bool:
        """Whether every replica keeps a part of the optimizer state."""
        return bool(self.replicated_optimizer_state_sharding)

    @property
    def unrecoverable_part(self) -> str | None:
        """Name of the part of the state that differs between instances; None if all are the same."""
        return "sharded optimizer state" if self.shards_state else None

    @property
    def terms(self) -> Mapping[str, object]:
        """The options as values to compare; all instances must have the same."""
        common = {field.name: getattr(self, field.name) for field in fields(CommonOptions)}
        del common["map_gradient"]  # its program is compared
        return {
            **common,
            "reduction_method": self.method.name,
            "replicated_optimizer_state_sharding": self.shards_state,
            "compute_dtype": name_of_dtype(self.compute_dtype),
            "loss_scaling": self.scaling,
            "gradient_transfer_dtype": self.transfer.dtype,
            **self.own_terms,
        }

    @property
    @abstractmethod
    def own_terms(self) -> Mapping[str, object]:
        """The options of this engine alone as values to compare; all instances must have the same."""


Options = TypeVar("Options", bound=CommonOptions)


def completed(kind: Callable[..., Options], defaults: Defaults, options: Mapping[str, object]) -> Options:
    """Return options, with the defaults of the strategy for options that are left out.

    Args:
        kind: Class of the options.
        defaults: Default options of the strategy.
        options: Given options by name. A `check_numerics` of None counts as left out; it then stays off if losses are
            scaled, because scaled gradients are expected to overflow.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is out of range, or two options exclude each other.
    """
    given = {"min_elements_for_sharding": defaults.min_elements_for_sharding, **options}
    checks = given.pop("check_numerics", None)
    found = kind(check_numerics=False if checks is None else checks, **given)
    is_left_out = checks is None and found.scaling is None
    return replace(found, check_numerics=True) if is_left_out and defaults.checks_numerics else found


def name_of_dtype(dtype: Dtype | None) -> str | None:
    """Return the name of a dtype of NumPy, JAX or PyTorch, such as "bfloat16"; anything else as text; None for None.

    Args:
        dtype: Dtype from a user.
    """
    if dtype is None:
        return None
    text = str(dtype)
    is_text = isinstance(dtype, str) or text.startswith("torch.")
    try:
        return np.dtype(text.removeprefix("torch.") if is_text else dtype).name  # type: ignore[arg-type]
    except TypeError:
        return text
