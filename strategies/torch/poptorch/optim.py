"""PopTorch's optimizers: those of PyTorch, with scaled losses and a limit for the norm of gradients; and LAMB."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from strategies.errors import StrategyError
from strategies.switches import require_switches, require_switches_or_none

logger = logging.getLogger(__name__)

_NAMES = (
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
    "velocity_scaling",
    "use_combined_accum",
)
_told: set[str] = set()


class VariableAttributes:
    """Which numbers of an optimizer were said to change: `optimizer.variable_attrs`. All of them may, said or not.

    Args:
        variable: the names of those that were given when the optimizer was made.
        known: the names of all.
    """

    def __init__(self, variable: Iterable[str], known: Iterable[str]) -> None:
        self._known = tuple(known)
        self._variable = {name for name in variable if name in self._known}

    def isConstant(self, attr: str) -> bool:
        """Whether it was not said to change."""
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Say that it does not change; it stays to be read at every update.

        Raises:
            ValueError: if there is none of that name.
        """
        self._variable.discard(self._checked(attr))

    def markAsVariable(self, attr: str) -> None:
        """Say that it changes.

        Raises:
            ValueError: if there is none of that name.
        """
        self._variable.add(self._checked(attr))

    def _checked(self, attr: str) -> str:
        if attr not in self._known:
            raise ValueError(f"the optimizer has no attribute {attr!r}; there are {', '.join(self._known)}")
        return attr


def _without_effect(named: dict[str, Any]) -> dict[str, Any]:
    """What PyTorch's optimizer takes of arguments, without None; others that PopTorch's takes are named once."""
    given = {name: value for name, value in named.items() if value is not None}
    for name in _NAMES:
        if given.pop(name, None) is not None and name not in _told:
            _told.add(name)
            logger.info("%s of an optimizer changes nothing here: states have the dtypes of their parameters", name)
    return given


class _Scaled:
    """What PopTorch's optimizers have besides.

    Attributes:
        loss_scaling: by which losses are multiplied for backward passes, and mean gradients divided.
        max_grad_norm: to which all mean gradients together are clipped; None: to none.
        variable_attrs: see there.
    """

    defaults: dict[str, Any]

    loss_scaling: float = 1.0
    max_grad_norm: float | None = None

    def _take(self, loss_scaling: float | None, max_grad_norm: float | None, given: Iterable[str]) -> None:
        self.loss_scaling = 1.0 if loss_scaling is None else float(loss_scaling)
        self.max_grad_norm = None if max_grad_norm == math.inf else max_grad_norm
        said = ["lr", *given] if loss_scaling is None else ["lr", "loss_scaling", *given]
        self.variable_attrs = VariableAttributes(said, [*self.defaults, "loss_scaling"])

    @property
    def is_elementwise(self) -> bool:
        """Whether its state may be sharded."""
        return self.max_grad_norm is None


class _OneByOne(torch.optim.Optimizer, ABC):
    """Updates each parameter that has a gradient by itself: see `_update`."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Put the new value of a parameter of any shape in its place."""


class SGD(_Scaled, torch.optim.SGD):
    """`torch.optim.SGD` with `loss_scaling` and `max_grad_norm`; dtypes of states are accepted and change nothing."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *arguments: Any,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        own = _without_effect(named)
        super().__init__(params, lr, *arguments, **own)
        self._take(loss_scaling, max_grad_norm, own)


class Adam(_Scaled, torch.optim.Adam):
    """`torch.optim.Adam` with `loss_scaling` and `max_grad_norm`; see `SGD`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = 1e-3,
        *arguments: Any,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        own = _without_effect(named)
        super().__init__(params, 1e-3 if lr is None else lr, *arguments, **own)
        self._take(loss_scaling, max_grad_norm, own)


class AdamW(_Scaled, torch.optim.AdamW):
    """`torch.optim.AdamW` with `loss_scaling` and `max_grad_norm`; see `SGD`. `bias_correction` is always on."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = 1e-3,
        *arguments: Any,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        require_switches_or_none(bias_correction=bias_correction)
        if bias_correction is False:
            raise StrategyError("AdamW without bias correction is not there; LAMB(bias_correction=False) is")
        own = _without_effect(named)
        super().__init__(params, 1e-3 if lr is None else lr, *arguments, **own)
        self._take(loss_scaling, max_grad_norm, own)


class RMSprop(_Scaled, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with `loss_scaling` and `max_grad_norm`; see `SGD`.

    With `use_tf_variant` it is TensorFlow's: the mean of squares begins with ones, `eps` is added before the root is
    taken, and the momentum adds up changes of the parameters, each with the learning rate of its step.
    """

    def __new__(cls, *arguments: Any, use_tf_variant: bool = False, **named: Any) -> RMSprop:
        """Of a class of its own where it is TensorFlow's."""
        require_switches(use_tf_variant=use_tf_variant)
        made: RMSprop = super().__new__(RMSpropOfTensorFlow if use_tf_variant else cls)
        return made

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = 1e-2,
        *arguments: Any,
        use_tf_variant: bool = False,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        own = _without_effect(named)
        super().__init__(params, 1e-2 if lr is None else lr, *arguments, **own)
        self._take(loss_scaling, max_grad_norm, own)


class RMSpropOfTensorFlow(_OneByOne, RMSprop):
    """What `RMSprop(..., use_tf_variant=True)` is."""

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
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


LAMB_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "bias_correction": True,
    "max_weight_norm": 65500.0,
}


class LAMB(_OneByOne, _Scaled, torch.optim.Optimizer):
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
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        require_switches_or_none(bias_correction=bias_correction)
        if unknown := _without_effect(named):
            raise TypeError(f"LAMB has no argument {', '.join(unknown)}; it has {', '.join(LAMB_DEFAULTS)}")
        given = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
        }
        given = {name: value for name, value in given.items() if value is not None}
        super().__init__(params, {**LAMB_DEFAULTS, **given})
        self._take(loss_scaling, max_grad_norm, given)

    @property
    def is_elementwise(self) -> bool:
        """No: it looks at norms of parameters."""
        return False

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["bias_correction"]:
            first = first / (1 - beta1 ** state["step"].item())
            second = second / (1 - beta2 ** state["step"].item())
        change = first / (second.sqrt() + group["eps"])
        if group["weight_decay"]:
            change = change.add(parameter, alpha=group["weight_decay"])
        size, length = parameter.norm().clamp(max=group["max_weight_norm"]), change.norm()
        ratio = (size / length).item() if size > 0 and length > 0 else 1.0
        parameter.add_(change, alpha=-group["lr"] * ratio)
