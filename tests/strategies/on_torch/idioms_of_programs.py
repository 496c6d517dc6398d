"""Hooks, and changes that programs make between steps."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from idiom import CLASSES, FEATURES, STEPS, Apply, Idiom, classify, drawn, hooked, mlp
from idioms_of_modules import HEAD, layered
from torch import nn

Steps = Generator[None, float, None]


def smooth() -> nn.Module:
    return layered(nn.Tanh())


def normed() -> nn.Module:
    return layered(nn.BatchNorm1d(6), nn.Tanh())


# ---- hooks


def masked() -> nn.Module:
    """Mask a gradient with a hook of the parameter."""
    module = smooth()
    module[0].weight.register_hook(lambda gradient: gradient * (torch.arange(6) < 3)[:, None])
    return module


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def scaled_after() -> nn.Module:
    """Change a gradient once it is complete."""
    module = smooth()
    module[0].weight.register_post_accumulate_grad_hook(halve)
    return module


def hooked_forward() -> nn.Module:
    """Change a layer's output with one hook and its input with another."""
    module = smooth()
    module[0].register_forward_hook(lambda layer, given, output: output * 2)
    module[2].register_forward_pre_hook(lambda layer, given: (given[0] + 1,))
    return module


def hooked_backward() -> nn.Module:
    """Change the gradient that flows back with a hook."""
    module = smooth()
    module[1].register_full_backward_hook(lambda layer, given, gradients: (given[0] * 0.5,))
    module[1].register_full_backward_pre_hook(lambda layer, gradients: (gradients[0] * 3,))
    return module


def watched() -> nn.Module:
    """Keep a hidden value in the module with a hook, and add it to the loss."""
    module = smooth()
    module[0].register_forward_hook(lambda layer, given, output: setattr(layer, "seen", output))
    return module


def with_what_was_seen(module: nn.Module, batch: Any) -> torch.Tensor:
    return classify(module, batch) + 0.1 * module[0].seen.square().mean()


def hooked_everywhere(module: nn.Module, optimizer: Any) -> Steps:
    """Register a hook of all modules that changes nothing."""
    seen = []
    with hooked(nn.modules.module.register_module_forward_hook(lambda *given: seen.append(type(given[0])))):
        yield from uneventful()
    assert nn.Tanh in seen


def uneventful() -> Steps:
    for _ in range(STEPS):
        yield


def hooked_later(module: nn.Module, optimizer: Any) -> Steps:
    """Register a hook between steps, and remove it."""
    yield
    with hooked(module[0].register_forward_hook(lambda layer, given, output: output * 2)):
        yield
    yield


