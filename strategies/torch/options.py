"""The options of a PyTorch training step, with checks of combinations that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from typing_extensions import override

from popdist.switches import require_switches_or_none
from strategies.argument_checks import at_least, positive
from strategies.core.options import (
    CommonOptions,
    CommonOptionsByName,
    GradientAccumulationReductionMethod,
    name_of_dtype,
)
from strategies.core.weights import ERROR
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.schedules import schedule_named
from strategies.torch.device import as_device
from strategies.torch.pipelines.stages import TorchPipeline
from strategies.torch.replicas.gradient_map import GradientMap

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
        require_missing_gradients(self.missing_gradients)
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
            self._refuse_with_pipeline()
        if self.shards_state and self.before_update is not None:
            raise ValueError(
                "before_update needs whole mean gradients, but with sharded optimizer state an instance has a part of "
                "them; use one of the two"
            )

    def _refuse_with_pipeline(self) -> None:
        assert self.pipeline is not None
        if schedule_named(self.pipeline.schedule).name == _SPLIT:
            raise ValueError(
                "the schedule 'zero_bubble' splits backward passes into two parts, which PyTorch's autograd computes "
                "at once; use 'one_forward_one_backward', or a pipeline of JAX"
            )
        if self.method is GradientAccumulationReductionMethod.RUNNING_MEAN:
            raise ValueError(
                "a running mean changes all gradients before each micro-batch, but a pipeline adds gradients of other "
                "micro-batches at that time; use reduction_method='mean'"
            )
        if self.device is not None:
            raise ValueError(
                f"replica_device is {self.replica_device!r}, on which replicas take turns, but the stages of a "
                "pipeline compute on the cores of the host at once; use one of the two"
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

    def mapping(self) -> GradientMap | None:
        """Return the map for the gradients of one replica; None without `map_gradient`."""
        if self.map_gradient is None:
            return None
        keeps_bad = self.check_numerics or self.scaling is not None
        return GradientMap(
            self.map_gradient, keeps_bad, 1 if self.pipeline is None else self.gradient_accumulation_count
        )

    def zeros(self) -> GradientMap:
        """Return the map that makes zeros of gradients whose loss has the weight 0, and keeps others."""
        return GradientMap(None, at_once=1 if self.pipeline is None else self.gradient_accumulation_count)

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
        return {
            "missing_gradients": self.missing_gradients,
            "model_state_aggregation": self.model_state_aggregation,
            "intra_op_threads": self.intra_op_threads,
            "stream_gradients": self.stream_gradients,
            "replica_device": None if self.device is None else self.device.type,
            "pipeline": None if self.pipeline is None else str(self.pipeline.schedule),
            "before_update": getattr(self.before_update, "__qualname__", None),
        }


def require_missing_gradients(word: str) -> None:
    """Raise unless a word is "error" or "zero"."""
    if word not in (ERROR, ZERO):
        raise ValueError(f"missing_gradients is {word!r}; use {ERROR!r} or {ZERO!r}")
