"""Checkpoints of a module's training: a resumed training has the bits of one that never stopped."""

from __future__ import annotations

import copy

import jax
import pytest
import torch
from tiers import also
from torch_modules import data, loss_fn, new_module, sgd_trainer

import strategies
import strategies.torch
from strategies import CheckpointError, Checkpoints
from strategies.torch.updates import numbers_of_groups, set_numbers

pytest.importorskip("orbax.checkpoint")

LAST = 5


class Training:
    """A training of a module with batch norm and dropout, from the first step."""

    def __init__(self, strategy, module, kind=torch.optim.Adam, **options):
        self.module = copy.deepcopy(module).double() if options.pop("double", False) else copy.deepcopy(module)
        if options.pop("synchronised", False):
            self.module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.module)
        self.optimizer = kind(self.module.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.trainer = strategies.torch.Trainer(strategy, self.module, self._loss, self.optimizer, **options)
        self.dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)

    def _loss(self, module, batch):
        dtype = next(module.parameters()).dtype
        return loss_fn(module, {**batch, "x": batch["x"].to(dtype)})

    def run(self, until, after_step=lambda: None):
        for epoch in range(self.dataset.position().epoch, 9):
            for batch in self.dataset.epoch(epoch):
                self.trainer.step(batch)
                self.schedule.step()
                after_step()
                if self.trainer.steps_made == until:
                    return self.fingerprint()
        raise AssertionError

    def fingerprint(self):
        state = self.trainer.whole(self.trainer.state)
        gathered = [getattr(leaf, "gather", lambda name, leaf=leaf: leaf)("it") for leaf in leaves(state)]
        return strategies.fingerprint(gathered)


def leaves(state):
    return jax.tree.leaves((state.variables, state.model_state, state.optimizer_state))


def saved_until(folder, step, module, **options):
    def run(strategy):
        training = Training(strategy, module, **options)
        with Checkpoints(folder, training.trainer, training.dataset, every=2) as checkpoints:
            training.trainer.restore(checkpoints)
            training.run(step, lambda: checkpoints.after_step(training.trainer.state))
        training.trainer.close()

    return run


def resumed(folder, module, **options):
    def run(strategy):
        training = Training(strategy, module, **options)
        with Checkpoints(folder, training.trainer, training.dataset, every=100) as checkpoints:
            training.trainer.restore(checkpoints)
            assert training.trainer.steps_made == 2
            return training.run(LAST)

    return run


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("convolutions", {}, {}),
        ("convolutions", {"synchronised": True}, {"synchronised": True}),
        ("convolutions", {"replica_device": "cpu"}, {"replica_device": "cpu"}),
        also("convolutions", {}, {"replica_device": "cpu"}),
        (
            "convolutions",
            {"replicated_optimizer_state_sharding": True},
            {"replicated_optimizer_state_sharding": False},
        ),
        also(
            "convolutions",
            {"replicated_optimizer_state_sharding": False},
            {"replicated_optimizer_state_sharding": True},
        ),
        *(
            also("convolutions", options, options)
            for options in (
                {"double": True},
                {"kind": torch.optim.RMSprop},
                {"loss_scaling": "dynamic"},
                {"gradient_transfer_dtype": "bfloat16"},
            )
        ),
    ],
    ids=str,
)
def test_resuming_on_other_instances_gives_the_same_bits(name, before, after, tmp_path, on_instances):
    """The training has a changing learning rate, moving means, and 64-bit parameters."""
    module = new_module(name)
    on_instances(2, 4, saved_until(tmp_path, 3, module, **before))
    found = [each for count in (1, 4) for each in on_instances(count, 4, resumed(tmp_path, module, **after))]
    never_stopped = Training(strategies.IPUStrategy(4), module, **before).run(LAST)
    assert found == [never_stopped] * 5


