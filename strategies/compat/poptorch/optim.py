"""PopTorch's optimizers: PyTorch's, with loss scaling, a limit for the norm of gradients and dtypes of states; LAMB."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from popdist.switches import require_switches, require_switches_or_none
from strategies.compat.poptorch.names import MeanReductionStrategy, ReductionType, log_once
from strategies.compat.poptorch.options import Options
from strategies.errors import StrategyError
from strategies.torch.updates import is_elementwise

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

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
        known: Names of all hyperparameters but `loss_scaling`.
        given: Names of the arguments given to the optimizer, which are marked as variable; "lr" always is.
        loss_scaling: The loss scaling given to the optimizer, or None.
    """

    def __init__(self, known: Iterable[str], given: Iterable[str], loss_scaling: float | None) -> None:
        self._known = (*known, "loss_scaling")
        self._variable = {"lr", *given} if loss_scaling is None else {"lr", "loss_scaling", *given}

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
        self, loss_scaling: float | None, max_grad_norm: float | None, named: Mapping[str, object]
    ) -> dict[str, object]:
        """Take PopTorch's arguments, and return those of PyTorch's optimizer, without None values.

        Raises:
            ValueError: If a dtype is neither float16 nor float32.
        """
        self.loss_scaling = 1.0 if loss_scaling is None else float(loss_scaling)
        self.max_grad_norm = None if max_grad_norm == math.inf else max_grad_norm
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        for name, why in WITHOUT_EFFECT.items():
            if given.pop(name, None) is not None:
                log_once(f"{name} of an optimizer", why)
        dtypes = {name: given.pop(name) for name in ("accum_type", *STATE_TYPES) if name in given}
        for name, dtype in dtypes.items():
            if dtype not in (torch.float16, torch.float32):
                raise ValueError(f"{name} is {dtype}; use torch.float16 or torch.float32")
        self.accum_type = dtypes.get("accum_type")
        self._state_types = {state: dtype for name, dtype in dtypes.items() for state in STATE_TYPES.get(name, ())}
        return given

    @property
    def is_elementwise(self) -> bool:
        """Whether optimizer state may be sharded."""
        return self.max_grad_norm is None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override, unused-ignore]
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
        copies: list[tuple[list[torch.nn.Parameter], int, torch.nn.Parameter, torch.nn.Parameter]] = []
        narrows_states = torch.float16 in self._state_types.values()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None and (narrows_states or parameter.dtype in NARROW):
                    copy = torch.nn.Parameter(parameter.detach().float())
                    copy.grad = parameter.grad.float()
                    self._move_state(parameter, copy, {})
                    copies.append((group["params"], number, parameter, copy))
        for parameters, number, _, copy in copies:
            parameters[number] = copy
        try:
            yield
        finally:
            for parameters, number, parameter, copy in copies:
                parameters[number] = parameter
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


class _OfPyTorch(Optimizer):
    """Base of PyTorch's optimizers with `loss_scaling`, `max_grad_norm` and dtypes of their states."""

    _usual_lr: float | None = None
    """The default learning rate, or None if it must be given."""
    _variant: str | None = None
    """The argument by which `__new__` chooses a subclass; PyTorch's optimizer does not take it."""

    def __init__(
        self,
        params: Parameters,
        lr: float | None = None,
        *arguments: object,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: object,
    ) -> None:
        if lr is None and self._usual_lr is None:
            raise TypeError(f"{type(self).__name__} needs a learning rate, for example lr=0.01")
        if self._variant is not None:
            named.pop(self._variant, None)
        own = self._take(loss_scaling, max_grad_norm, named)
        of_pytorch: Callable[..., None] = super().__init__
        of_pytorch(params, self._usual_lr if lr is None else lr, *arguments, **own)
        self.variable_attrs = VariableAttributes(self.defaults, own, loss_scaling)


class SGD(_OfPyTorch, torch.optim.SGD):
    """`torch.optim.SGD` with `loss_scaling`, `max_grad_norm` and dtypes of its state, which `Optimizer` describes.

    Example::

        optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, max_grad_norm=1.0)
    """


class Adam(_OfPyTorch, torch.optim.Adam):
    """`torch.optim.Adam` with `loss_scaling`, `max_grad_norm` and dtypes of its state, which `Optimizer` describes."""

    _usual_lr = 1e-3


class AdamW(_OfPyTorch, torch.optim.AdamW):
    """`torch.optim.AdamW` with `loss_scaling`, `max_grad_norm` and dtypes of its state, which `Optimizer` describes.

    With `bias_correction=False`, updates use the moments without correction.
    """

    _usual_lr, _variant = 1e-3, "bias_correction"

    def __new__(cls, *arguments: object, bias_correction: bool | None = None, **named: object) -> AdamW:
        """Make an `AdamWWithoutCorrection` if `bias_correction` is False."""
        require_switches_or_none(bias_correction=bias_correction)
        made: AdamW = super().__new__(AdamWWithoutCorrection if bias_correction is False else cls)
        return made


class AdamWWithoutCorrection(OneByOne, AdamW):
    """The optimizer that `AdamW(..., bias_correction=False)` makes.

    Source: Devlin et al., BERT, 2018, whose optimizer is Adam with decoupled weight decay and uncorrected moments.
    """

    def __init__(self, params: Parameters, *arguments: float | None, **named: object) -> None:
        made: Callable[..., None] = super().__init__
        made(params, *arguments, **named)
        if any(group["amsgrad"] for group in self.param_groups):
            raise StrategyError("amsgrad keeps the maximum of corrected moments; use it with bias_correction=True")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        gradient = -gradient if group["maximize"] else gradient
        first, second = _moments(self.state[parameter], parameter, gradient, group["betas"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])


