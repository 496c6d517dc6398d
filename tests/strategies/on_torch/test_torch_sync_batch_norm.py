"""Layers of torch.nn.SyncBatchNorm: statistics of all replicas, with the same bits on all instances."""

from __future__ import annotations

import copy
import math
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from surviving_instances import run_instances
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_modules import data, distributed, loss_fn, sgd_trainer

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch
from collectives import CollectiveTimeoutError, LayoutMismatchError
from strategies import StrategyError
from strategies.torch.replicas.evaluation import InferenceTurns
from strategies.torch.tensors import ReplicaMemory

ROWS = 24


class Network(nn.Module):
    """Convolutions and dense layers with all kinds of the layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6, momentum=None), nn.ReLU())
        self.third = nn.Sequential(nn.Linear(216, 7), nn.BatchNorm1d(7, affine=False), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, track_running_stats=False))

    def forward(self, x):
        return self.last(self.third(self.second(self.first(x[:, None]).flatten(2)).flatten(1)))


class Checkpointed(Network):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        hidden = self.first(x[:, None]).flatten(2)
        hidden = checkpoint(self.second, hidden, use_reentrant=self.use_reentrant)
        return self.last(checkpoint(self.third, hidden.flatten(1), use_reentrant=self.use_reentrant))


def rows(replicas):
    whole = data()
    return {name: array[: ROWS // replicas * replicas] for name, array in whole.items()}


def new(kind=Network, *arguments):
    torch.manual_seed(3)
    return kind(*arguments)


def synchronised(module):
    return nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))


def part(strategy, batch):
    count = len(batch["y"]) // strategy.num_replicas_in_sync
    mine = strategy.local_replicas
    return {name: array[mine.start * count : mine.stop * count] for name, array in batch.items()}


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def trained(strategy, module, batch, steps=3, loss=loss_fn, **options):
    """Return the state of a copy of a module after some steps on the same rows."""
    module = copy.deepcopy(module)
    trainer = sgd_trainer(strategy, module, loss, momentum=0.9, **options)
    losses = [float(trainer.step(part(strategy, batch))["loss"]) for _ in range(steps)]
    return losses, state_of(module)


def trained_plainly(module, batch, steps=3, loss=loss_fn):
    """Return the state after training with ordinary batch normalisation of all rows."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(module, batch)[0]
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, state_of(module)


def same_bits(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1].values(), other[1].values()))


def assert_close(one, other):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one[1], other[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("replicas", [2, 3, 4, 6])
def test_statistics_are_those_of_the_whole_batch(replicas):
    module, batch = new(), rows(replicas)
    found = trained(strategies.IPUStrategy(replicas), synchronised(module), batch)
    assert_close(found, trained_plainly(module, batch))


@pytest.mark.parametrize(
    ("instances", "replicas", "mechanism"),
    [(2, 4, "window"), (4, 4, "ring"), (3, 3, "window"), (3, 6, "ring"), (2, 6, "window")],
)
def test_bits_do_not_depend_on_the_number_of_instances(instances, replicas, mechanism, on_instances):
    module, batch = synchronised(new()), rows(replicas)
    one = trained(strategies.IPUStrategy(replicas), module, batch)
    for found in on_instances(
        instances, replicas, lambda strategy: trained(strategy, module, batch), mechanism=mechanism
    ):
        assert same_bits(found, one)


def test_sums_do_not_disturb_gradients_that_leave_meanwhile(on_instances):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 1500), nn.SyncBatchNorm(1500), nn.Linear(1500, 900))
    module = nn.Sequential(module, nn.SyncBatchNorm(900), nn.Linear(900, 5))  # several buckets of 4 MiB
    batch = rows(4)
    one = trained(strategies.IPUStrategy(4), module, batch)

    def train(strategy):
        return trained(strategy, module, batch, stream_gradients=True)

    for found in [train(strategies.IPUStrategy(4)), *on_instances(2, 4, train), *on_instances(4, 4, train)]:
        assert same_bits(found, one)


