"""Metrics of PyTorch modules in sinks."""

import torch

import strategies
from strategies import IPUStrategy, fingerprint
from strategies.sinks.sink import Sink
from strategies.torch import Trainer

ROWS = torch.arange(48, dtype=torch.float32).reshape(16, 3) / 16


class Kept(Sink):
    """A sink that keeps its rows."""

    name = "kept:here"

    def __init__(self):
        self.rows = []

    def open(self, goes_on):
        pass

    def write(self, rows):
        self.rows += [(row.step, dict(row.values), row.samples) for row in rows]

    def close(self):
        pass


def loss_fn(module, batch):
    loss = module(batch).square().mean()
    return loss, {"half": loss / 2}


def trained(*sinks):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    strategy = IPUStrategy(2)
    trainer = Trainer(strategy, module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))
    told = []
    with strategies.metrics.open(*(sinks or [Kept()]), strategy=strategy):
        for start in range(0, 16, 4):
            told.append((trainer.steps_made + 1, dict(trainer.step(ROWS[start : start + 4])), 4))
        found = dict(trainer.evaluate([ROWS[:4], ROWS[4:7]]))
    trainer.close()
    return fingerprint(trainer.state.variables), told, found


def test_sinks_get_the_metrics_of_every_step_and_evaluation_and_change_no_bits():
    sink = Kept()
    bits, told, found = trained(sink)
    prefixed = {f"evaluation/{name}": value for name, value in found.items()}
    assert sink.rows == [*told, (4, prefixed, 0)]
    assert trained()[0] == bits


def test_a_loop_logs_its_own_metrics():
    module, sink = torch.nn.Linear(3, 1), Kept()
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
    assert [values["loss"] for _, values, _ in sink.rows] == losses
