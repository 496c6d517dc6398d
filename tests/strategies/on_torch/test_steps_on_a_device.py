"""Steps whose gradients stay on the replicas' device: reads of the device, and features with the bits of the host.

The CPU acts as the device; `ReplicaMemory.reads` counts the reads for which a GPU would be waited for.
"""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_modules import data, loss_fn, new_module, sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError
from strategies.defaults import Defaults
from strategies.errors import NonFiniteGradientError
from strategies.exchange.flat import GradientTransfer
from strategies.exchange.window_path import LocalPath
from strategies.torch.exchange.gradients import GradientExchange
from strategies.torch.exchange.plan import Parameter, TailValues, TorchGradientPlan
from strategies.torch.tensors import ReplicaMemory, TorchArithmetic

CPU = torch.device("cpu")
COMPILED = Defaults(exchange="compiled")
CONVOLUTIONS, MLP = new_module("convolutions"), new_module("mlp")


class Waits(TorchDispatchMode):
    """A mode that records operators whose result is a Python number, for which a GPU would be waited for."""

    NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator._schema.name.removeprefix("aten::") in self.NAMES:
            self.seen.append(operator._schema.name)
        return operator(*args, **(kwargs or {}))


def steps(trainer, dataset, count=5):
    """Return, for each step, the number of reads of the device and when its metrics were read."""
    memory, found = trainer._training.memory_of_replicas, []
    for _, batch in zip(range(count), dataset.epoch(0), strict=False):
        first = memory.reads
        metrics = trainer.step(batch)
        second = memory.reads
        assert metrics["loss"] == metrics["loss"] is not None
        assert metrics["accuracy"] <= 1
        found.append((second - first, memory.reads - second))
    return found


def begun(strategy, module, **options):
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)  # others read counters of steps on the host
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer, replica_device="cpu", **options)
    return trainer, strategies.torch.distribute_dataset(strategy, data(), batch_size=2)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", ["convolutions", "embedding"])
def test_a_step_of_one_instance_reads_nothing_until_its_metrics_are_read(name, replicas):
    """The first step reads the device once to learn which buffers have changed."""
    trainer, dataset = begun(strategies.IPUStrategy(replicas), new_module(name))
    assert steps(trainer, dataset) == [(1, 1)] + [(0, 1)] * 4
    trainer.close()


def test_a_step_of_one_instance_reads_one_flag_to_scale_losses():
    trainer, dataset = begun(strategies.IPUStrategy(2), CONVOLUTIONS, loss_scaling="dynamic")
    assert steps(trainer, dataset)[1:] == [(1, 1)] * 4
    trainer.close()


def test_a_step_of_several_instances_reads_once(on_instances):
    def function(strategy):
        trainer, dataset = begun(strategy, MLP, check_numerics=True)
        found = steps(trainer, dataset)
        trainer.close()
        return found

    assert on_instances(2, 4, function, defaults=COMPILED) == [[(1, 0)] * 5] * 2


@pytest.mark.parametrize("replicas", [1, 3])
def test_no_operator_of_a_step_waits_for_a_number(replicas):
    trainer, dataset = begun(strategies.IPUStrategy(replicas), CONVOLUTIONS)
    first, second, third, *_ = dataset.epoch(0)
    trainer.step(first)
    trainer.step(second)
    with Waits() as waits:
        trainer.step(third)
    trainer.close()
    assert waits.seen == []


def device_exchange(replicas, *names):
    """Return the exchange of gradients of two numbers each, for one instance with all replicas."""
    parameters = tuple(Parameter(name, (2,), torch.zeros(0).numpy().dtype) for name in names)
    plan = TorchGradientPlan(parameters, GradientTransfer(), tail=1)
    of_all, path = strategies.IPUStrategy(replicas).replicas, LocalPath(replicas, TorchArithmetic())
    return GradientExchange(plan, ("loss",), of_all, ReplicaMemory(CPU), [{}] * replicas, path)


def test_sums_begin_as_soon_as_both_parts_are_ready():
    alive, exchange = [], device_exchange(8, "a")
    for replica in range(6):
        exchange.take([torch.full((2,), float(replica))], replica)
        exchange.set_tail(TailValues([torch.zeros((), dtype=torch.float64)], 0, [True], []), replica)
        alive.append(len(exchange._sums))
    assert alive == [1, 1, 2, 1, 2, 2]
    of_node = [sum_.tolist()[:2] for [*sums] in exchange.buffers(0) for sum_ in sums]
    assert of_node == [[6.0] * 2, [9.0] * 2]
    assert exchange.buffers(0) == []


