"""PopTorch's optimizers: those of PyTorch, with scaled losses and a limit for the norm of gradients; and LAMB."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from strategies.errors import StrategyError

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
    """

    loss_scaling: float = 1.0
    max_grad_norm: float | None = None

    def _take(self, loss_scaling: float | None, max_grad_norm: float | None) -> None:
        self.loss_scaling = 1.0 if loss_scaling is None else float(loss_scaling)
        self.max_grad_norm = max_grad_norm

    @property
    def is_elementwise(self) -> bool:
        """Whether its state may be sharded."""
        return self.max_grad_norm is None


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
        super().__init__(params, lr, *arguments, **_without_effect(named))
        self._take(loss_scaling, max_grad_norm)


class Adam(_Scaled, torch.optim.Adam):
    """`torch.optim.Adam` with `loss_scaling` and `max_grad_norm`; see `SGD`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *arguments: Any,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        super().__init__(params, lr, *arguments, **_without_effect(named))
        self._take(loss_scaling, max_grad_norm)


class AdamW(_Scaled, torch.optim.AdamW):
    """`torch.optim.AdamW` with `loss_scaling` and `max_grad_norm`; see `SGD`. `bias_correction` is always on."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *arguments: Any,
        bias_correction: bool = True,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        if not bias_correction:
            raise StrategyError("AdamW without bias correction is not there; LAMB(bias_correction=False) is")
        super().__init__(params, lr, *arguments, **_without_effect(named))
        self._take(loss_scaling, max_grad_norm)


class RMSprop(_Scaled, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with `loss_scaling` and `max_grad_norm`; see `SGD`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *arguments: Any,
        use_tf_variant: bool = False,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        if use_tf_variant:
            raise StrategyError("the variant of TensorFlow is not there; use_tf_variant=False is PyTorch's RMSprop")
        super().__init__(params, lr, *arguments, **_without_effect(named))
        self._take(loss_scaling, max_grad_norm)


class LAMB(_Scaled, torch.optim.Optimizer):
    """Adam whose change of each parameter is scaled to the parameter's norm.

    Semantics: You et al., Large Batch Optimization for Deep Learning, ICLR 2020, with PopTorch's arguments.

    Args:
        params: to be optimized.
        lr: learning rate.
        bias_correction: of the moments.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: added to the change before it is scaled.
        max_weight_norm: the most that counts as the norm of a parameter.
        loss_scaling: see `SGD`.
        max_grad_norm: see `SGD`.
        named: dtypes of states, which change nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_weight_norm: float = math.inf,
        loss_scaling: float | None = None,
        max_grad_norm: float | None = None,
        **named: Any,
    ) -> None:
        _without_effect(named)
        self._take(loss_scaling, max_grad_norm)
        numbers = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "max_weight_norm": max_weight_norm, **numbers})

    @property
    def is_elementwise(self) -> bool:
        """No: it looks at norms of parameters."""
        return False

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        if group["bias_correction"]:
            first = first / (1 - beta1 ** state["step"].item())
            second = second / (1 - beta2 ** state["step"].item())
        change = first / (second.sqrt() + group["eps"])
        if group["weight_decay"]:
            change = change.add(parameter, alpha=group["weight_decay"])
        size, length = parameter.norm().clamp(max=group["max_weight_norm"]), change.norm()
        ratio = (size / length).item() if size > 0 and length > 0 else 1.0
        parameter.add_(change, alpha=-group["lr"] * ratio)
