"""Small modules of many kinds, for tests."""

from __future__ import annotations

import copy
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import strategies

ROWS = 48


class Convolutions(nn.Module):
    """Convolutions with batch norm and channel dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.dropout, self.last = nn.Dropout2d(0.3), nn.Linear(36, 5)

    def forward(self, x):
        hidden = F.relu(self.norm(self.first(x[:, None])))
        return self.last(F.max_pool2d(self.dropout(hidden), 2).flatten(1))


class Transformer(nn.Module):
    """PyTorch's attention layer with dropout inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.layer(x).mean(1))


class Recurrent(nn.Module):
    """Recurrent layers whose dropout is drawn in C++."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 6, num_layers=2, dropout=0.4, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


class Embedding(nn.Module):
    """A table that is used twice, noise, and a buffer that no layer owns."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(40, 8), nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(40, dtype=torch.int64))
        self.register_buffer("constant", torch.linspace(0, 1, 7))

    def forward(self, x):
        words = (x.abs() * 9).long().clamp(max=39)
        if self.training:
            self.seen += torch.bincount(words.flatten(), minlength=40)
        noise = torch.rand(words.shape[:1], device=words.device)[:, None]
        return self.last(self.table(words).mean((1, 2)) + self.table(words[:, 0, 0]) + noise)


class Checkpointed(nn.Module):
    """Dropout in a part that the backward pass computes again."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        hidden = checkpoint(self._hidden, self.first(x.flatten(1)), use_reentrant=False)
        return self.last(hidden)

    def _hidden(self, x):
        return F.dropout(torch.tanh(self.second(x)), 0.5, self.training)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 33), nn.GELU(), nn.Dropout(0.5), nn.Linear(33, 5))


MODULES = {
    "mlp": mlp,
    "convolutions": Convolutions,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "embedding": Embedding,
    "checkpointed": Checkpointed,
}


def new_module(name):
    """Make a module with the same parameters at each call, on the main thread: all threads share one generator."""
    assert threading.current_thread() is threading.main_thread(), "make the module before the threads, and copy it"
    torch.manual_seed(3)
    return MODULES[name]()


def data(rows=ROWS):
    """Return the first rows of 8 x 8 numbers, and labels below 5."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((ROWS, 8, 8)).astype(np.float32)
    return {"x": torch.from_numpy(x)[:rows], "y": torch.from_numpy(rng.integers(0, 5, ROWS))[:rows]}


def loss_fn(module, batch):
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["y"]), {"accuracy": (logits.argmax(1) == batch["y"]).float().mean()}


def distributed(strategy, module, **options):
    """Return a copy of a module, and the DistributedModel of the copy."""
    own = copy.deepcopy(module)
    return own, strategies.torch.DistributedModel(own, strategy, **options)


_trainers = []


def sgd_trainer(strategy, module, loss_fn=loss_fn, *, lr=0.1, momentum=0.0, **options):
    """Make a trainer with SGD for a strategy or a number of replicas; it is closed when the test ends."""
    strategy = strategies.IPUStrategy(strategy) if isinstance(strategy, int) else strategy
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer, **options)
    _trainers.append(trainer)  # threads of several instances append
    return trainer


def close_trainers():
    while _trainers:
        _trainers.pop().close()