class Registers(nn.Module):
    """A module that registers hooks of tensors in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 6), HEAD()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return self.last(hidden)


def prefixed() -> nn.Module:
    """Register hooks of the state dictionary."""
    module = smooth()
    module.register_state_dict_post_hook(lambda own, state, *_: state.update(extra=torch.ones(1)))
    return module


# ---- changes between steps


def thawed(module: nn.Module, optimizer: Any) -> Steps:
    """Train a layer from the second step on."""
    module[0].requires_grad_(False)
    yield
    module[0].requires_grad_(True)
    yield
    yield


def frozen(module: nn.Module, optimizer: Any) -> Steps:
    """Train a layer in the first step only."""
    yield
    module[0].requires_grad_(False)
    yield
    yield


def frozen_first() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)
    return module


def thawed_later(module: nn.Module, optimizer: Any) -> Steps:
    """Thaw a layer that was frozen when the module was made."""
    yield
    module[0].requires_grad_(True)
    yield
    yield


def replaced(module: nn.Module, optimizer: Any) -> Steps:
    """Replace a layer with its parameters, and add them to the optimizer."""
    yield
    module[-1] = drawn(HEAD)
    optimizer.add_param_group({"params": list(module[-1].parameters())})
    yield
    yield


def activation_replaced(module: nn.Module, optimizer: Any) -> Steps:
    """Replace a layer without parameters."""
    yield
    module[1] = nn.ReLU()
    yield
    yield


def moved(module: nn.Module, optimizer: Any) -> Steps:
    """Move parameters to other memory."""
    yield
    module[0].weight.data = module[0].weight.data.clone() * 2
    yield
    module[0].bias.data = torch.zeros(6)
    yield


def edited(module: nn.Module, optimizer: Any) -> Steps:
    """Change parameters in place."""
    for _ in range(STEPS):
        yield
        with torch.no_grad():
            module[0].weight.clamp_(-0.2, 0.2)
            module[0].bias.fill_(0.1)


def loaded(module: nn.Module, optimizer: Any) -> Steps:
    """Load parameters and buffers between steps."""
    before = {name: one.clone() for name, one in module.state_dict().items()}
    yield
    yield
    module.load_state_dict(before)
    yield


def assigned(module: nn.Module, optimizer: Any) -> Steps:
    """Load buffers by assignment, without a copy."""
    before = {name: one.clone() for name, one in module[1].state_dict().items() if "running" in name}
    yield
    module[1].load_state_dict(before, strict=False, assign=True)
    yield
    yield


def buffers_edited(module: nn.Module, optimizer: Any) -> Steps:
    """Change buffers in place, and replace them."""
    yield
    module[1].running_mean.zero_()
    module[1].reset_running_stats()
    yield
    module[1].running_var = torch.full((6,), 2.0)
    yield


def constant_replaced(module: nn.Module, optimizer: Any) -> Steps:
    """Replace a buffer that the forward pass only reads, then change it in place."""
    yield
    module.scale = torch.full((FEATURES,), 3.0)
    yield
    module.scale.fill_(0.25)
    yield


def scaled() -> nn.Module:
    return Apply(lambda self, x: self.last(x * self.scale), last=nn.Linear(FEATURES, CLASSES),
                 scale=torch.ones(FEATURES))  # fmt: skip


def rate_changed(module: nn.Module, optimizer: Any) -> Steps:
    """Change an attribute that is a number."""
    yield
    module[2].p = 0.9
    yield
    module[2].p = 0.0
    yield


def modes_changed(module: nn.Module, optimizer: Any) -> Steps:
    yield
    module.eval()
    yield
    module.train()
    yield


def attribute_changed(module: nn.Module, optimizer: Any) -> Steps:
    """Change attributes that are lists, functions and tensors."""
    yield
    module.widths.append(2.0)
    module.scales["left"].gain = 3.0
    yield
    module.function = lambda self, x: self.last(x) * sum(self.widths)
    yield


def with_lists() -> nn.Module:
    module = Apply(
        lambda self, x: self.last(x) * self.scales["left"].gain / sum(self.widths), last=nn.Linear(FEATURES, CLASSES)
    )
    module.widths = [1.0, 2.0]
    module.scales = {"left": SimpleNamespace(gain=1.0)}
    return module


def used_between(module: nn.Module, optimizer: Any) -> Steps:
    """Compute with gradients between steps: statistics of the module change, its gradients stay."""
    x = torch.ones(4, FEATURES)
    for _ in range(STEPS):
        yield
        F.mse_loss(module(x), torch.zeros(4, CLASSES)).backward()
        with torch.no_grad():
            module.eval()(x)
        module.train()


def reset(module: nn.Module, optimizer: Any) -> Steps:
    """Draw the parameters of a layer anew."""
    yield
    with torch.no_grad():
        for one, other in zip(module[-1].parameters(), drawn(HEAD).parameters(), strict=True):
            one.copy_(other)
    yield
    yield


HOOKS = [
    Idiom("a gradient that a hook masks", masked),
    Idiom("a hook on complete gradients", scaled_after),
    Idiom("hooks that change what layers return", hooked_forward),
    Idiom("hooks of backward passes", hooked_backward),
    Idiom("a hook that keeps what it sees", watched, with_what_was_seen, loops=False),
    Idiom("a hook of all modules", program=hooked_everywhere),
    Idiom("a hook that comes between steps", smooth, program=hooked_later),
    Idiom("hooks of tensors in forward", Registers),
    Idiom("hooks of the state's dictionary", prefixed),
]

CHANGES = [
    Idiom("a layer that is thawed", mlp, program=thawed),
    Idiom("a layer that was frozen when it was made", frozen_first, program=thawed_later),
    Idiom("a layer that is frozen", mlp, program=frozen),
    Idiom("sharded state, and a layer that is frozen", mlp, program=frozen,
          optimizer=lambda module: torch.optim.Adam(module.parameters(), 0.1),
          options={"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 4}),
    Idiom("a layer that is replaced", mlp, program=replaced),
    Idiom("an activation that is replaced", mlp, program=activation_replaced),
    Idiom("parameters with other memory", mlp, program=moved),
    Idiom("parameters that are edited", mlp, program=edited),
    Idiom("sharded state, and parameters that are edited", mlp, program=edited,
          options={"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 4}),
    Idiom("states that are loaded", normed, program=loaded),
    Idiom("buffers that are loaded as they are", normed, program=assigned),
    Idiom("buffers that are edited", normed, program=buffers_edited),
    Idiom("a constant that is replaced", scaled, program=constant_replaced),
    Idiom("a rate of dropout that changes", mlp, program=rate_changed),
    Idiom("modes that change", normed, program=modes_changed),
    Idiom("attributes that change", with_lists, program=attribute_changed),
    Idiom("a module that is used between steps", normed, program=used_between, loops=False),
    Idiom("a layer that is reset", mlp, program=reset),
]  # fmt: skip
