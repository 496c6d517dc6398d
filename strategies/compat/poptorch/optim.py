"""PopTorch's optimizers: those of PyTorch, with scaled losses and a limit for the norm of gradients; and LAMB."""

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
    """The learning rate where none is given."""
    _variant: str | None = None
    """The name of the argument by which `__new__` chooses a subclass, and which PyTorch's optimizer does not take."""

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
            raise TypeError(f"{type(self).__name__} needs a learning rate: lr=0.01, say")
        if self._variant is not None:
            named.pop(self._variant, None)
        own, dtypes = own_arguments(named)
        of_pytorch: Callable[..., None] = super().__init__
        of_pytorch(params, self._usual_lr if lr is None else lr, *arguments, **own)
        self._take(loss_scaling, max_grad_norm, own, dtypes)


class SGD(_OfPyTorch, torch.optim.SGD):
    """`torch.optim.SGD` with `loss_scaling`, `max_grad_norm` and dtypes of its state; see `Optimizer`."""


class Adam(_OfPyTorch, torch.optim.Adam):
    """`torch.optim.Adam` with `loss_scaling` and `max_grad_norm`; see `SGD`."""

    _usual_lr = 1e-3


class AdamW(_OfPyTorch, torch.optim.AdamW):
    """`torch.optim.AdamW` with `loss_scaling` and `max_grad_norm`; see `SGD`.

    With `bias_correction=False` the moments are taken as they are.
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
            raise StrategyError("amsgrad keeps the largest of corrected moments; use it with bias_correction=True")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group) -> None:
        gradient = -gradient if group["maximize"] else gradient
        first, second = _moments(self.state[parameter], parameter, gradient, group["betas"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])


class RMSprop(_OfPyTorch, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with `loss_scaling` and `max_grad_norm`; see `SGD`.

    With `use_tf_variant` it is TensorFlow's: the mean of squares begins with ones, `eps` is added before the root is
    taken, and the momentum adds up changes of the parameters, each with the learning rate of its step.
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
    """Adam whose change of each parameter is scaled to the parameter's norm.

    Semantics: You et al., Large Batch Optimization for Deep Learning, ICLR 2020, with PopTorch's arguments.

    Args:
        params: to be optimized.
        lr: learning rate; 0.001.
        betas: decay of the moments; (0.9, 0.999).
        eps: added to the root of the second moment; 1e-8.
        weight_decay: added to the change before it is scaled; 0.01.
        bias_correction: of the moments; True.
        loss_scaling: see `SGD`.
        max_weight_norm: the most that counts as the norm of a parameter; 65500.
        max_grad_norm: see `SGD`.
        named: dtypes of states, which change nothing.
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
        """Whether its state may be sharded: False, as it looks at norms of parameters."""
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
    """Move on the two moments of Adam in the state of a parameter, and return them without correction."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    first = state["exp_avg"].lerp_(gradient, 1 - betas[0])
    second = state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return first, second
