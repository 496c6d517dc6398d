"""Metrics of PyTorch modules in sinks."""

from contextlib import closing

import numpy as np
import pytest
import torch
from kept_rows import KeptRows

import strategies
from strategies import IPUStrategy, fingerprint
from strategies.torch import Trainer
from strategies.torch.updates import device_norms

ROWS = torch.arange(48, dtype=torch.float32).reshape(16, 3) / 16


def loss_fn(module, batch):
    loss = module(batch).square().mean()
    return loss, {"half": loss / 2}


def trained(*sinks):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    strategy = IPUStrategy(2)
    trainer = Trainer(strategy, module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))
    told = []
    with strategies.metrics.open(*(sinks or [KeptRows()]), strategy=strategy):
        for start in range(0, 16, 4):
            told.append((trainer.steps_made + 1, dict(trainer.step(ROWS[start : start + 4])), 4))
        found = dict(trainer.evaluate([ROWS[:4], ROWS[4:7]]))
    trainer.close()
    return fingerprint(trainer.state.variables), told, found


def test_sinks_get_the_metrics_of_every_step_and_evaluation_and_change_no_bits():
    sink = KeptRows()
    bits, told, found = trained(sink)
    prefixed = {f"evaluation/{name}": value for name, value in found.items()}
    rates = [(step, {**metrics, "learning_rate": 0.1}, samples) for step, metrics, samples in told]
    assert [(row.step, row.values, row.samples) for row in sink.rows] == [*rates, (4, prefixed, 0)]
    assert trained()[0] == bits


def test_the_rate_that_a_scheduler_has_set_is_in_the_row_of_its_step():
    module, sink, strategy = torch.nn.Linear(3, 1), KeptRows(), IPUStrategy(2)
    optimizer = torch.optim.SGD(module.parameters(), 0.8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with (
        closing(Trainer(strategy, module, loss_fn, optimizer)) as trainer,
        strategies.metrics.open(sink, strategy=strategy),
    ):
        for start in range(0, 12, 4):
            trainer.step(ROWS[start : start + 4])
            scheduler.step()
    assert [values["learning_rate"] for values in sink.values] == [0.8, 0.4, 0.2]


def test_groups_have_a_rate_each_by_their_names_or_numbers():
    module, sink, strategy = torch.nn.Linear(3, 1), KeptRows(), IPUStrategy(1)
    groups = [
        {"params": [module.weight], "lr": 0.5, "name": "head"},
        {"params": [module.bias], "lr": torch.tensor(0.25)},
    ]
    with (
        closing(Trainer(strategy, module, loss_fn, torch.optim.SGD(groups, 0.1))) as trainer,
        strategies.metrics.open(sink, strategy=strategy),
    ):
        trainer.step(ROWS[:4])
    rates = {name: value for name, value in sink.values[0].items() if name not in ("loss", "half")}
    assert rates == {"learning_rate/head": 0.5, "learning_rate/1": 0.25}


def test_a_parameter_without_a_gradient_has_the_norm_zero():
    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)

    module, strategy = Partly(), IPUStrategy(2)
    module.used.bias.requires_grad_(False)
    sink = KeptRows()
    with (
        closing(Trainer(strategy, module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))) as trainer,
        strategies.metrics.open(sink, strategy=strategy, norms_every=1, histograms_every=1),
    ):
        trainer.step(ROWS[:4])
    values = sink.values[0]
    assert values["gradient_norm/unused.weight"] == 0 < values["gradient_norm/used.weight"]
    assert values["gradient_norm"] == values["gradient_norm/used.weight"]
    assert {name for name in values if name.startswith("weight_norm/")} == {
        f"weight_norm/{name}" for name in ("used.weight", "unused.weight", "unused.bias")
    }
    assert set(sink.rows[0].distributions) == {
        *(f"weights/{name}" for name in ("used.weight", "unused.weight", "unused.bias")),
        "gradients/used.weight",
    }


def test_a_device_finds_the_norms_of_the_host():
    tensors = [ROWS, None, ROWS.to(torch.bfloat16), ROWS * 1e25]
    wanted = [0.0 if each is None else float(np.linalg.norm(each.double())) for each in tensors]
    assert device_norms(tensors).tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_loop_logs_its_own_metrics():
    module, sink = torch.nn.Linear(3, 1), KeptRows()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = []
    with strategies.metrics.open(sink):
        for step in range(1, 4):
            optimizer.zero_grad()
            loss = module(ROWS).square().mean()
            loss.backward()
            optimizer.step()
            strategies.metrics.log({"loss": loss}, step)
            losses.append(loss.item())
    assert [values["loss"] for values in sink.values] == losses
