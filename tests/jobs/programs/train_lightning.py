"""Train with Lightning's Trainer and the strategy "popdist", and print what the number of instances must not change.

    python train_lightning.py FOLDER [--epochs 3] [--steps -1] [--workers 0] [--precision 32-true] [--resume]

The line has the fingerprint of the module, the loss of the test, and digests of last.ckpt and of the log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

import strategies
import strategies.torch.lightning

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Noisy(Dataset):
    """Rows with random numbers of PyTorch and NumPy."""

    def __init__(self):
        self.x = torch.randn(43, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        x = self.x[number]
        return x + 0.1 * torch.randn(4) + np.float32(0.1 * np.random.rand()), x[:1].sin()


class Regression(pl.LightningModule):
    """A module that draws random numbers of PyTorch and NumPy in its steps."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2))
        self.last = torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.last(self.net(x)), y) * float(np.random.uniform(0.9, 1.1))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.last(self.net(batch[0])), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.mse_loss(self.last(self.net(batch[0])), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    os.chdir(options.folder)
    pl.seed_everything(5, verbose=False)
    dataset, module = Noisy(), Regression()
    saves = ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=2)
    trainer = pl.Trainer(
        strategy="popdist",
        accelerator="cpu",
        precision=options.precision,
        max_epochs=options.epochs,
        max_steps=options.steps,
        logger=CSVLogger("."),
        callbacks=[saves, EarlyStopping("val_loss", patience=9), LearningRateMonitor()],
        gradient_clip_val=0.5,
        val_check_interval=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own = torch.Generator().manual_seed(2)
    training = DataLoader(dataset, batch_size=3, shuffle=True, num_workers=options.workers, generator=own)
    last = "checkpoints/last.ckpt" if options.resume else None
    trainer.fit(module, training, DataLoader(dataset, batch_size=5), ckpt_path=last)
    [found] = trainer.test(module, DataLoader(dataset, batch_size=5), verbose=False)
    if trainer.is_global_zero:
        log = max(Path("lightning_logs").glob("version_*/metrics.csv"))
        found = [strategies.fingerprint(module.state_dict()), trainer.global_step, found["test_loss"]]
        print(json.dumps([*found, digest(Path("checkpoints/last.ckpt")), digest(log)]), flush=True)


if __name__ == "__main__":
    main()
