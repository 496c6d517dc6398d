"""Modules of Lightning, data sets and trainers for tests."""

from __future__ import annotations

import threading

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import strategies
from strategies.torch.lightning import PopDistLightningStrategy

ROWS = 30
_constructing = threading.Lock()  # Trainers set flags of the process, and modules draw from its generator


class Regression(pl.LightningModule):
    """A module with buffers, random numbers, and logged values."""

    def __init__(self, learning_rate=0.05):
        super().__init__()
        self.learning_rate = learning_rate
        with _constructing, torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.ReLU(),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(8, 1),
            )

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("rows", len(batch[0]), reduce_fx="sum")
        self.log("largest", batch[0].max(), reduce_fx="max")

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Noisy(Dataset):
    """Rows to which the data set adds random numbers of PyTorch and NumPy."""

    def __init__(self, rows=ROWS):
        self.x, self.y = rows_of(rows).tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return self.x[number] + 0.1 * torch.randn(4) + np.float32(0.1 * np.random.rand()), self.y[number]


def rows_of(rows=ROWS):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, x[:, :1].sin())


def loader(dataset=None, batch_size=3, **options):
    return DataLoader(rows_of() if dataset is None else dataset, batch_size=batch_size, **options)


def trainer_of(strategy, **options):
    """Return a trainer that writes and prints nothing."""
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    if isinstance(strategy, strategies.Strategy):
        strategy = PopDistLightningStrategy(strategy, seed=3)
    with _constructing:
        return pl.Trainer(strategy=strategy, **quiet, **options)


def fitted(strategy, module=None, training=None, validation=None, **options):
    """Return a module and its trainer after a training."""
    module = Regression() if module is None else module
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, loader(shuffle=True) if training is None else training, validation)
    return module, trainer


def bits(module):
    return strategies.fingerprint({name: one.detach().numpy() for name, one in module.state_dict().items()})
