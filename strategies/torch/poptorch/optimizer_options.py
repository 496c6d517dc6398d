"""Checks of options that exclude each other, or do not suit an optimizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from strategies.errors import StrategyError
from strategies.torch.poptorch.enums import MeanReductionStrategy, ReductionType
from strategies.torch.poptorch.optimizer_base import NARROW, Optimizer
from strategies.torch.poptorch.options import Options
from strategies.torch.updates import is_elementwise

logger = logging.getLogger(__name__)


def scale_and_limit(optimizer: object) -> tuple[float, float | None]:
    """Return the `loss_scaling` and `max_grad_norm` of an optimizer; 1 and None for one without them."""
    return float(getattr(optimizer, "loss_scaling", 1.0)), getattr(optimizer, "max_grad_norm", None)


@dataclass
class Clipping:
    """A limit for the norm of the mean gradients of a module.

    Attributes:
        limit: the norm of all of them together; None: they stay.
    """

    limit: float | None

    def __post_init__(self) -> None:
        vars(self)["__qualname__"] = f"clipping to {self.limit}"  # on which all instances agree

    def __call__(self, module: torch.nn.Module) -> None:
        """Clip them, if there is a limit."""
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.limit)


def refuse_pairs(options: Options, scale: float) -> None:
    """Refuse options that exclude each other, by their names in programs.

    Raises:
        StrategyError: if there are such.
    """
    running = options.Training.mean_strategy is MeanReductionStrategy.Running
    if running and options.Training.reduction is ReductionType.Mean and options.execution_strategy is not None:
        raise StrategyError(
            "MeanReductionStrategy.Running changes all gradients before each micro-batch, and with an execution "
            "strategy others are being added up then; use MeanReductionStrategy.Post, or no execution strategy"
        )
    if options.Precision.checks_numerics and (scale != 1 or options.Training.automatic_loss_scaling):
        raise StrategyError(
            "enableFloatingPointExceptions raises for gradients that are not finite, and steps with scaled losses are "
            "left out where gradients are; use it without setAutomaticLossScaling, and with loss_scaling=1.0"
        )


def shards_state(options: Options, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state is sharded: if that is wanted, and the optimizer looks at every element alone."""
    if not options.TensorLocations.shards_optimizer or is_elementwise(optimizer):
        return options.TensorLocations.shards_optimizer
    logger.warning(
        "useReplicatedTensorSharding: the state of %s stays whole on every instance, since an update needs norms of "
        "whole parameters or gradients; results are the same",
        type(optimizer).__name__,
    )
    return False


def tell_rounding(options: Options, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Warn of parameters of 16 bits that an IPU would round, or add up, otherwise."""
    if getattr(optimizer, "accum_type", None) is torch.float16:
        logger.info("accum_type is torch.float16: gradients of float32 parameters are added up in float32")
    narrow = {one.dtype for one in model.parameters() if one.requires_grad and one.dtype in NARROW}
    if not narrow:
        return
    dtype = narrow.pop()
    if options.Precision.rounds_stochastically:
        logger.warning("enableStochasticRounding: parameters are %s, and updates are rounded to nearest", dtype)
    if not isinstance(optimizer, Optimizer):
        return
    wanted = optimizer.accum_type or torch.float32
    if options.Training.gradient_accumulation > 1 and wanted is not dtype:
        logger.warning(
            "accum_type is %s, and gradients of %s parameters are added up in their own dtype; keep the parameters in "
            "float32, and use poptorch.autocast in the model",
            wanted,
            dtype,
        )
