"""The options of a PyTorch training step, and the results of loss functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import final

import numpy as np
import torch
from typing_extensions import override

from popdist.switches import require_switches_or_none
from strategies.argument_checks import at_least, check_metric_names, positive
from strategies.core.options import (
    ERROR,
    CommonOptions,
    CommonOptionsByName,
    GradientAccumulationReductionMethod,
    name_of_dtype,
    travelling,
)
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.timetable import schedule_named
from strategies.torch.pipelines import TorchPipeline
from strategies.torch.replicas.gradient_map import GradientMap, groups_of
from strategies.torch.tensors import Binding, ThreadValue, as_device, dtype_of
from strategies.typing import Number, Tree
from strategies.values import Outcome

MEAN, FIRST, PER_REPLICA = WORDS = ("mean", "first", "per_replica")
"""Ways of agreement on a buffer: the mean over all replicas, in their order; replica 0's value; no agreement."""

Aggregation = str | Mapping[str, str] | None

ZERO = "zero"
"""A gradient that some replicas lack counts as zeros; with `ERROR` it is refused."""
_SPLIT = "zero_bubble"

_COMPUTE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchTrainerOptions(CommonOptionsByName, total=False):
    """The arguments of `Trainer` that are given by name. `TorchOptions` describes them."""

    check_numerics: bool | None
    digest_every: int
    missing_gradients: str
    model_state_aggregation: Aggregation
    intra_op_threads: int
    stream_gradients: bool | None
    replica_device: torch.device | str | None
    before_update: Callable[[torch.nn.Module], object] | None
    pipeline: TorchPipeline | None


