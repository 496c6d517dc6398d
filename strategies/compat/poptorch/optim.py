"""PopTorch's optimizers: PyTorch's, with loss scaling and a limit for the norm of gradients, and LAMB."""

from __future__ import annotations

from collections.abc import Callable

import torch

from popdist.switches import require_switches, require_switches_or_none
from strategies.compat.poptorch.optimizer_base import (
    Group,
    OneByOne,
    Optimizer,
    Parameters,
    VariableAttributes,
    own_arguments,
)
from strategies.errors import StrategyError

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]


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
        own, dtypes = own_arguments(named)
        of_pytorch: Callable[..., None] = super().__init__
        of_pytorch(params, self._usual_lr if lr is None else lr, *arguments, **own)
        self._take(loss_scaling, max_grad_norm, own, dtypes)


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
        unknown, dtypes = own_arguments(named)
        if unknown:
            raise TypeError(f"LAMB has no argument {', '.join(unknown)}; it has {', '.join(LAMB_DEFAULTS)}")
        numbers = (lr, betas, eps, weight_decay, bias_correction, max_weight_norm)
        given = {name: value for name, value in zip(LAMB_DEFAULTS, numbers, strict=True) if value is not None}
        super().__init__(params, {**LAMB_DEFAULTS, **given})
        self._take(loss_scaling, max_grad_norm, given, dtypes)

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
