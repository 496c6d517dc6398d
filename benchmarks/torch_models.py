"""PyTorch modules that benchmarks train, and their training steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import strategies
import strategies.torch

Step = Callable[[], object]
BATCH = 64
WORDS, LENGTH = 1031, 16


class Block(nn.Module):
    """A block of causal attention and a wide hidden layer, each after a normalisation and with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.GELU("tanh"), nn.Linear(3 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, with the shape of its input, [rows, length, width]."""
        query, key, value = self.qkv(self.norm(x)).unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.wide(x))


class Transformer(nn.Module):
    """The transformer of `tests/zoo`: two blocks of width 64, and one table for tokens and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(WORDS, 64), nn.Parameter(torch.randn(LENGTH, 64))
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4), nn.RMSNorm(64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens, [rows, WORDS, length], for tokens [rows, length]."""
        hidden = self.blocks(self.words(words) + self.position)
        return (hidden @ self.words.weight.T).transpose(1, 2)


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1352, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 10)).to(memory_format=torch.channels_last)


def mlp() -> nn.Module:
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


MODELS = {"cnn": cnn, "mlp": mlp, "transformer": Transformer}


def batch_of(name: str, rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels; for the transformer, tokens and next tokens."""
    if name == "transformer":
        words = torch.randint(0, WORDS, (rows, LENGTH + 1))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()
    images = torch.randn(rows, 1, 28, 28).to(memory_format=torch.channels_last)
    return images, torch.randint(0, 10, (rows,))


class WithLoss(nn.Module):
    """A module that also returns the loss, for PopTorch's interface."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the loss."""
        output = self.module(x)
        return output, F.cross_entropy(output, y)


def in_a_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, fused: bool) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def by_trainer(strategy: strategies.Strategy, module: nn.Module, x: torch.Tensor, y: torch.Tensor, fused: bool) -> Step:
    optimizer = torch.optim.Adam(module.parameters(), fused=fused)
    trainer = strategies.torch.Trainer(
        strategy, module, lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]), optimizer
    )
    return lambda: trainer.step((x, y))
