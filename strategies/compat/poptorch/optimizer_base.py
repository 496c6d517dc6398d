"""The base of PopTorch's optimizers: loss scaling, gradient clipping, dtypes of states, and checks of options."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch

from strategies.compat.poptorch.enums import MeanReductionStrategy, ReductionType
from strategies.compat.poptorch.options import Options
from strategies.compat.poptorch.without_effect import tell_once
from strategies.errors import StrategyError
from strategies.torch.updates import is_elementwise

Group: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer, or the state of one parameter, by PyTorch's names."""
Parameters: TypeAlias = "Iterable[torch.nn.Parameter] | Iterable[Group]"
"""The parameters of a module, or groups of them."""

NARROW = (torch.float16, torch.bfloat16)
"""Dtypes of parameters whose optimizers compute in float32."""
STATE_TYPES = {
    "velocity_accum_type": ("momentum_buffer",),
    "first_order_momentum_accum_type": ("exp_avg", "grad_avg", "momentum_buffer"),
    "second_order_momentum_accum_type": ("exp_avg_sq", "max_exp_avg_sq", "square_avg"),
}
"""Arguments of PopTorch for dtypes of states, with the names of these states in PyTorch."""
WITHOUT_EFFECT = {
    "velocity_scaling": "velocities are not scaled, because they do not overflow in float32",
    "use_combined_accum": "gradients and velocities have separate arrays with the same numbers",
}
"""Arguments of PopTorch that do not change any number."""

_KEPT = {state for states in STATE_TYPES.values() for state in states}
_PICKLED = ("loss_scaling", "max_grad_norm", "accum_type", "variable_attrs", "_state_types")

logger = logging.getLogger("strategies.torch.poptorch")


class VariableAttributes:
    """Marks of variable hyperparameters, `optimizer.variable_attrs`. All hyperparameters may change, marked or not.

    Args:
        variable: Names of the arguments given to the optimizer.
        known: Names of all hyperparameters.
    """

    def __init__(self, variable: Iterable[str], known: Iterable[str]) -> None:
        self._known = tuple(known)
        self._variable = {name for name in variable if name in self._known}

    def isConstant(self, attr: str) -> bool:
        """Return whether a hyperparameter is not marked as variable."""
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Mark a hyperparameter as constant; updates read its current value anyway.

        Raises:
            ValueError: If the optimizer has no hyperparameter of this name.
        """
        self._variable.discard(self._checked(attr))

    def markAsVariable(self, attr: str) -> None:
        """Mark a hyperparameter as variable.

        Raises:
            ValueError: If the optimizer has no hyperparameter of this name.
        """
        self._variable.add(self._checked(attr))

    def _checked(self, attr: str) -> str:
        if attr not in self._known:
            raise ValueError(f"the optimizer has no attribute {attr!r}; it has {', '.join(self._known)}")
        return attr


def own_arguments(named: Mapping[str, object]) -> tuple[dict[str, object], dict[str, torch.dtype]]:
    """Return the arguments of PyTorch's optimizer, and the dtypes of accumulators and states, without None values.

    Raises:
        ValueError: If a dtype is neither float16 nor float32.
    """
    given = {name: value for name, value in named.items() if value is not None}
    for name, why in WITHOUT_EFFECT.items():
        if given.pop(name, None) is not None:
            tell_once(f"{name} of an optimizer", why)
    dtypes: dict[str, torch.dtype] = {}
    for name in [name for name in ("accum_type", *STATE_TYPES) if name in given]:
        dtype = given.pop(name)
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float16, torch.float32):
            raise ValueError(f"{name} is {dtype}; use torch.float16 or torch.float32")
        dtypes[name] = dtype
    return given, dtypes


class Optimizer(torch.optim.Optimizer):
    """Base of PopTorch's optimizers.

    Parameters of 16 bits are updated in float32 and then rounded. As in PopTorch, their states are float32 unless an
    argument sets another dtype.

    Attributes:
        loss_scaling: Factor of losses for backward passes, by which mean gradients are divided (Micikevicius et al.,
            2018).
        max_grad_norm: Limit for the global norm of mean gradients; None for no limit.
        accum_type: Dtype of accumulated gradients; None for the dtype of the parameters.
        variable_attrs: Marks of variable hyperparameters.
    """

    loss_scaling: float = 1.0
    max_grad_norm: float | None = None
    accum_type: torch.dtype | None = None
    variable_attrs: VariableAttributes
    _state_types: Mapping[str, torch.dtype] = {}

    def _take(
        self,
        loss_scaling: float | None,
        max_grad_norm: float | None,
        given: Iterable[str],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.loss_scaling = 1.0 if loss_scaling is None else float(loss_scaling)
        self.max_grad_norm = None if max_grad_norm == math.inf else max_grad_norm
        self.accum_type = dtypes.get("accum_type")
        self._state_types = {state: dtype for name, dtype in dtypes.items() for state in STATE_TYPES.get(name, ())}
        said = ["lr", *given] if loss_scaling is None else ["lr", "loss_scaling", *given]
        self.variable_attrs = VariableAttributes(said, [*self.defaults, "loss_scaling"])

    @property
    def is_elementwise(self) -> bool:
        """Whether optimizer state may be sharded."""
        return self.max_grad_norm is None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update, in float32."""
        with self._in_float32():
            return self._made(closure)

    def _made(self, closure: Callable[[], float] | None) -> float | None:
        step: Any = super().step
        step = step.__func__
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # the caller of `step` has run the hooks
        found: float | None = step(self, closure)
        return found

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Give the step float32 copies of 16-bit parameters, gradients and states; round the results afterwards."""
        copies: list[tuple[Group, int, torch.nn.Parameter, torch.nn.Parameter]] = []
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None and (
                    parameter.dtype in NARROW or torch.float16 in self._state_types.values()
                ):
                    copies.append((group, number, parameter, self._widened(parameter)))
        for group, number, _, copy in copies:
            group["params"][number] = copy
        try:
            yield
        finally:
            for group, number, parameter, copy in copies:
                group["params"][number] = parameter
                self._narrow(parameter, copy)

    def _widened(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        assert parameter.grad is not None
        copy = torch.nn.Parameter(parameter.detach().float())
        copy.grad = parameter.grad.float()
        self._move_state(parameter, copy, {})
        return copy

    def _narrow(self, parameter: torch.nn.Parameter, copy: torch.nn.Parameter) -> None:
        with torch.no_grad():
            parameter.copy_(copy)
        self._move_state(copy, parameter, self._state_types)

    def _move_state(
        self, before: torch.nn.Parameter, after: torch.nn.Parameter, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Give the state of one parameter to another, in the dtypes of `dtypes` or else in float32."""
        for name, value in self.state.pop(before, {}).items():
            is_kept = name in _KEPT and value is not None
            self.state[after][name] = value.to(dtypes.get(name, torch.float32)) if is_kept else value

    def load_state_dict(self, state_dict: Group) -> None:
        """Load a state without PyTorch's cast to the dtypes of the parameters."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name in _KEPT and value is not None:
                    self.state[parameter][name] = value.detach().clone()

    def __getstate__(self) -> Group:
        own = {name: value for name, value in vars(self).items() if name in _PICKLED}
        return {**super().__getstate__(), **own}


class OneByOne(Optimizer, ABC):
    """Base of optimizers that update one parameter at a time, by `_update`."""

    def _made(self, closure: Callable[[], float] | None) -> float | None:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        """Update a parameter of any shape in place."""


def scale_and_limit(optimizer: object) -> tuple[float, float | None]:
    """Return `loss_scaling` and `max_grad_norm` of an optimizer, or 1 and None if it lacks them."""
    return float(getattr(optimizer, "loss_scaling", 1.0)), getattr(optimizer, "max_grad_norm", None)


@dataclass
class Clipping:
    """A limit for the global norm of a module's mean gradients (Pascanu et al., 2013).

    Attributes:
        limit: Maximum norm of all gradients together; None for no limit.
    """

    limit: float | None

    def __post_init__(self) -> None:
        vars(self)["__qualname__"] = f"clipping to {self.limit}"  # instances compare this name

    def __call__(self, module: torch.nn.Module) -> None:
        """Clip the module's gradients, if there is a limit."""
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.limit)