def test_each_micro_batch_has_its_own_statistics(on_instances):
    module, batch = new(), rows(2)
    options = {"gradient_accumulation_count": 3}
    one = trained(strategies.IPUStrategy(2), synchronised(module), batch, **options)
    for found in on_instances(2, 2, lambda strategy: trained(strategy, synchronised(module), batch, **options)):
        assert same_bits(found, one)
    order = torch.arange(ROWS).reshape(2, 3, 4).transpose(0, 1).reshape(3, 8)  # the replicas' rows of a micro-batch

    def loss(module, batch):
        parts = [loss_fn(module, {name: array[own] for name, array in batch.items()})[0] for own in order]
        return sum(parts) / 3, {}

    assert_close(one, trained_plainly(module, batch, loss=loss))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_can_be_recomputed_in_the_backward_pass(use_reentrant, on_instances):
    module, batch = new(Checkpointed, use_reentrant), rows(4)
    one = trained(strategies.IPUStrategy(4), synchronised(module), batch)
    assert_close(one, trained_plainly(module, batch))
    for found in on_instances(2, 4, lambda strategy: trained(strategy, synchronised(module), batch)):
        assert same_bits(found, one)


def looped(strategy, module, batch, steps=3, **options):
    module = copy.deepcopy(module)
    model = strategies.torch.DistributedModel(module, strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, part(strategy, batch))[0].backward()
        optimizer.step()
    return state_of(module)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_loops_have_the_bits_of_a_trainer(streams, use_reentrant, on_instances):
    kind = (Network,) if use_reentrant is None else (Checkpointed, use_reentrant)
    module, batch = synchronised(new(*kind)), rows(3)
    _, one = trained(strategies.IPUStrategy(3), module, batch)
    for found in on_instances(3, 3, lambda strategy: looped(strategy, module, batch, stream_gradients=streams)):
        assert all(map(torch.equal, found.values(), one.values()))


def layer_trained(strategy, layer, x, loss, **options):
    """Return the layer after one step on rows of all replicas, and the gradients of this instance's rows."""
    module = Rows(copy.deepcopy(layer), x)
    trainer = sgd_trainer(strategy, module, loss, lr=1.0, **options)
    mine = strategy.local_replicas
    trainer.step({"replica": torch.arange(mine.start, mine.stop)})
    return module


class Rows(nn.Module):
    """A layer on rows that are parameters, so that their gradients can be read; each replica has other rows."""

    def __init__(self, layer, parts):
        super().__init__()
        self.layer = layer
        self.parts = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)

    def forward(self, batch):
        mine = int(batch["replica"])
        others = sum(0 * part.sum() for part in self.parts)
        return self.layer(self.parts[mine]), others


def weighted(module, batch):
    output, others = module(batch)
    weights = torch.linspace(-1, 2, output.numel()).reshape(output.shape)
    return (output * weights).sum() + output.square().sum() + others.to(output.dtype), {}


def weighted_plainly(layer, parts):
    """Return the gradients of rows, weight and bias of the mean over replicas, with statistics of all rows."""
    x = torch.cat(parts).clone().requires_grad_()
    output = layer(x)
    losses = []
    for each in output.split([len(part) for part in parts]):
        weights = torch.linspace(-1, 2, each.numel()).reshape(each.shape)
        losses.append((each * weights).sum() + each.square().sum())
    (sum(losses) / len(parts)).backward()
    return x.grad


CASES = {
    "rows": (nn.BatchNorm1d(3), (8, 3)),
    "sequences": (nn.BatchNorm1d(3, eps=1e-2), (4, 3, 5)),
    "images": (nn.BatchNorm2d(3, momentum=0.3), (4, 3, 5, 2)),
    "volumes": (nn.BatchNorm3d(3), (4, 3, 2, 3, 2)),
    "without parameters": (nn.BatchNorm2d(3, affine=False), (4, 3, 5, 2)),
    "without running statistics": (nn.BatchNorm1d(3, track_running_stats=False), (8, 3)),
    "cumulative": (nn.BatchNorm1d(3, momentum=None), (8, 3)),
    "without bias": (nn.SyncBatchNorm(3, bias=False), (8, 3)),
}


