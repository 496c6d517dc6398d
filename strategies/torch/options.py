"""The options of a step on PyTorch, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypedDict

import torch

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import at_least, positive
from strategies.exchange.transfer import GradientTransfer
from strategies.gradients.accumulation import GradientAccumulationReductionMethod
from strategies.loss_scaling import LossScaling
from strategies.torch.gradient_map import GradientMap, MapGradient
from strategies.torch.replica_memory import as_device
from strategies.torch.stages import TorchPipeline

MEAN, FIRST, PER_REPLICA = WORDS = ("mean", "first", "per_replica")
"""How replicas agree on a buffer: the mean over all of them, in their order; what replica 0 has; not at all."""

Aggregation = str | Mapping[str, str] | None

_COMPUTE = {
    **{name: torch.bfloat16 for name in ("bfloat16", "torch.bfloat16")},
    **{name: torch.float16 for name in ("float16", "torch.float16")},
}


class TorchTrainerOptions(TypedDict, total=False):
    """The arguments that `Trainer` takes by name; see `TorchOptions`."""

    check_numerics: bool
    digest_every: int
    verify_steps: int
    gradient_accumulation_count: int
    reduction_method: GradientAccumulationReductionMethod | str
    map_gradient: MapGradient | None
    replicated_optimizer_state_sharding: bool
    min_elements_for_sharding: int
    compute_dtype: torch.dtype | str | None
    loss_scaling: LossScaling | float | str | None
    gradient_transfer_dtype: torch.dtype | str | None
    model_state_aggregation: Aggregation
    intra_op_threads: int
    stream_gradients: bool | None
    replica_device: torch.device | str | None
    before_update: Callable[[torch.nn.Module], object] | None
    pipeline: TorchPipeline | None


@dataclass(frozen=True)
class TorchOptions:
    """Options of a PyTorch training step. Options also found in `strategies.StepOptions` have the same meaning.

    Attributes:
        seed: of all random numbers that models draw, see `seed_of`.
        check_numerics: raise `NonFiniteGradientError` for the first mean gradient that is NaN or infinite.
        digest_every: compare the bits of parameters, buffers and optimizer state between instances before every so
            many steps.
        verify_steps: number of first steps in which the loss and gradients of replica 0 are compared with plain PyTorch
            on the module itself. After these steps, and after 2, 4, 8 and so on, instances compare the bits of the
            state; 0 for no comparison.
        gradient_accumulation_count: micro-batches of each replica for one update.
        reduction_method: how micro-batches are reduced, over replicas it is always the mean. MEAN divides each loss by
            the count before its backward pass.
        map_gradient: None, or a function `(gradient, parameter) -> gradient` of each parameter that is trained: of each
            micro-batch on each replica, before anything is divided or added up. Without the loss scale. It runs in the
            replicas' threads, behind the hooks of the parameter.
        replicated_optimizer_state_sharding: every replica keeps 1/R of the optimizer state and updates that; for
            optimizers that compute element by element.
        min_elements_for_sharding: the state of smaller parameters stays whole.
        compute_dtype: bfloat16 or float16: forward passes run under `torch.autocast` of it.
        loss_scaling: None, "dynamic", a number for a scale that stays, or a `LossScaling`; with the rules of
            `torch.amp.GradScaler`, but the same scale on all instances.
        gradient_transfer_dtype: float16, bfloat16 or int8: how gradients travel.
        model_state_aggregation: how replicas agree on the buffers that a step has changed: "mean", "first", or
            "per_replica" where each keeps its own, for all of them or by their names; None: the mean of floating-point
            ones, and replica 0's of others. The module has those of replica 0 where each keeps its own.
        intra_op_threads: of each replica, and of the update: part of what decides bits, so the same everywhere.
        stream_gradients: whether gradients travel while the backward pass still runs, the same on all instances. None:
            over a network, that is with `variables_on_host`. In the memory of a host waiting takes a core.
        replica_device: an accelerator, as "cuda", on which all replicas of an instance compute, which share it: one
            after another, with a copy of the parameters there. "cuda:1" is the same on every instance, without a
            number those of a host take turns. The module stays on the host, and so does all that is agreed on. "cpu"
            does the same on the CPU, to try it. None: replicas compute in the memory of the module.
        before_update: called with the module on every instance when it has the mean gradients, in the `grad` of its
            parameters, and before they are applied: to clip them, say.
        pipeline: how the blocks of a module run as stages of a pipeline; None: one after another.

    Raises:
        TypeError: if a switch is neither True nor False, or `replica_device` no device.
        ValueError: if an option is out of range, or two of them exclude each other.
    """

    seed: int = 0
    check_numerics: bool = False
    digest_every: int = 0
    verify_steps: int = 1
    gradient_accumulation_count: int = 1
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.MEAN
    map_gradient: MapGradient | None = None
    replicated_optimizer_state_sharding: bool = False
    min_elements_for_sharding: int = 32
    compute_dtype: torch.dtype | str | None = None
    loss_scaling: LossScaling | float | str | None = None
    gradient_transfer_dtype: torch.dtype | str | None = None
    model_state_aggregation: Aggregation = None
    intra_op_threads: int = 1
    stream_gradients: bool | None = None
    replica_device: torch.device | str | None = None
    before_update: Callable[[torch.nn.Module], object] | None = None
    pipeline: TorchPipeline | None = None

    def __post_init__(self) -> None:
        require_switches(
            check_numerics=self.check_numerics,
            replicated_optimizer_state_sharding=self.replicated_optimizer_state_sharding,
        )
        require_switches_or_none(stream_gradients=self.stream_gradients)
        at_least(0, "seed", self.seed)
        at_least(0, "digest_every", self.digest_every)
        at_least(0, "verify_steps", self.verify_steps)
        positive("gradient_accumulation_count", self.gradient_accumulation_count)
        positive("min_elements_for_sharding", self.min_elements_for_sharding)
        positive("intra_op_threads", self.intra_op_threads)
        _ = self.method, self.autocast_dtype, self.scaling  # each refuses what is out of range
        _ = self.transfer, self.device
        if self.map_gradient is not None and not callable(self.map_gradient):
            raise TypeError(
                f"map_gradient is {self.map_gradient!r}, a {type(self.map_gradient).__name__}; use a function "
                "(gradient, parameter) -> gradient, or None"
            )
        given = self.model_state_aggregation
        for word in [given] if isinstance(given, str) else (given or {}).values():
            if word not in WORDS:
                raise ValueError(
                    f"model_state_aggregation has {word!r}; use None, 'mean', 'first', 'per_replica', or a dictionary "
                    "from the names of buffers to these"
                )
        if self.check_numerics and self.scaling is not None:
            raise ValueError("check_numerics raises for the gradients that loss_scaling expects; use one of them")
        if self.pipeline is not None and self.method is GradientAccumulationReductionMethod.RUNNING_MEAN:
            raise ValueError(
                "a running mean changes all gradients before each micro-batch, and in a pipeline others are being "
                "added up then; use reduction_method='mean'"
            )
        if self.pipeline is not None and self.device is not None:
            raise ValueError(
                f"replica_device is {self.replica_device!r}, on which replicas take turns, and the stages of a "
                "pipeline compute on the cores of the host at once; use one of the two"
            )
        if self.replicated_optimizer_state_sharding and self.before_update is not None:
            raise ValueError(
                "before_update sees whole mean gradients, and with sharded optimizer state an instance has a part of "
                "them; use one of the two"
            )

    @cached_property
    def method(self) -> GradientAccumulationReductionMethod:
        """The way in which micro-batches become one gradient."""
        return GradientAccumulationReductionMethod.parse(self.reduction_method)

    def compares_bits(self, steps_made: int) -> bool:
        """Return whether instances compare the bits of the state when so many steps are made."""
        is_power_of_two = steps_made > 0 and not steps_made & (steps_made - 1)
        return self.verify_steps > 0 and (is_power_of_two or 0 < steps_made <= self.verify_steps)

    def divisor(self, number: int) -> int:
        """Return the number by which micro-batch `number` is divided, so that the sum of all is what `method` says."""
        if self.method is GradientAccumulationReductionMethod.SUM:
            return 1
        is_running = self.method is GradientAccumulationReductionMethod.RUNNING_MEAN
        return number + 1 if is_running else self.gradient_accumulation_count

    def mapping(self) -> GradientMap | None:
        """Return the map for the gradients of one replica; None without `map_gradient`."""
        if self.map_gradient is None:
            return None
        keeps_bad = self.check_numerics or self.scaling is not None
        return GradientMap(
            self.map_gradient, keeps_bad, 1 if self.pipeline is None else self.gradient_accumulation_count
        )

    @cached_property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of `torch.autocast`; None without it."""
        if self.compute_dtype is None:
            return None
        if str(self.compute_dtype) not in _COMPUTE:
            raise ValueError(f"compute_dtype is {self.compute_dtype!r}; use 'bfloat16', 'float16' or None")
        return _COMPUTE[str(self.compute_dtype)]

    @cached_property
    def scaling(self) -> LossScaling | None:
        """The scaling of losses; None where they are not scaled."""
        return LossScaling.parse(self.loss_scaling)

    @cached_property
    def transfer(self) -> GradientTransfer:
        """The dtype in which gradients travel."""
        dtype = self.gradient_transfer_dtype
        return GradientTransfer.parse(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)

    @cached_property
    def device(self) -> torch.device | None:
        """On which the replicas compute; None for the memory of the module."""
        return as_device(self.replica_device)

    @property
    def terms(self) -> Mapping[str, object]:
        """The options as all instances have to have them."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "map_gradient"}
        return given | {
            "reduction_method": self.method.name,
            "compute_dtype": self.autocast_dtype,
            "loss_scaling": self.scaling,
            "gradient_transfer_dtype": self.transfer.dtype,
            "replica_device": None if self.device is None else self.device.type,
            "pipeline": None if self.pipeline is None else str(self.pipeline.schedule),
            "before_update": getattr(self.before_update, "__qualname__", None),
        }
