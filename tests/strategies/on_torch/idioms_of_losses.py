"""Losses, batches and backward passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from idiom import CLASSES, FEATURES, WORDS, Apply, Idiom, classify, mlp
from idioms_of_modules import HEAD, layered, listed
from torch import nn
from torch.func import functional_call

Batch = Any


def smooth() -> nn.Module:
    """Make an MLP that can be differentiated twice."""
    return layered(nn.Tanh())


def twice(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Add two losses of one forward pass."""
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + 0.1 * logits.square().mean()


def siamese(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Compare two forward passes, one without gradients."""
    with torch.no_grad():
        target = module(batch["x"].flip(1))
    return (module(batch["x"]) - target).square().mean() + module(batch["x"] * 2).detach().mean()


def penalised(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Add a penalty on the norm of the gradient by the input, which is differentiated once more."""
    x = batch["x"].clone().requires_grad_()
    loss = F.cross_entropy(module(x), batch["y"])
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def penalised_by_weights(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Add a penalty on the norm of the gradient by the weights, which is differentiated once more."""
    loss = F.cross_entropy(module(batch["x"]), batch["y"])
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    return loss + sum(one.square().sum() for one in gradients)


def decayed(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Add a penalty on the weights to the loss."""
    return classify(module, batch) + 0.01 * sum(one.square().sum() for one in module.parameters())


def inner_step(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Make a step of an inner optimization, as MAML does."""
    own = dict(module.named_parameters())
    inner = F.cross_entropy(functional_call(module, own, (batch["x"],)), batch["y"])
    gradients = torch.autograd.grad(inner, list(own.values()), create_graph=True)
    moved = {name: one - 0.1 * gradient for (name, one), gradient in zip(own.items(), gradients, strict=True)}
    return F.cross_entropy(functional_call(module, moved, (batch["x"].flip(0),)), batch["y"].flip(0))


def backward_twice(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Keep the graph for a second pass."""
    loss = classify(module, batch)
    first = next(module.parameters())
    (gradient,) = torch.autograd.grad(loss, first, retain_graph=True)
    return loss * (1 + gradient.detach().norm())


def per_row(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the gradients of each row with `vmap`."""
    own = dict(module.named_parameters())

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(module, parameters, (x[None],)), y[None])

    rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(own, batch["x"], batch["y"])
    return classify(module, batch) + 0.01 * sum(one.square().sum() for one in rows.values())


def in_16_bits(module: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(module(batch["x"]), batch["y"])


def noisy(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Draw random numbers in the loss."""
    x = F.dropout(batch["x"], 0.2) + 0.1 * torch.randn_like(batch["x"])
    mixed = x[torch.randperm(len(x))]
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return F.cross_entropy(module(share * x + (1 - share) * mixed), batch["y"])


def some_unused(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Use the last layer on the first replica alone."""
    hidden = module[:3](batch["x"])
    is_first = torch.equal(batch["x"], torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0))[:2])
    return (module[3](hidden) if is_first else hidden).mean()


class Pair(NamedTuple):
    """A batch of the program's own type."""

    x: torch.Tensor
    rest: list[torch.Tensor]


def regrouped(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Pass tuples, lists and dictionaries of integers and truth values to the module and back."""
    x, (words, flags) = module(Pair(batch["x"], [batch["words"], batch["words"] > 4]))["logits"], batch_parts(batch)
    return F.cross_entropy(x, batch["y"]) + 0 * (words.sum() + flags.sum())


def batch_parts(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["words"], batch["x"] > 0


def of_pairs() -> nn.Module:
    """Make a module that takes a tuple and returns a dictionary."""
    return Apply(
        lambda self, pair: {"logits": self.last(pair.x) * pair.rest[1].any() + self.table(pair.rest[0])[:, 0]},
        last=nn.Linear(FEATURES, CLASSES),
        table=nn.Embedding(WORDS, CLASSES),
    )


def adversarial(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Attack the input by the sign of its gradient; the gradients of the weights start again from zero."""
    x = batch["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(classify(module, {**batch, "x": x}), x)
    return classify(module, {**batch, "x": batch["x"] + 0.1 * gradient.sign()})


def by_hooks(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Penalize a hidden layer, which a hook of this pass has caught."""
    caught = []
    handle = module[0].register_forward_hook(lambda *given: caught.append(given[-1]))
    loss = classify(module, batch)
    handle.remove()
    return loss + 0.1 * caught[0].square().mean()


def frozen_inside(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Compare the module with a frozen copy that the loss makes."""
    with torch.no_grad():
        before = functional_call(module, {n: p.detach() for n, p in module.named_parameters()}, (batch["x"],))
    return F.kl_div(module(batch["x"] + 0.1).log_softmax(1), before.softmax(1), reduction="batchmean")


OUTER = smooth()  # no Trainer has this module


LOSSES = [
    Idiom("two losses", loss=twice),
    Idiom("a loss of shape [1]", smooth, lambda module, batch: classify(module, batch)[None]),
    Idiom("a loss in double precision", smooth, lambda module, batch: classify(module, batch).double()),
    Idiom("a loss with metrics", smooth, lambda module, batch: (classify(module, batch), {"one": 1.0})),
    Idiom("a loss with outputs", smooth, lambda module, batch: (classify(module, batch), {}, {"x": batch["x"]})),
    Idiom("a loss that is no number", smooth, lambda module, batch: module(batch["x"]),
          refused="return a floating-point scalar"),
    Idiom("a loss of another module", smooth, lambda module, batch: classify(OUTER, batch), is_plain=False,
          refused="no parameter of the module has a gradient"),
    Idiom("two passes, one without gradients", loss=siamese, loops=False),
    Idiom("a gradient penalty of the input", smooth, penalised),
    Idiom("a gradient penalty of the weights", smooth, penalised_by_weights, loops=False),
    Idiom("a penalty of the weights", smooth, decayed),
    Idiom("an inner step", smooth, inner_step, loops=False),
    Idiom("a graph that is kept", smooth, backward_twice, loops=False),
    Idiom("gradients of each row", smooth, per_row, loops=False),
    Idiom("an attack on the input", smooth, adversarial, loops=False),
    Idiom("functional_call with tensors that are detached", smooth, frozen_inside, loops=False),
    Idiom("autocast in the loss", smooth, in_16_bits),
    Idiom("autocast as an option", smooth, options={"compute_dtype": "bfloat16"}, is_plain=False),
    Idiom("losses that are scaled", smooth, options={"loss_scaling": 1024.0}),
    Idiom("losses that are scaled by need", smooth, options={"loss_scaling": "dynamic"}),
    Idiom("random numbers in the loss", smooth, noisy, loops=False),
    Idiom("parameters that some replicas use", mlp, some_unused,
          refused=r"has no gradient on the replicas \[1, 2, 3\]"),
    Idiom("trees of integers and truth values", of_pairs, regrouped),
    Idiom("a hook of one pass", smooth, by_hooks, loops=False),
    Idiom("a pass through a part", listed, lambda module, batch: F.cross_entropy(
        module.heads["right"](torch.tanh(batch["x"] @ module.weights[0])), batch["y"]), loops=False),
    Idiom("gradients through an embedding bag of weights", lambda: Apply(
        lambda self, words: self.last(F.embedding_bag(words, self.table, mode="sum")),
        table=nn.Parameter(torch.randn(WORDS, 6)), last=HEAD()),
        lambda module, batch: F.cross_entropy(module(batch["words"]), batch["y"])),
]  # fmt: skip
