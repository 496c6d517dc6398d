"""A small language model whose loss is a mean over tokens, rows of unequal lengths, and its training in one process."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import strategies
import strategies.torch

IGNORED = -100
WORDS, ROWS, LENGTH = 11, 36, 9
STEPS = 2
LR = 0.5


torch.manual_seed(3)
_MODEL = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))


def new_model():
    """Return the same model at each call, in any thread."""
    return copy.deepcopy(_MODEL)


def data():
    """Return rows of tokens; the first three have none that counts, and others have one to nine."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    lengths[:3] = 0
    return {"x": x, "y": x.roll(1, 1).masked_fill(torch.arange(LENGTH) >= lengths[:, None], IGNORED)}


def mean_over_tokens(module, batch):
    """Return the loss and the number of tokens. Without tokens the loss and its gradients are NaN."""
    logits, targets = module(batch["x"]).flatten(0, 1), batch["y"].flatten()
    is_token = targets != IGNORED
    of_each = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    return (of_each * is_token).sum() / is_token.sum(), is_token.sum()


def loss_fn(module, batch):
    loss, tokens = mean_over_tokens(module, batch)
    return strategies.Outcome(loss, {"doubled": 2 * loss}, weight=tokens)


def part_of(strategy, batch):
    """Return the rows of the local replicas."""
    each = ROWS // strategy.num_replicas_in_sync
    local = strategy.local_replicas
    return {name: rows[local.start * each : local.stop * each] for name, rows in batch.items()}


def alone(steps=STEPS, rate=LR):
    """Return the model and its losses after steps of plain PyTorch with all rows at once."""
    model, batch = new_model(), data()
    optimizer, losses = torch.optim.SGD(model.parameters(), rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = mean_over_tokens(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def bits(model):
    return strategies.fingerprint([one.detach().numpy() for one in model.parameters()])


def check_close(model, expected, limit=1e-6):
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=limit)


def check_gradients(found, expected, limit=1e-6):
    """Compare gradients with those of a model."""
    for own, parameter in zip(found, expected.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, rtol=0, atol=limit)