@final
@dataclass(frozen=True)
class TorchOptions(CommonOptions):
    """Options of a PyTorch training step. `CommonOptions` describes the options that JAX has too.

    Attributes:
        missing_gradients: The end of a step in which a gradient is None on some replicas only, as with experts that got
            no tokens. "error": it raises `StrategyError`. "zero": such a gradient counts as zeros, as
            `find_unused_parameters` of PyTorch's DistributedDataParallel does.
        model_state_aggregation: The agreement of replicas on buffers that a step has changed: "mean", "first", or
            "per_replica" if each replica keeps its own. One word holds for all buffers; a dictionary gives words by
            name. None: the mean of floating-point buffers, and replica 0's value of others. If each replica keeps its
            own, the module has replica 0's.
        intra_op_threads: PyTorch's number of threads within an operation, for each replica and the update. Bits depend
            on it, so it is the same on all instances.
        stream_gradients: Whether gradients travel while the backward pass still runs, the same on all instances. None:
            only with `variables_on_host`, that is over a network. (In the memory of one host, the waiting thread would
            take a core.) The option changes nothing if gradients stay on a device.
        replica_device: An accelerator, as "cuda", to which the module and the state of its optimizer move. All
            replicas of an instance compute there, and gradients stay there. "cuda:1" is the same on
            every instance; without a number, the instances of a host take the accelerators in turn. "cpu" does the same
            on the CPU, to try it. None: the device of the module.
        before_update: A function, called with the module on every instance before the update, when the `grad` of its
            parameters holds the mean gradients: to clip them, for example.
        pipeline: The pipeline in which the blocks of a module run as stages; None to run them one after another.

    Raises:
        TypeError: If an option has a wrong type, or `replica_device` is no device.
        ValueError: If an option is out of range, or two options exclude each other.
    """

    missing_gradients: str = ERROR
    model_state_aggregation: Aggregation = None
    intra_op_threads: int = 1
    stream_gradients: bool | None = None
    replica_device: torch.device | str | None = None
    before_update: Callable[[torch.nn.Module], object] | None = None
    pipeline: TorchPipeline | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_switches_or_none(stream_gradients=self.stream_gradients)
        at_least(0, "seed", self.seed)
        if self.missing_gradients not in (ERROR, ZERO):
            raise ValueError(f"missing_gradients is {self.missing_gradients!r}; use {ERROR!r} or {ZERO!r}")
        positive("intra_op_threads", self.intra_op_threads)
        _ = self.autocast_dtype, self.device  # these properties check their options
        given = self.model_state_aggregation
        for word in [given] if isinstance(given, str) else (given or {}).values():
            if word not in WORDS:
                raise ValueError(
                    f"model_state_aggregation has {word!r}; use None, 'mean', 'first', 'per_replica', or a dictionary "
                    "from the names of buffers to these"
                )
        if self.pipeline is not None:
            if schedule_named(self.pipeline.schedule).name == _SPLIT:
                raise ValueError(
                    "the schedule 'zero_bubble' splits backward passes into two parts, which PyTorch's autograd "
                    "computes at once; use 'one_forward_one_backward', or a pipeline of JAX"
                )
            if self.method is GradientAccumulationReductionMethod.RUNNING_MEAN:
                raise ValueError(
                    "a running mean changes all gradients before each micro-batch, but a pipeline adds gradients of "
                    "other micro-batches at that time; use reduction_method='mean'"
                )
            if self.device is not None:
                raise ValueError(
                    f"replica_device is {self.replica_device!r}, on which replicas take turns, but the stages of a "
                    "pipeline compute on the cores of the host at once; use one of the two"
                )
        if self.shards_state and self.before_update is not None:
            raise ValueError(
                "before_update needs whole mean gradients, but sharded optimizer state has parts; use one of the two"
            )

    def streams_over(self, replicas: Replicas) -> bool:
        """Return whether gradients travel while backward passes run."""
        return replicas.streams_gradients if self.stream_gradients is None else self.stream_gradients

    def divisor(self, number: int) -> int:
        """Return the divisor for micro-batch `number`, so that the sum over micro-batches agrees with `method`."""
        if self.method is GradientAccumulationReductionMethod.SUM:
            return 1
        is_running = self.method is GradientAccumulationReductionMethod.RUNNING_MEAN
        return number + 1 if is_running else self.gradient_accumulation_count

    def mapping(self) -> GradientMap:
        """Return the map of gradients of one replica, which also makes zeros of those whose loss has the weight 0."""
        keeps_bad = self.check_numerics or self.scaling is not None
        at_once = 1 if self.pipeline is None else self.gradient_accumulation_count
        return GradientMap(self.map_gradient, keeps_bad, at_once)

    @cached_property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of `torch.autocast`; None without it."""
        name = name_of_dtype(self.compute_dtype)
        if name is not None and name not in _COMPUTE:
            raise ValueError(f"compute_dtype is {self.compute_dtype!r}; use 'bfloat16', 'float16' or None")
        return None if name is None else _COMPUTE[name]

    @cached_property
    def device(self) -> torch.device | None:
        """The device on which the replicas compute; None for the device of the module."""
        return as_device(self.replica_device)

    @property
    @override
    def own_terms(self) -> Mapping[str, object]:
        own = fields(TorchOptions)[len(fields(CommonOptions)) :]
        return {
            **{field.name: getattr(self, field.name) for field in own},
            "replica_device": None if self.device is None else self.device.type,
            "pipeline": None if self.pipeline is None else str(self.pipeline.schedule),
            "before_update": getattr(self.before_update, "__qualname__", None),
        }


# ---- outcomes

WEIGHT = "weight of the loss"
"""The last name of the values that travel behind gradients, if losses have weights."""

_stated = ThreadValue[list[object] | None](None)


def loss_weight(weight: Number) -> None:
    """State the weight of the loss that the calling replica computes now, as `strategies.Outcome(weight=...)` does.

    For modules that return their own loss: call it in `forward`. It has an effect in a loss function of
    `strategies.torch.Trainer`, in a training model of PopTorch's interface, and in a training pass of a
    `DistributedModel`. Elsewhere it does nothing, so the module works in plain PyTorch too.

        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)  # the mean over some tokens
        strategies.torch.loss_weight((labels != -100).sum())

    Args:
        weight: A finite number of at least 0, or a tensor with one; see `strategies.Outcome`.
    """
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        warnings.warn(
            "strategies.torch.loss_weight is no part of a traced or exported module, which states no weight and would "
            "train without; train the module itself, or return the weight from the loss function, in an Outcome",
            UserWarning,
            stacklevel=2,
        )
    if _stated.now is not None:
        _stated.now.append(weight)


def is_asked_for() -> bool:
    """Return whether somebody collects the weights that are stated in this thread."""
    return _stated.now is not None


def states_to(weights: list[object]) -> Binding[list[object] | None]:
    """Return a context in which weights that are stated in this thread are appended to a list."""
    return _stated.using(weights)


def one_of(weights: list[object], way_out: str) -> object:
    """Return the only weight that was stated for a loss; None if none was.

    Raises:
        StrategyError: If there are several.
    """
    if len(weights) > 1:
        raise StrategyError(f"{len(weights)} weights were stated for one loss; {way_out}")
    return weights[0] if weights else None


def outcome_of(function: Callable[[], Tree]) -> Outcome:
    """Call a loss function, and return its results. The weight is a number as it travels, or None.

    Raises:
        TypeError: If a result has a wrong type, or the loss or the weight is no scalar.
        StrategyError: If the function has stated several weights.
    """
    stated: list[object] = []
    with states_to(stated):
        returned = function()
    if isinstance(returned, Outcome):
        found = returned
    else:
        parts = returned if isinstance(returned, tuple) and len(returned) in (2, 3) else (returned,)
        found = Outcome(parts[0], parts[1] if len(parts) > 1 else {}, outputs=parts[2] if len(parts) > 2 else None)
    if found.model_state is not None:
        raise TypeError(
            "the Outcome has a model_state, but the buffers of a PyTorch module are its model state; leave it out"
        )
    if not isinstance(found.metrics, Mapping):
        raise TypeError(f"the metrics are a {type(found.metrics).__name__}; return (loss, dictionary of scalars)")
    check_metric_names(found.metrics)
    given = [] if found.weight is None else [found.weight]
    weight = one_of([*given, *stated], "return it in the Outcome, or state it once with strategies.torch.loss_weight")
    return Outcome(found.loss, found.metrics, None, found.outputs, None if weight is None else number_of(weight))


def check_loss(loss: object) -> None:
    """Raise unless a loss can be trained.

    Raises:
        TypeError: If the loss is no floating-point scalar, or depends on no parameter.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"a {loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"the loss is {what}; return a floating-point scalar, or (scalar, dictionary of scalars)")
    if not loss.requires_grad:
        raise TypeError("the loss depends on no trained parameter; compute it from the outputs of the module")