@pytest.mark.parametrize(("replicas", "sets"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_the_plan_of_the_memory_has_the_sums_that_are_alive(replicas, sets):
    trainer, dataset = begun(strategies.IPUStrategy(replicas), MLP)
    held = {one.what: one.nbytes for one in trainer.plan(next(dataset.epoch(0))).held}
    trainer.close()
    assert held["gradients"] // held["variables"] == sets
    assert "mean gradients" not in held


def test_gradients_in_one_memory_are_added_apart():
    exchange, gradient = device_exchange(1, "a", "b"), torch.ones(2)
    exchange.take([gradient, gradient])
    exchange.set_tail(TailValues([torch.zeros((), dtype=torch.float64)], 0, [True, True], []))
    one, other = exchange.means()
    assert one.data_ptr() != other.data_ptr()


def test_an_unchanged_buffer_keeps_its_bits():
    """The mean of seven equal numbers is rounded."""
    module = nn.Linear(2, 1)
    module.register_buffer("constant", torch.linspace(0, 1, 1000))
    before = module.constant.clone()
    trainer = sgd_trainer(7, module, lambda module, batch: module(batch).mean(), replica_device="cpu")
    for _ in range(3):
        trainer.step(torch.ones(7, 2))
    assert torch.equal(module.constant, before)


def test_an_abandoned_step_leaves_no_gradients():
    asked = []

    def loss(module, batch):
        asked.append(0)
        value = module(batch).square().mean()
        if len(asked) == 2:  # the second replica, after the first one's gradients were added
            value.register_hook(lambda gradient: 1 / 0)
        return value

    def trained(loss, steps):
        module = nn.Linear(2, 1)
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
        trainer = sgd_trainer(3, module, loss, replica_device="cpu")
        for step in range(steps):
            try:
                trainer.step(torch.arange(6.0).reshape(3, 2))
            except ZeroDivisionError:
                assert step == 0
        return module.weight.tolist()

    assert trained(loss, 3) == trained(lambda module, batch: module(batch).square().mean(), 2)


def test_a_post_accumulate_hook_runs_whenever_it_is_registered():
    module = nn.Linear(2, 1)
    trainer = sgd_trainer(1, module, lambda module, batch: module(batch).mean(), replica_device="cpu")
    seen = []
    trainer.step(torch.ones(2, 2))
    handle = module.weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
    trainer.step(torch.ones(2, 2))
    handle.remove()
    trainer.step(torch.ones(2, 2))
    assert [one.tolist() for one in seen] == [[[1.0, 1.0]]]


class Frozen(nn.Module):
    """A module with a teacher that follows in the forward pass, a frozen layer, and a constant buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.teacher, self.still, self.unused = (nn.Linear(64, 5) for _ in range(4))
        for layer in (self.teacher, self.still):
            layer.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.7]))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.first.weight, 0.1 + float(x[0, 0].abs()) / 9)
        return self.first(x) * self.scale + self.teacher(x) + self.still(x)


def result(strategy, module, loss=loss_fn, prepare=None, **options):
    module = copy.deepcopy(module)
    if prepare is not None:
        prepare(module)
    options.setdefault("optimizer", torch.optim.SGD(module.parameters(), 0.1))
    trainer = strategies.torch.Trainer(strategy, module, loss, **options)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
    losses = [trainer.step(batch)["loss"] for batch in dataset.epoch(0)]
    state = trainer.state
    trainer.close()
    return losses, *map(strategies.fingerprint, (dict(state.variables), state.model_state or {}))


def clip(module):
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def rows_of_groups(module):
    module.table = nn.Parameter(torch.linspace(0, 1, 10).reshape(2, 5))
    strategies.torch.group_replicas(module.table, strategies.torch.ReplicaGroups(size=3))


def loss_with_table(module, batch):
    return nn.functional.cross_entropy(module(batch["x"]) + module.table, batch["y"])


SYNCHRONISED = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(CONVOLUTIONS))
CASES = {
    "frozen parameters": (Frozen(), loss_fn, {}),
    "synchronised statistics": (SYNCHRONISED, loss_fn, {}),
    "clipped gradients": (MLP, loss_fn, {"before_update": clip}),
    "a map of gradients": (
        MLP,
        loss_fn,
        {"map_gradient": lambda gradient, _: gradient.clamp(-0.01, 0.01)},
    ),
    "an odd loss scale": (MLP, loss_fn, {"loss_scaling": strategies.LossScaling(initial=3.0)}),
    "rows of groups": (MLP, loss_with_table, {"prepare": rows_of_groups}),
}


@pytest.mark.parametrize(("module", "loss", "options"), CASES.values(), ids=CASES)
def test_features_have_the_bits_of_the_host(on_instances, module, loss, options):
    [expected] = on_instances(1, 6, lambda strategy: result(strategy, module, loss, **options))
    for instances in (1, 2, 3):
        found = on_instances(
            instances,
            6,
            lambda strategy: result(strategy, module, loss, replica_device="cpu", **options),
            defaults=COMPILED,
        )
        assert found == [expected] * instances, instances


def test_layers_can_be_frozen_and_thawed(on_instances):
    def function(strategy, **options):
        module = copy.deepcopy(CONVOLUTIONS)
        optimizer = torch.optim.Adam(module.parameters())
        trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer, **options)
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
        for step, batch in enumerate(dataset.epoch(0)):
            module.last.requires_grad_(step not in (2, 3))
            trainer.step(batch)
        variables = strategies.fingerprint(dict(trainer.state.variables))
        trainer.close()
        return variables

    [expected] = on_instances(1, 4, function)
    on_device = functools.partial(function, replica_device="cpu")
    assert {expected} == {one for n in (1, 2) for one in on_instances(n, 4, on_device, defaults=COMPILED)}


def test_replicas_with_a_gradient_that_is_not_finite_are_named(on_instances):
    def function(strategy):
        def loss(module, batch):
            return module(batch).sum()

        trainer = sgd_trainer(strategy, nn.Linear(2, 1), loss, replica_device="cpu", check_numerics=True)
        rows = torch.ones(len(strategy.local_replicas), 2)
        for row, replica in enumerate(strategy.local_replicas):
            if replica in (1, 2):
                rows[row] = torch.inf
        with pytest.raises(
            NonFiniteGradientError, match=r"gradient of weight is not finite at step 0 .* replicas .1, 2."
        ):
            trainer.step(rows)
        return True

    assert all(on_instances(1, 4, function) + on_instances(2, 4, function, defaults=COMPILED))


def test_a_replica_that_computes_something_else_is_found():
    calls = []

    def loss(own, batch):
        calls.append(0)
        return (own(batch) * len(calls)).sum()

    trainer = sgd_trainer(2, nn.Linear(2, 1), loss, replica_device="cpu")
    with pytest.raises(StrategyError, match="replica 0 computed its part .* twice, and the loss was another one"):
        trainer.step(torch.ones(2, 2))


def test_a_module_exchanges_on_the_host_on_request(on_instances):
    def function(strategy):
        trainer, dataset = begun(strategy, MLP)
        trainer.step(next(dataset.epoch(0)))
        trainer.close()
        return trainer._training.update.path

    assert on_instances(1, 2, function, defaults=Defaults(exchange="host")) == [None]


class Counting(nn.Module):
    """A module that counts its forward passes in a buffer of the dtype in which a device keeps metrics."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, rows):
        self.passes += 1
        return self.layer(rows).sum()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_metric_has_the_value_that_it_had_in_its_micro_batch(device):
    def loss(module, batch):
        return module(batch), {"passes": module.passes}

    trainer = sgd_trainer(1, Counting(), loss, gradient_accumulation_count=3, replica_device=device)
    assert trainer.step(torch.ones(3, 2))["passes"] == 2  # the mean of 1, 2 and 3
    trainer.close()


def test_an_interrupted_step_leaves_no_gradients_for_the_next_one():
    interrupted = []

    def loss(module, batch):
        found = loss_fn(module, batch)
        if interrupted and interrupted.pop() == 0:
            raise KeyboardInterrupt
        return found

    def train(*steps_to_interrupt):
        strategy, module = strategies.IPUStrategy(3), new_module("mlp")
        trainer = sgd_trainer(strategy, module, loss, replica_device="cpu")
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
        for step, batch in enumerate(dataset.epoch(0)):
            if step in steps_to_interrupt:
                interrupted[:] = range(2)  # in the pass of the second replica
                with pytest.raises(KeyboardInterrupt):
                    trainer.step(batch)
            trainer.step(batch)
        trainer.close()
        return [parameter.detach().clone() for parameter in module.parameters()]

    assert all(map(torch.equal, train(), train(0, 2)))


def test_a_dropped_trainer_keeps_no_windows(on_instances):
    def function(strategy):
        trainer, dataset = begun(strategy, MLP)
        trainer.step(next(dataset.epoch(0)))
        return trainer._training.update.path

    paths = on_instances(2, 2, function, defaults=Defaults(exchange="window"))
    gc.collect()  # once: two threads that collect at the same time hinder each other
    assert [path._windows.nbytes for path in paths] == [0, 0]
