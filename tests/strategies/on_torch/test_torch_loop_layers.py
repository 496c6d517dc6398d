"""Norms and histograms of weights and mean gradients in training loops of the program."""

from __future__ import annotations

import functools

import pytest
import torch
from kept_rows import KeptRows
from token_losses import LR, STEPS, alone, data, loss_fn, mean_over_tokens, new_model, part_of
from torch import nn
from torch_modules import distributed

import strategies
import strategies.torch

REPLICAS = 4


def rows_of(strategy, train):
    """Return the rows that the sinks get from a training; those of the first instance, which writes."""
    kept = KeptRows()
    with strategies.metrics.open(kept, strategy=strategy, norms_every=1, histograms_every=2):
        train(strategy)
    return [
        (row.step, values, {name: each.as_json for name, each in row.distributions.items()})
        for row, values in zip(kept.rows, kept.values, strict=True)
    ]


def in_turns(strategy):
    module, model = distributed(strategy, new_model())
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.backward(functools.partial(loss_of, model), part_of(strategy, data()))
        optimizer.step()


def loss_of(model, batch):
    loss, tokens = mean_over_tokens(model, batch)
    return strategies.Outcome(loss, weight=tokens)


def one_pass(strategy):
    module, model = distributed(strategy, new_model())
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.weighted_backward(*mean_over_tokens(model, part_of(strategy, data())))
        optimizer.step()


def by_trainer(strategy):
    trainer = strategies.torch.Trainer(strategy, *model_and_optimizer())
    for _ in range(STEPS):
        trainer.step(part_of(strategy, data()))


def model_and_optimizer():
    model = new_model()
    return model, loss_fn, torch.optim.SGD(model.parameters(), LR)


def of_layers(rows):
    """Return the rows without the metrics of a trainer."""
    names = ("gradient_norm", "weight_norm")
    return [
        (step, {name: each for name, each in numbers.items() if name.startswith(names)}, distributions)
        for step, numbers, distributions in rows
    ]


def test_loops_show_the_layers_of_a_trainer(everywhere, on_instances):
    expected = of_layers(rows_of(strategies.IPUStrategy(REPLICAS), by_trainer))
    assert [step for step, *_ in expected] == [1, 2]
    found = [rows for rows in everywhere(REPLICAS, lambda strategy: rows_of(strategy, in_turns)) if rows]
    found += [rows for rows in on_instances(REPLICAS, REPLICAS, lambda strategy: rows_of(strategy, one_pass)) if rows]
    assert found == [expected] * 4
    [(_, first, distributions), (_, second, none)] = expected
    assert {"gradient_norm", "gradient_norm/0.weight", "weight_norm/2.bias"} < set(first)
    assert "gradients/0.weight" in distributions
    assert not none
    before, after = (model[2].bias.detach() for model in (new_model(), alone(1)[0]))
    assert first["gradient_norm/2.bias"] == pytest.approx((after - before).norm().item() / LR, rel=1e-5)
    assert second["weight_norm/2.bias"] == pytest.approx(after.norm().item(), rel=1e-5)


def test_layers_of_a_second_model_have_a_prefix():
    def train(strategy):
        parts = [distributed(strategy, part)[1] for part in (nn.Linear(2, 3), nn.Linear(3, 1))]
        parts[1](parts[0](torch.ones(4, 2))).sum().backward()

    [one, other] = [numbers for _, numbers, _ in rows_of(strategies.IPUStrategy(1), train)]
    assert {frozenset(one), frozenset(other)} == {
        frozenset(f"{of}{kind}_norm{layer}" for kind in ("gradient", "weight") for layer in ("", "/weight", "/bias"))
        for of in ("", "model_2/")
    }


def test_sparse_gradients_and_frozen_layers_have_their_norms():
    def train(strategy):
        module, model = distributed(strategy, nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)))
        module[1].requires_grad_(False)
        nn.init.ones_(module[1].weight)
        model(torch.tensor([0, 0, 3])).sum().backward()

    [(_, numbers, distributions)] = rows_of(strategies.IPUStrategy(1), train)
    assert numbers["gradient_norm/0.weight"] == pytest.approx((2 * 2**2 + 2 * 1) ** 0.5)
    assert set(distributions) == {"weights/0.weight", "gradients/0.weight"}


def test_a_loop_without_sinks_looks_at_nothing(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("strategies.torch.distributed_model.averaging.layer_statistics", fail)
    one_pass(strategies.IPUStrategy(1))