def refuse_pairs(options: Options, scale: float) -> None:
    """Refuse options that exclude each other, by their names in programs.

    Raises:
        StrategyError: If two options exclude each other.
    """
    running = options.Training.mean_strategy is MeanReductionStrategy.Running
    if running and options.Training.reduction is ReductionType.Mean and options.execution_strategy is not None:
        raise StrategyError(
            "MeanReductionStrategy.Running rescales all gradients before each micro-batch, but with an execution "
            "strategy other micro-batches run at that time; use MeanReductionStrategy.Post, or no execution strategy"
        )
    if options.Precision.checks_numerics and (scale != 1 or options.Training.automatic_loss_scaling):
        raise StrategyError(
            "enableFloatingPointExceptions raises an error for gradients that are not finite, but loss scaling skips "
            "such steps; use it without setAutomaticLossScaling, and with loss_scaling=1.0"
        )


def shards_state(options: Options, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether to shard optimizer state: if options ask for it and the optimizer is elementwise."""
    if not options.TensorLocations.shards_optimizer or is_elementwise(optimizer):
        return options.TensorLocations.shards_optimizer
    logger.warning(
        "useReplicatedTensorSharding: the state of %s stays whole on every instance, because an update needs norms of "
        "whole parameters or gradients; results are the same",
        type(optimizer).__name__,
    )
    return False


def tell_rounding(options: Options, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Warn about parameters of 16 bits that an IPU would round or accumulate differently."""
    if getattr(optimizer, "accum_type", None) is torch.float16:
        logger.info("accum_type is torch.float16, but gradients of float32 parameters are accumulated in float32")
    narrow = {one.dtype for one in model.parameters() if one.requires_grad and one.dtype in NARROW}
    if not narrow:
        return
    dtype = narrow.pop()
    if options.Precision.rounds_stochastically:
        logger.warning("enableStochasticRounding: parameters are %s, but updates are rounded to nearest", dtype)
    if not isinstance(optimizer, Optimizer):
        return
    wanted = optimizer.accum_type or torch.float32
    if options.Training.gradient_accumulation > 1 and wanted is not dtype:
        logger.warning(
            "accum_type is %s, but gradients of %s parameters are accumulated in their own dtype; keep parameters in "
            "float32, and use poptorch.autocast in the model",
            wanted,
            dtype,
        )