def assert_layers_agree(found, layer, parts, gradient, **tolerance):
    """Assert equal rows, parameters and statistics after a step of length 1."""
    rows_found = torch.cat([part.detach() for part in found.parts])
    torch.testing.assert_close(rows_found, torch.cat(parts) - gradient, **tolerance)
    now, before = found.layer.state_dict(), layer.state_dict()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(now[name], before[name] - parameter.grad, **tolerance)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(now[name], buffer, **tolerance)


def parts_of_rows(shape, replicas=4, dtype=torch.float32, sizes=None):
    generator = torch.Generator().manual_seed(5)
    sizes = sizes or [shape[0]] * replicas
    noise = (torch.randn(size, *shape[1:], generator=generator, dtype=torch.float64) for size in sizes)
    return [(part * (1 + number) + 3 * number).to(dtype) for number, part in enumerate(noise)]


@pytest.mark.parametrize("case", sorted(CASES))
def test_outputs_and_gradients_are_those_of_the_whole_batch(case):
    layer, shape = CASES[case]
    layer, parts = copy.deepcopy(layer), parts_of_rows(shape)
    found = layer_trained(strategies.IPUStrategy(4), nn.SyncBatchNorm.convert_sync_batchnorm(layer), parts, weighted)
    gradient = weighted_plainly(layer, parts)
    assert_layers_agree(found, layer, parts, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(1, 9, 4, 2), (0, 5, 0, 3)])
def test_replicas_are_weighted_by_their_rows(sizes, on_instances):
    parts = parts_of_rows((8, 3), sizes=sizes)
    layer = nn.BatchNorm1d(3)
    one = layer_trained(strategies.IPUStrategy(4), synchronised(layer), parts, weighted)
    for found in on_instances(2, 4, lambda strategy: layer_trained(strategy, synchronised(layer), parts, weighted)):
        assert same_bits([0, state_of(found)], [0, state_of(one)])
    assert_layers_agree(one, layer, parts, weighted_plainly(layer, parts), rtol=1e-4, atol=1e-4)


def test_large_means_cost_no_digits():
    parts = [part + 1e6 for part in parts_of_rows((8, 3), dtype=torch.float64)]
    layer = nn.BatchNorm1d(3).double()
    found = layer_trained(strategies.IPUStrategy(4), synchronised(layer), parts, weighted)
    assert_layers_agree(found, layer, parts, weighted_plainly(layer, parts), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bits_are_taken_in_32(dtype):
    parts = parts_of_rows((8, 3, 5), dtype=dtype)
    layer = nn.BatchNorm1d(3, momentum=1.0)
    found = layer_trained(strategies.IPUStrategy(4), synchronised(layer), parts, weighted)
    whole = torch.cat(parts).double()
    torch.testing.assert_close(found.layer.running_mean.double(), whole.mean((0, 2)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.layer.running_var.double(), whole.var((0, 2)), rtol=1e-6, atol=1e-6)
    assert_layers_agree(found, layer, parts, weighted_plainly(layer, parts), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "options", [{"compute_dtype": "bfloat16"}, {"loss_scaling": 1024.0}, {"replica_device": "cpu"}]
)
def test_options_of_the_step_leave_bits_alone(options, on_instances):
    module, batch = synchronised(new()), rows(4)
    one = trained(strategies.IPUStrategy(4), module, batch, **options)
    for found in on_instances(2, 4, lambda strategy: trained(strategy, module, batch, **options)):
        assert same_bits(found, one)


def test_an_instance_with_one_core_drives_several_replicas(pretend_one_core):
    module, batch = synchronised(new()), rows(4)
    one = trained(strategies.IPUStrategy(4), module, batch)
    pretend_one_core()
    assert same_bits(trained(strategies.IPUStrategy(4), module, batch), one)


def test_one_replica_has_the_bits_of_batch_norm():
    module, batch = new(), rows(1)
    found = trained(strategies.IPUStrategy(1), synchronised(module), batch)
    assert same_bits(found, trained_plainly(module, batch))


def test_compiled_modules_leave_the_layer_unchanged():
    module, batch = synchronised(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))), rows(2)
    strategy = strategies.IPUStrategy(2)
    found = trained(strategy, torch.compile(module, backend="eager"), batch)
    assert same_bits(found, trained(strategy, module, batch))