def number_of(weight: object) -> float:
    """Return a weight as it travels: float32, NaN for a negative or non-finite one. Waits for a device.

    Raises:
        TypeError: If the weight is no real scalar.
    """
    given: Number = weight
    is_array = isinstance(weight, torch.Tensor | np.ndarray)
    try:
        if isinstance(weight, str) or (isinstance(weight, torch.Tensor) and weight.is_complex()):
            raise TypeError(f"a {type(weight).__name__} is no real number")
        if str(getattr(weight, "dtype", "")).removeprefix("torch.") in ("float16", "bfloat16"):  # NumPy's, too
            raise TypeError("16 bits round counts of tokens")
        number = float(given.detach() if isinstance(weight, torch.Tensor) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{given.dtype}{list(given.shape)}" if is_array else f"{weight!r}, a {type(weight).__name__}"
        raise TypeError(
            f"the weight of the loss is {what}; give a real scalar of 32 or 64 bits, such as mask.sum()"
        ) from error
    return float(travelling(number))


def weighted_loss(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a loss times its weight, in float32 at least. The weight is a constant."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight


def check_weight_with_sync_layers(loss: torch.Tensor, weight: float, is_mapped: bool) -> None:
    """Raise if a weight cannot be heeded because layers such as SyncBatchNorm compute with the rows of all replicas.

    Raises:
        StrategyError: If gradients are mapped, or the weight is 0 and the loss is not finite.
    """
    if is_mapped:
        raise StrategyError(
            "losses have weights, map_gradient changes the gradients of each replica, and SyncBatchNorm mixes the "
            "gradients of all losses before; use BatchNorm, or leave map_gradient or the weights out"
        )
    if weight == 0 and not bool(torch.isfinite(loss.detach())):
        raise StrategyError(
            f"a loss of the weight 0 is {float(loss.detach())}, and SyncBatchNorm would spread it to the gradients of "
            "all replicas; return a finite loss for rows without weight, or use BatchNorm"
        )


def check_weights_supported(module: torch.nn.Module, options: TorchOptions) -> None:
    """Raise if the weights of losses cannot be heeded.

    Raises:
        StrategyError: If a parameter has a row for each group of replicas.
        ValueError: If gradients travel as float16.
    """
    for name, parameter in module.named_parameters():
        if groups_of(parameter) is not None:
            raise StrategyError(
                f"losses have weights, but {name} has a row for each group of replicas, and weighted means are over "
                "all of them; leave the weights out, or let all replicas share the parameter"
            )
        if parameter.requires_grad and options.transfer.dtype_of(dtype_of(parameter)) == np.float16:
            raise ValueError(
                f"losses have weights, but the gradient of {name} travels as float16, which overflows when it is "
                "multiplied by large weights; use gradient_transfer_dtype='bfloat16', or no weights"
            )


def weighted_value(value: float, weight: float | None) -> float:
    """Return a metric times the weight of its loss; 0 for a weight of 0, even if the metric is NaN."""
    return 0.0 if weight == 0 else value * (1.0 if weight is None else weight)


def are_weighted(names: tuple[str, ...]) -> bool:
    """Return whether losses have weights, given the names of the values that travel behind gradients."""
    return names[-1:] == (WEIGHT,)
