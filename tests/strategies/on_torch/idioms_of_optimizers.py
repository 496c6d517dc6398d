"""Optimizers, schedules, and changes of gradients before an update."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from idiom import STEPS, Idiom, mlp
from idioms_of_modules import layered
from torch import nn
from torch.optim import lr_scheduler, swa_utils

Steps = Generator[None, float, None]


def of(kind: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a maker of an optimizer of `torch.optim` for all parameters."""
    return lambda module: getattr(torch.optim, kind)(module.parameters(), **options)


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with two parameter groups."""
    first, last = module[0], module[3]
    groups = [{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters(), "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, 0.1)


def of_matrices(module: nn.Module) -> torch.optim.Optimizer:
    """Make Muon, which takes matrices only."""
    return torch.optim.Muon([one for one in module.parameters() if one.ndim == 2], 0.02)


def of_first_layer(module: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of the first layer; gradients of the other layers are never applied."""
    return torch.optim.SGD(module[0].parameters(), 0.1)


class Signs(torch.optim.Optimizer):
    """An optimizer of the program's own, with a state of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each parameter by the sign of its mean gradient."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    state["seen"] = {"steps"}  # a state that is no tensor
                    state["mean"] = state.get("mean", torch.zeros_like(one)).lerp(one.grad, 0.5)
                    one.sub_(state["mean"].sign(), alpha=group["lr"])


def scheduled(make: Callable[[Any], Any], *, by_loss: bool = False) -> Callable[[nn.Module, Any], Steps]:
    """Return a program with a learning-rate schedule."""

    def program(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
        schedule = make(optimizer)
        for _ in range(STEPS):
            loss = yield
            schedule.step(1.0 + 0 * loss) if by_loss else schedule.step()

    return program


def added_later(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Add a parameter group between steps."""
    yield
    optimizer.add_param_group({"params": list(module[3].parameters()), "lr": 0.5})
    yield
    yield


def rate_set(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Set the learning rate by hand."""
    for number in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        yield


def loaded(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Set the state of module and optimizer back by a step."""
    yield
    states = [{name: one.clone() for name, one in module.state_dict().items()}, optimizer.state_dict()]
    yield
    module.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    yield


def averaged(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Load the mean of stochastic weight averaging into the module."""
    mean = swa_utils.AveragedModel(module)
    for _ in range(STEPS):
        yield
        mean.update_parameters(module)
    module.load_state_dict(mean.module.state_dict())


def moving(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Keep a moving mean of the weights beside the module, and load it at the end."""
    mean = [one.detach().clone() for one in module.parameters()]
    for _ in range(STEPS):
        yield
        torch._foreach_lerp_(mean, list(module.parameters()), 0.1)
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(mean), module.parameters())


def clipped(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.2)


def clipped_by_value(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.05)


def centralised(module: nn.Module) -> None:
    """Replace gradients by centralised ones."""
    for one in module.parameters():
        if one.ndim > 1:
            one.grad = one.grad - one.grad.mean(1, keepdim=True)


def step_hooked(module: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Register hooks of the optimizer that change gradients and parameters."""
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(module.parameters(), 0.1))
    optimizer.register_step_post_hook(lambda *_: module[0].weight.data.clamp_(-0.3, 0.3))
    yield from (None for _ in range(STEPS))


KINDS = {
    "SGD": {"lr": 0.1}, "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "SGD with Nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "SGD up": {"lr": 0.1, "maximize": True},
    "Adam": {}, "Adam foreach": {"foreach": True}, "Adam fused": {"fused": True},
    "Adam with a tensor": {"lr": torch.tensor(0.01), "foreach": False},
    "AdamW": {"amsgrad": True}, "Adagrad": {}, "RMSprop": {"momentum": 0.5, "centered": True}, "Rprop": {}, "ASGD": {},
    "NAdam": {}, "RAdam": {}, "Adadelta": {}, "Adamax": {}, "Adafactor": {},
}  # fmt: skip

OPTIMIZERS = [
    *(Idiom(name, optimizer=of(name.split()[0], **options)) for name, options in KINDS.items()),
    Idiom("Muon", optimizer=of_matrices),
    Idiom("LBFGS", optimizer=of("LBFGS"), refused="LBFGS computes the loss several times"),
    Idiom("an optimizer of one's own", optimizer=lambda module: Signs(module.parameters(), 0.01)),
    Idiom("groups with rates of their own", optimizer=grouped),
    Idiom("an optimizer of some layers", optimizer=of_first_layer),
    Idiom("a group that is added between steps", optimizer=of_first_layer, program=added_later),
    Idiom("StepLR", program=scheduled(lambda own: lr_scheduler.StepLR(own, 1, 0.5))),
    Idiom("OneCycleLR", program=scheduled(lambda own: lr_scheduler.OneCycleLR(own, 0.2, total_steps=STEPS + 1))),
    Idiom("CosineAnnealingLR", program=scheduled(lambda own: lr_scheduler.CosineAnnealingLR(own, STEPS))),
    Idiom("LambdaLR", program=scheduled(lambda own: lr_scheduler.LambdaLR(own, lambda step: 1 / (step + 1)))),
    Idiom("warm-up, then cosine", program=scheduled(lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.5, total_iters=1), lr_scheduler.CosineAnnealingLR(own, 2)], [1]))),
    Idiom("ReduceLROnPlateau", program=scheduled(lambda own: lr_scheduler.ReduceLROnPlateau(own, patience=0),
                                                 by_loss=True)),
    Idiom("a rate that is set by hand", program=rate_set),
    Idiom("states that are loaded between steps", optimizer=of("Adam", lr=0.1), program=loaded),
    Idiom("stochastic weight averaging", program=averaged),
    Idiom("a moving mean of weights", program=moving),
    Idiom("gradients clipped by norm", options={"before_update": clipped}),
    Idiom("gradients clipped by value", options={"before_update": clipped_by_value}),
    Idiom("gradients that are centralised", options={"before_update": centralised}),
    Idiom("hooks of the optimizer", program=step_hooked),
    Idiom("sharded state", optimizer=of("Adam", lr=0.1), options={"replicated_optimizer_state_sharding": True},
          module=lambda: layered(nn.BatchNorm1d(6), nn.Tanh())),
    Idiom("gradients that leave at once", mlp, options={"stream_gradients": True}),
]  # fmt: skip
