"""One replica's forward and backward passes of a step, with the module itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.jit import optimized_execution

from strategies.core.options import GradientAccumulationReductionMethod
from strategies.errors import StrategyError
from strategies.torch.data import parts_of
from strategies.torch.exchange.plan import Fact
from strategies.torch.options import (
    WEIGHT,
    TorchOptions,
    check_loss,
    check_weight_with_sync_layers,
    outcome_of,
    weighted_loss,
)
from strategies.torch.pipelines import PipelineRun, StageCursor, drawing
from strategies.torch.replicas.generators import seed_of
from strategies.torch.replicas.module_parts import Slot
from strategies.torch.replicas.sync_batch_norm import SyncLayers
from strategies.torch.replicas.turns import Changes
from strategies.torch.tensors import ReplicaMemory, divide, kept_apart, way_out_of_refusals
from strategies.typing import Batch, Number, Tree
from strategies.values import Outcome

LossFunction = Callable[[torch.nn.Module, Batch], Tree]
"""(module, batch) -> loss, or (loss, dictionary of metrics), or (loss, metrics, outputs), or `Outcome`, for one replica
and one micro-batch."""

RUNNING_MEAN = GradientAccumulationReductionMethod.RUNNING_MEAN


@dataclass(frozen=True)
class ReplicaResults:
    """The results of a replica's turn in a step, besides gradients.

    Attributes:
        names: The names of the values: "loss", the metrics, and the weight if losses have weights.
        values: The values, as means over the micro-batches.
        losses: The loss of each micro-batch, without history.
        weight: The mean weight of the losses; None if they have no weights.
        outputs: For each micro-batch, the loss function's third result, without history, on the replica's device.
        seen: Whether each trained parameter has a gradient, known when the passes have ended.
        changes: Which slots it has changed, known then.
        slots: The slots afterwards, known then.
    """

    names: tuple[str, ...]
    values: Sequence[Fact]
    losses: Sequence[torch.Tensor]
    weight: float | None
    outputs: Sequence[Tree]
    seen: Sequence[bool] = ()
    changes: Changes = ()
    slots: Sequence[Slot] = ()


class ReplicaPasses:
    """The passes of local replicas, one after another.

    Args:
        module: The module.
        memory: The memory in which replicas compute.
        loss_fn: The loss function.
        options: The options of the step.
        is_on_device: Whether gradients stay on the device, and so do metrics.
        layers: The layers that wait for other replicas.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        memory: ReplicaMemory,
        loss_fn: LossFunction,
        options: TorchOptions,
        is_on_device: bool,
        layers: SyncLayers,
    ) -> None:
        self._module, self._memory, self._loss_fn, self._options = module, memory, loss_fn, options
        self._is_on_device, self._layers = is_on_device, layers
        self._map, self._is_mapped, self._has_weights = options.mapping(), options.map_gradient is not None, False

    def run(
        self,
        replica: int,
        batch: Batch,
        step: int,
        scale: float,
        parameters: Sequence[torch.Tensor],
        pipeline: PipelineRun | None = None,
        ends: Callable[[], object] | None = None,
    ) -> ReplicaResults:
        """Run the passes of a replica. Gradients are added to those of its parameters.

        Args:
            replica: The global index of the replica.
            batch: Its batch.
            step: The number of the step.
            scale: The loss scale of the backward pass.
            parameters: The trained parameters of the replica.
            pipeline: The pipeline of the module; None without one.
            ends: Called before the last backward pass.

        Raises:
            BaseException: The error of the module or the loss function.
        """
        count = self._options.gradient_accumulation_count
        parts = [batch] if count == 1 else parts_of(batch, count)
        found: list[tuple[tuple[str, ...], Sequence[Fact], torch.Tensor, float | None, Tree] | None] = [None] * count

        def work(number: int, cursor: StageCursor | None) -> None:
            seed = seed_of(self._options.seed, replica, step, number)
            draws = drawing(seed, self._memory.device, cursor)
            with draws, self._layers.entered(replica, number), optimized_execution(False):  # see torch_modules.md
                with self._autocast():
                    outcome = outcome_of(lambda: self._loss_fn(self._module, self._memory.put(parts[number])))
                loss, weight = outcome.loss, outcome.weight
                check_loss(loss)
                outputs = None if outcome.outputs is None else kept_apart(outcome.outputs, self._module.buffers())
                values, names = self._values_of(outcome), ("loss", *outcome.metrics)
                found[number] = names, values, loss.detach(), weight, outputs
                del outcome  # the history of metrics
                loss = self._for_backward(loss, number, scale, weight, parameters, maps)
                if ends is not None and number == count - 1:
                    ends()
                if cursor is None:
                    loss.backward()
                else:
                    cursor.backward(loss)

        with ExitStack() as maps, way_out_of_refusals():
            if self._is_mapped or (pipeline is not None and self._has_weights):
                maps.enter_context(self._map.attached(parameters))  # later, others would run through the hooked nodes
            if pipeline is None:
                for number in range(count):
                    work(number, None)
            else:
                pipeline.each(work, replica)
        names, values, losses, weights, outputs = zip(*(one for one in found if one is not None), strict=True)
        weight, total = _mean_of(weights), list(values[0])
        for more in values[1:]:
            total = [one + other for one, other in zip(total, more, strict=True)]
        return ReplicaResults(
            names[0] if weight is None else (*names[0], WEIGHT),
            [_divided(value, count) for value in total],
            losses,
            weight,
            outputs,
        )

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self._options.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self._memory.device.type, dtype)

    def _values_of(self, outcome: Outcome) -> list[Fact]:
        """Return the loss and the metrics, times the weight if there is one, and then the weight."""
        named, weight = {"loss": outcome.loss, **outcome.metrics}, outcome.weight
        values = [self._number(name, 0.0 if weight == 0 else value) for name, value in named.items()]
        return values if weight is None else [*(one * weight for one in values), self._number(WEIGHT, weight)]

    def _number(self, name: str, value: Number) -> Fact:
        """Return a metric as a number; if gradients stay on the device, as a wide scalar there."""
        device = self._memory.device
        if not self._is_on_device:
            return _number(name, value)
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == device.type:
            return value.detach().reshape(()).to(wide, copy=True)  # a copy: the next pass may change the tensor
        return torch.full((), _number(name, value), dtype=wide, device=device)

    def _for_backward(
        self,
        loss: torch.Tensor,
        number: int,
        scale: float,
        weight: float | None,
        parameters: Sequence[torch.Tensor],
        maps: ExitStack,
    ) -> torch.Tensor:
        """Return the loss for the backward pass. For a running mean, also rescale the gradients so far.

        If the weight is 0, make zeros of this micro-batch's gradients, because 0 times NaN is NaN. If layers meet those
        of other replicas, gradients of their losses arrive here as well, and they stay.

        Raises:
            StrategyError: If layers meet others, and gradients are mapped, or the loss has the weight 0 and is not
                finite.
        """
        if self._options.method is RUNNING_MEAN and number:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(number / (number + 1))
        divisor = self._options.divisor(number)
        if weight is not None and self._layers.meets:
            check_weight_with_sync_layers(loss, weight, self._is_mapped)
        elif weight is not None:
            self._has_weights = True
            if not self._map.is_attached and (weight == 0 or self._options.pipeline is not None):
                maps.enter_context(self._map.attached(parameters))
        self._map.begin(number, scale, divisor, weight)
        if not self._is_mapped:
            if weight is not None:
                loss = weighted_loss(loss, weight)
            if divisor != 1:
                loss = loss / divisor
        return loss * scale if scale != 1 else loss


def _divided(value: Fact, count: int) -> Fact:
    """Return a quotient in float64, with the host's bits on any device."""
    if not isinstance(value, torch.Tensor):
        return value / count
    divide([value], count)
    return value


def _mean_of(weights: Sequence[float | None]) -> float | None:
    """Return the mean weight of micro-batches, as the metrics are averaged; None without weights.

    Raises:
        StrategyError: If only some micro-batches have a weight.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        raise StrategyError(
            "the loss of some micro-batches has a weight, and that of others has none; give all of them weights"
        )
    return float(np.float32(sum(given) / len(given)))


def _number(name: str, value: Number) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"the metric {name!r} is {what}; metrics are scalars: return (loss, metrics, outputs) with values of rows"
        ) from error