# ---- pipelines


class Staged(nn.Module):
    """One layer in each of two stages, with dropout between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8))
        self.second = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4), nn.SyncBatchNorm(4), nn.Linear(4, 3))

    def forward(self, x, labels):
        with poptorch.Block("one", ipu_id=0):
            hidden = self.first(x)
        with poptorch.Block("two", ipu_id=1):
            output = self.second(hidden)
            return output, F.cross_entropy(output, labels)


@pytest.mark.parametrize("schedule", [None, "grouped", "one_forward_one_backward"])
def test_stages_of_all_replicas_exchange_statistics_in_each_micro_batch(schedule, on_instances):
    module = new(Staged)
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)

    def train(strategy, schedule=schedule):
        own = copy.deepcopy(module)
        options = poptorch.Options()
        options.Training.gradientAccumulation(4)
        execution = poptorch.PipelinedExecution(schedule=schedule) if schedule else poptorch.ShardedExecution()
        options.setExecutionStrategy(execution)
        options._strategy = strategy
        training = poptorch.trainingModel(own, options, poptorch.optim.SGD(own.parameters(), lr=0.1))
        for _ in range(3):
            mine = strategy.local_replicas
            own_rows = slice(mine.start, mine.stop)  # the instance's rows of each micro-batch
            training(*(each.unflatten(0, (4, 3, 4))[:, own_rows].flatten(0, 2) for each in (x, labels)))
        training.destroy()
        return [0.0], state_of(own)

    [one] = on_instances(1, 3, lambda strategy: train(strategy, None))
    for found in [*on_instances(1, 3, train), *on_instances(3, 3, train)]:
        assert same_bits(found, one)


def test_a_failing_stage_ends_the_stages_of_all_replicas():
    class Failing(Staged):
        calls = 0

        def forward(self, x, labels):
            self.calls += 1
            if self.calls == 6 and float(x[0, 0]) == 1:
                raise ArithmeticError("replica 1 cannot")
            return super().forward(x, labels)

    options = poptorch.Options().replicationFactor(3)
    options.Training.gradientAccumulation(4)
    options.setExecutionStrategy(poptorch.PipelinedExecution())
    training = poptorch.trainingModel(Failing(), options)
    x = torch.randn(4, 3, 4, 6)
    x[:, :, 0, 0] = torch.arange(3)
    rows = x.flatten(0, 2), torch.zeros(48, dtype=torch.int64)
    training(*rows)
    with pytest.raises(ArithmeticError, match="replica 1 cannot"):
        training(*rows)
    training.destroy()


# ---- evaluation


def test_evaluations_use_the_moving_statistics():
    module, batch = synchronised(new()), rows(4)
    strategy = strategies.IPUStrategy(4)
    trainer = sgd_trainer(strategy, module)
    trainer.step(part(strategy, batch))
    dataset = strategies.torch.distribute_dataset(strategy, batch, batch_size=2, shuffle=False)
    found = list(trainer.predict(dataset, lambda module, batch: module.first(batch["x"][:, None])))
    with torch.no_grad():
        wanted = module.eval().first(batch["x"][:, None])
    torch.testing.assert_close(torch.from_numpy(np.concatenate(found)), wanted)


def test_an_evaluation_takes_no_layers_from_a_loop(on_instances):
    """Backward passes of the loop recompute the layers, which look for the replica of their module."""
    module, batch = synchronised(new(Checkpointed, False)), rows(2)

    def loop(strategy, evaluates):
        own, model = distributed(strategy, module)
        if evaluates:
            turns = InferenceTurns(strategy.replicas, own, ReplicaMemory(), lambda own, x: own(x), 0)
            turns([[batch["x"]]], 0)
        loss_fn(model, part(strategy, batch))[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, evaluated in on_instances(2, 2, lambda strategy: [loop(strategy, one) for one in (False, True)]):
        assert all(map(torch.equal, plain, evaluated))


def test_a_wait_for_a_replica_that_does_not_come_has_a_limit():
    """The loss function of replica 2 holds up the others for longer than the limit."""
    strategy, rows = strategies.IPUStrategy(3), torch.arange(12.0).reshape(6, 2)
    strategy.replicas.communicator.limit_waits(0.1)

    def loss(own, x):
        if x[0, 0] == rows[4, 0]:
            threading.Event().wait(0.5)
        return own(x).square().mean()

    trainer = sgd_trainer(strategy, nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), loss)
    with pytest.raises(CollectiveTimeoutError, match=r"has waited for replica 2 .* '1', forward.* timeout_s = 0\.1"):
        trainer.step(rows)
    assert math.isfinite(trainer.step(rows + 1)["loss"])
    trainer.close()


def test_an_evaluation_refuses_layers_in_training_mode():
    module, strategy = synchronised(new()), strategies.IPUStrategy(2)
    trainer = sgd_trainer(strategy, module)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2, shuffle=False)
    with pytest.raises(StrategyError, match=r"SyncBatchNorm 'first\.1' is in training mode"):
        trainer.evaluate(dataset, lambda module, batch: loss_fn(module.train(), batch))


# ---- refusals


def test_a_group_of_processes_is_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3, process_group=object()))
    with pytest.raises(StrategyError, match=r"SyncBatchNorm '1' has a process_group"):
        sgd_trainer(2, module)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_traced_is_refused_by_name():
    module = torch.jit.trace(nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3)), torch.randn(4, 2), check_trace=False)
    with pytest.raises(StrategyError, match=r"SyncBatchNorm '1' is inside a traced or scripted module"):
        strategies.torch.DistributedModel(module, strategies.IPUStrategy(1))


def test_one_value_for_each_channel_is_refused():
    parts = parts_of_rows((8, 3), sizes=(0, 1, 0, 0))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer_trained(strategies.IPUStrategy(4), nn.SyncBatchNorm(3), parts, weighted)


def test_second_derivatives_are_refused():
    def loss(module, batch):
        x = batch["x"].clone().requires_grad_()
        [gradient] = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return gradient.square().sum(), {}

    with pytest.raises(RuntimeError, match="once_differentiable"):
        trained(strategies.IPUStrategy(2), synchronised(new()), rows(2), loss=loss)


# ---- replicas that diverge from the others


class Astray(nn.Module):
    """Two layers, and a fault of replica 1."""

    def __init__(self, what):
        super().__init__()
        self.first, self.second, self.what = nn.SyncBatchNorm(3), nn.SyncBatchNorm(3), what

    def forward(self, batch):
        x = batch["x"]
        if int(batch["replica"][0]) != 1:
            return self.second(self.first(x))
        if self.what == "raises":
            raise ArithmeticError("replica 1 cannot")
        if self.what == "skips the first":
            return self.second(x)
        if self.what == "skips the last":
            return self.first(x)
        return self.first(self.second(x))


def astray(strategy, what, **options):
    module = Astray(what)

    def loss(module, batch):
        return module(batch).square().sum() + sum(0 * one.sum() for one in module.parameters())

    replicas = torch.arange(strategy.num_replicas_in_sync).repeat_interleave(4)
    batch = {"x": torch.randn(len(replicas), 3), "replica": replicas, "y": replicas}
    trainer = sgd_trainer(strategy, module, loss, **options)
    trainer.step(part(strategy, batch))


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raises", ArithmeticError, "replica 1 cannot"),
        ("skips the first", StrategyError, "different layers: replica 0 waits in SyncBatchNorm 'first'"),
        (
            "skips the last",
            StrategyError,
            "replica 0 waits in SyncBatchNorm 'second'.*, replica 1 has ended its passes",
        ),
        ("swaps them", StrategyError, "replica 1 waits in SyncBatchNorm 'second'"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_diverging_replica_ends_the_others(what, error, text, streams):
    with pytest.raises(error, match=text):
        astray(strategies.IPUStrategy(3), what, stream_gradients=streams)


def test_a_step_after_a_failed_one_has_the_same_bits():
    module, batch = synchronised(new()), rows(3)
    calls = []

    def loss(module, batch):
        calls.append(len(calls))
        if len(calls) == 2:
            raise ArithmeticError("only once")
        return loss_fn(module, batch)

    strategy, own = strategies.IPUStrategy(3), copy.deepcopy(module)
    trainer = sgd_trainer(strategy, own, loss, momentum=0.9)
    with pytest.raises(ArithmeticError, match="only once"):
        trainer.step(batch)
    losses = [float(trainer.step(batch)["loss"]) for _ in range(3)]
    assert same_bits((losses, state_of(own)), trained(strategy, module, batch))


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raises", ArithmeticError, "replica 1 cannot"),
        ("skips the first", LayoutMismatchError, r"SyncBatchNorm 'first'.*SyncBatchNorm 'second'"),
        ("skips the last", LayoutMismatchError, "SyncBatchNorm 'second'"),
    ],
)
def test_a_diverging_instance_ends_the_others(what, error, text, on_instances):
    with pytest.raises(error, match=text):
        on_instances(3, 3, lambda strategy: astray(strategy, what))


def test_join_is_refused_by_name(on_instances):
    module = synchronised(new())

    def train(strategy):
        model = strategies.torch.DistributedModel(copy.deepcopy(module), strategy)
        with pytest.raises(StrategyError, match=r"SyncBatchNorm 'first\.1' needs rows of all replicas"), model.join():
            pass

    on_instances(2, 2, train)


# ---- instances that are lost


@pytest.mark.parametrize("fault", ["kill:instance=1,step=1,phase=all_reduce", "cut:instance=0,step=1,phase=forward"])
def test_survivors_carry_on_with_the_same_bits(fault):
    module = synchronised(new())

    def train(strategy):
        own = copy.deepcopy(module)
        trainer = sgd_trainer(strategy, own)
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
        losses = [float(trainer.step(batch)["loss"]) for batch in dataset.epoch(0)]
        return losses, state_of(own)

    one = train(strategies.IPUStrategy(4))
    found = [each for each in run_instances(2, 4, train, [fault], mechanism="ring") if each is not None]
    assert len(found) == 1
    assert same_bits(found[0], one)


# ---- modules that change


def test_a_layer_that_is_converted_later_takes_part(on_instances):
    module, batch = new(), rows(2)

    def loop(strategy):
        model = distributed(strategy, module)[1]
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        loss_fn(model, part(strategy, batch))[0].backward()
        return [parameter.grad for parameter in model.parameters()], state_of(model.module)

    def loop_from_the_start(strategy):
        model = strategies.torch.DistributedModel(synchronised(module), strategy)
        loss_fn(model, part(strategy, batch))[0].backward()
        return [parameter.grad for parameter in model.parameters()], state_of(model.module)

    for found, wanted in zip(on_instances(2, 2, loop), on_instances(2, 2, loop_from_the_start), strict=True):
        assert all(map(torch.equal, found[0], wanted[0]))
        assert all(map(torch.equal, found[1].values(), wanted[1].values()))


def test_a_copy_of_a_loops_model_takes_part(on_instances):
    module, batch = synchronised(new()), rows(2)

    def loop(strategy, copies):
        model = distributed(strategy, module)[1]
        if copies:
            model = copy.deepcopy(model)
        loss_fn(model, part(strategy, batch))[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    found = on_instances(2, 2, lambda strategy: [loop(strategy, copies) for copies in (False, True)])
    for plain, copied in found:
        assert all(map(torch.equal, plain, copied))


def test_a_layer_that_is_no_part_of_the_module_is_refused():
    layer = nn.SyncBatchNorm(7, affine=False)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Linear(7, 5))

    def loss(module, batch):
        return F.cross_entropy(module[2](layer(module[:2](batch["x"]))), batch["y"]), {}

    with pytest.raises(StrategyError, match="make it a part of the module"):
        trained(strategies.IPUStrategy(2), module, rows(2), loss=loss)