class RMSprop(_OfPyTorch, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with `loss_scaling`, `max_grad_norm` and dtypes of its state, which `Optimizer` describes.

    With `use_tf_variant` it follows TensorFlow: the mean of squares starts at ones, `eps` is added before the square
    root, and momentum accumulates changes of the parameters, each with the learning rate of its step.
    """

    _usual_lr, _variant = 1e-2, "use_tf_variant"

    def __new__(cls, *arguments: object, use_tf_variant: bool = False, **named: object) -> RMSprop:
        """Make an `RMSpropOfTensorFlow` if `use_tf_variant` is True."""
        require_switches(use_tf_variant=use_tf_variant)
        made: RMSprop = super().__new__(RMSpropOfTensorFlow if use_tf_variant else cls)
        return made


class RMSpropOfTensorFlow(OneByOne, RMSprop):
    """The optimizer that `RMSprop(..., use_tf_variant=True)` makes."""

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]
        if not state:
            state["step"], state["square_avg"] = torch.tensor(0.0), torch.ones_like(parameter)
            for name in ["grad_avg"] * group["centered"] + ["momentum_buffer"] * (group["momentum"] > 0):
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        decay = group["alpha"]
        squares = state["square_avg"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay).add(group["eps"])
        if group["centered"]:
            mean = state["grad_avg"].lerp_(gradient, 1 - decay)
            squares = squares.addcmul_(mean, mean, value=-1)
        change = gradient / squares.sqrt_() * group["lr"]
        if group["momentum"] > 0:
            change = state["momentum_buffer"].mul_(group["momentum"]).add_(change)
        parameter.sub_(change)


LAMB_DEFAULTS: Group = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "bias_correction": True,
    "max_weight_norm": 65500.0,
}


class LAMB(OneByOne):
    """Adam with layer-wise adaptation: the change of each parameter is scaled to the parameter's norm.

    Semantics: You et al., Large Batch Optimization for Deep Learning, ICLR 2020, with PopTorch's arguments.

    Args:
        params: Parameters to optimize, or groups of them.
        lr: Learning rate; 0.001 by default.
        betas: Decay rates of the moments; (0.9, 0.999) by default.
        eps: Number added to the root of the second moment; 1e-8 by default.
        weight_decay: Factor of the parameter that is added to the change before scaling; 0.01 by default.
        bias_correction: Whether to correct the bias of the moments; True by default.
        loss_scaling: Factor of losses for backward passes; mean gradients are divided by it.
        max_weight_norm: Upper limit of a parameter's norm in the scaling; 65500 by default.
        max_grad_norm: Limit for the global norm of mean gradients; None for no limit.
        named: Dtypes of states.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        max_grad_norm: float | None = None,
        **named: object,
    ) -> None:
        require_switches_or_none(bias_correction=bias_correction)
        if unknown := self._take(loss_scaling, max_grad_norm, named):
            raise TypeError(f"LAMB has no argument {', '.join(unknown)}; it has {', '.join(LAMB_DEFAULTS)}")
        numbers = (lr, betas, eps, weight_decay, bias_correction, max_weight_norm)
        given = {name: value for name, value in zip(LAMB_DEFAULTS, numbers, strict=True) if value is not None}
        super().__init__(params, {**LAMB_DEFAULTS, **given})
        self.variable_attrs = VariableAttributes(self.defaults, given, loss_scaling)

    @property
    def is_elementwise(self) -> bool:
        """Whether optimizer state may be sharded: False, because an update needs norms of whole parameters."""
        return False

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        first, second = _moments(state, parameter, gradient, group["betas"])
        if group["bias_correction"]:
            first = first / (1 - beta1 ** state["step"].item())
            second = second / (1 - beta2 ** state["step"].item())
        change = first / (second.sqrt() + group["eps"])
        if group["weight_decay"]:
            change = change.add(parameter, alpha=group["weight_decay"])
        size, length = parameter.norm().clamp(max=group["max_weight_norm"]), change.norm()
        ratio = (size / length).item() if size > 0 and length > 0 else 1.0
        parameter.add_(change, alpha=-group["lr"] * ratio)


def _moments(
    state: Group, parameter: torch.Tensor, gradient: torch.Tensor, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance Adam's two moments in the state of a parameter, and return them without correction."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    first = state["exp_avg"].lerp_(gradient, 1 - betas[0])
    second = state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return first, second


# ---- checks of a training model


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


def check_conflicts(options: Options, scale: float) -> None:
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
    location = options.TensorLocations.optimizer
    if location is None or not location.is_sharded:
        return False
    if is_elementwise(optimizer):
        return True
    logger.warning(
        "useReplicatedTensorSharding: the state of %s stays whole on every instance, because an update needs norms of "
        "whole parameters or gradients; results are the same",
        type(optimizer).__name__,
    )
    return False


def log_rounding(options: Options, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Warn about parameters of 16 bits that an IPU would round or accumulate differently."""
    if getattr(optimizer, "accum_type", None) is torch.float16:
        logger.info("accum_type is torch.float16, but gradients of float32 parameters are accumulated in float32")
    narrow = {one.dtype for one in model.parameters() if one.requires_grad and one.dtype in NARROW}
    if not narrow:
        return
    dtype = narrow.pop()
    if options.Precision.toDict().get("enableStochasticRounding"):
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