def test_plain_pytorch_loads_the_checkpoint(tmp_path):
    module = new_module("convolutions")
    strategy = strategies.IPUStrategy(2)
    training = Training(strategy, module)
    with Checkpoints(tmp_path / "folder", training.trainer, training.dataset) as checkpoints:
        training.trainer.restore(checkpoints)
        training.run(2, lambda: checkpoints.save(training.trainer.state))
    strategies.torch.load_state_dicts(tmp_path / "folder").save(tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    plain = new_module("convolutions")
    plain.load_state_dict(loaded["module"])
    for one, other in zip(plain.state_dict().values(), training.module.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    optimizer = torch.optim.Adam(plain.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)
    for (_, one), (_, other) in zip(optimizer.state.items(), training.optimizer.state.items(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    loaded = strategies.torch.load_state_dicts(tmp_path / "folder", step=1)
    assert not torch.equal(loaded.module["first.weight"], plain.first.weight)


def test_a_parameter_without_gradient_has_no_state_after_resuming(tmp_path):
    module = new_module("mlp")
    module.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    training = Training(strategies.IPUStrategy(1), module)
    with Checkpoints(tmp_path, training.trainer) as checkpoints:
        training.trainer.restore(checkpoints)
        training.trainer.step(data())
        checkpoints.save(training.trainer.state)
    again = Training(strategies.IPUStrategy(1), module)
    with Checkpoints(tmp_path, again.trainer) as checkpoints:
        again.trainer.restore(checkpoints)
    assert len(again.optimizer.state) == len(training.optimizer.state) == 4
    assert again.module.unused not in again.optimizer.state


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    module = new_module("mlp")
    saved_until(tmp_path, 2, module)(strategies.IPUStrategy(1))
    with pytest.raises(CheckpointError, match="use the same model and optimizer"):
        resumed(tmp_path, module, kind=torch.optim.SGD)(strategies.IPUStrategy(1))


def test_the_next_step_consumes_a_state(tmp_path):
    training = Training(strategies.IPUStrategy(1), new_module("mlp"))
    with Checkpoints(tmp_path, training.trainer) as checkpoints:
        state = training.trainer.state
        training.trainer.step(data())
        with pytest.raises(ValueError, match="used up"):
            checkpoints.save(state)


def test_the_loss_scale_continues_from_the_checkpoint(tmp_path):
    """The number of skipped steps and the steps since the last change of scale continue too."""
    module, strategy = new_module("mlp"), strategies.IPUStrategy(2)

    def trainer():
        own = copy.deepcopy(module)
        return sgd_trainer(strategy, own, loss_scaling="dynamic")

    one, other = trainer(), trainer()
    one.step({**data(), "x": torch.full_like(data()["x"], torch.nan)})
    one.step(data())
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(one.state)
    with Checkpoints(tmp_path, other) as checkpoints:
        other.restore(checkpoints)
    assert other.state.loss_scale == one.state.loss_scale
    assert other.step(data())["loss_scale"] == 2.0**14


def test_a_tensor_learning_rate_is_restored_in_place():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], torch.tensor(0.25))
    rate, numbers = optimizer.param_groups[0]["lr"], numbers_of_groups(optimizer)
    rate.fill_(1.0)
    set_numbers(optimizer, numbers)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_a_module_made_in_another_order_is_refused_by_name(tmp_path):
    """Checkpoints number the optimizer's state, so moments of equal shapes would be swapped."""

    def run(names):
        strategy = strategies.IPUStrategy(2)
        module = torch.nn.ModuleDict({name: torch.nn.Linear(8, 1) for name in names})
        adam = torch.optim.Adam(module.parameters())
        loss = lambda module, x: sum(one(x).square().mean() for one in module.values())  # noqa: E731
        trainer = strategies.torch.Trainer(strategy, module, loss, adam)
        with Checkpoints(tmp_path, trainer) as checkpoints:
            trainer.restore(checkpoints)
            trainer.step(data()["x"][:4, 0])
            checkpoints.save(trainer.state)
        trainer.close()

    run("ab")
    run("ab")
    with pytest.raises(CheckpointError, match=r"in another order .*: number \d is a.weight there, and b.weight here"):
        run("ba")
