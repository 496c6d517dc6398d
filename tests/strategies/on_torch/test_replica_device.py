"""Replicas that share a device train the same as those in the memory of the module."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from tiers import only
from torch import nn
from torch_modules import MODULES, data, loss_fn, new_module, sgd_trainer

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch
from strategies import StrategyError
from strategies.defaults import Defaults
from strategies.torch.options import TorchOptions
from strategies.torch.replicas.generators import drawing_from
from strategies.torch.tensors import HOST, ReplicaMemory, as_device, chosen, count_of
from strategies.torch.training import move, move_state

REPLICAS = 4
META = torch.device("meta")


def trained(strategy, module, words=None, **options):
    """Return the results of an epoch and an evaluation, plain or as fingerprints."""
    words = [] if words is None else words
    module = copy.deepcopy(module)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, torch.optim.Adam(module.parameters()), **options)
    count = options.get("gradient_accumulation_count", 1)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2, gradient_accumulation_count=count)
    losses = [trainer.step(batch)["loss"] for batch in dataset.epoch(0)]
    testing = strategies.torch.distribute_dataset(strategy, data(), batch_size=7, shuffle=False, remainder="pad")
    found = dict(trainer.evaluate(testing))
    [*outputs] = trainer.predict(testing, lambda module, batch: module(batch["x"]))
    state = trainer.state
    words.append(trainer._training.update.path.path_name if trainer._training.update.path else "host")
    trainer.close()
    return losses, found, *map(strategies.fingerprint, (outputs, dict(state.variables), state.model_state))


def check_alike(on_instances, name, instances, **options):
    module = new_module(name)
    [expected] = on_instances(1, REPLICAS, lambda strategy: trained(strategy, module, **options))
    on_device = on_instances(
        instances, REPLICAS, lambda strategy: trained(strategy, module, replica_device="cpu", **options)
    )
    assert on_device == [expected] * instances


def test_a_device_has_the_bits_of_the_module_in_its_own_memory(on_instances):
    check_alike(on_instances, "convolutions", 2)


@pytest.mark.complete
@pytest.mark.parametrize("name", MODULES)
def test_a_device_has_the_same_bits_for_every_module(on_instances, name):
    check_alike(on_instances, name, 1)


@pytest.mark.complete
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_count": 2},
        {"gradient_transfer_dtype": "bfloat16", "compute_dtype": "bfloat16", "loss_scaling": "dynamic"},
        {"stream_gradients": True},
        {"replicated_optimizer_state_sharding": True},
        {"model_state_aggregation": "per_replica"},
    ],
    ids=", ".join,
)
def test_a_device_has_the_same_bits_with_every_option(on_instances, options):
    check_alike(on_instances, "convolutions", 2, **options)


def test_replicas_take_turns_on_a_device_with_the_parameters_of_the_module():
    at_work, most, parameters = threading.Semaphore(1), [], []

    def loss(module, batch):
        most.append(at_work.acquire(blocking=False))
        parameters.append({one.data_ptr() for one in module.parameters()})
        value = module(batch).square().mean()
        at_work.release()
        return value

    module = nn.Linear(2, 1)
    own = {one.data_ptr() for one in module.parameters()}
    strategy = strategies.IPUStrategy(REPLICAS)
    trainer = sgd_trainer(strategy, module, loss, replica_device="cpu")
    with torch.no_grad():
        module.weight.fill_(2)
        module.bias.fill_(1)
    assert trainer.step(torch.ones(REPLICAS, 2))["loss"] == 25.0, "of the parameters as they are now"
    assert most == [True] * (REPLICAS + 1), "one replica computes at a time, and the first one once more to compare"
    assert all(one == own for one in parameters)


def test_a_replica_has_its_rows_on_the_device_of_the_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(META)
    memory = ReplicaMemory(META)
    assert module(memory.put({"x": torch.ones(4, 2)})["x"]).device == META


class TestTheDevice:
    @pytest.mark.parametrize(
        ("given", "count", "local_index", "expected"),
        [
            ("cuda", 1, 0, "cuda:0"),
            ("cuda", 1, 3, "cuda:0"),
            ("cuda", 3, 4, "cuda:1"),
            ("cuda:2", 3, 1, "cuda:2"),
            ("xpu", 2, 1, "xpu:1"),
            ("cpu", 1, 1, "cpu"),
        ],
    )
    def test_instances_take_devices_in_turn(self, given, count, local_index, expected):
        assert chosen(torch.device(given), count, local_index) == torch.device(expected)

    @pytest.mark.parametrize(
        ("given", "count", "message"),
        [
            ("cuda", 0, "replica_device is 'cuda', but PyTorch sees no cuda device here; .* leave replica_device out"),
            ("cuda:3", 3, "replica_device is 'cuda:3', but there are only 3 here, .* or 'cuda', so"),
        ],
    )
    def test_a_missing_device_is_refused(self, given, count, message):
        with pytest.raises(StrategyError, match=message):
            chosen(torch.device(given), count, 0)

    def test_pytorch_counts_the_devices(self):
        assert count_of("cpu") == 1
        assert count_of("hpu") == 0  # this PyTorch knows only the name
        assert count_of("cuda") == torch.cuda.device_count()

    @pytest.mark.parametrize(
        ("given", "kind", "message"),
        [
            (True, TypeError, "replica_device is True; give 'cuda'"),
            (0, TypeError, "replica_device is 0; give 'cuda'"),
            ("gpu", ValueError, "replica_device is 'gpu', which PyTorch does not know"),
            ("meta", ValueError, "tensors have no values"),
        ],
    )
    def test_invalid_devices_are_refused_as_options(self, given, kind, message):
        with pytest.raises(kind, match=message):
            TorchOptions(replica_device=given)

    def test_none_and_a_torch_device_are_accepted(self):
        assert as_device(None) is None
        assert as_device(torch.device("cuda", 1)) == TorchOptions(replica_device="cuda:1").device

    def test_a_device_with_pipeline_stages_is_refused(self):
        pipeline = poptorch.PipelinedExecution("B1", "B2").pipeline
        with pytest.raises(ValueError, match="replica_device is 'cuda', on which replicas take turns, but the stages"):
            TorchOptions(replica_device="cuda", pipeline=pipeline)

    def test_a_module_on_the_meta_device_is_refused(self):
        with pytest.raises(StrategyError, match="weight is on 'meta'|bias is on 'meta'"):
            sgd_trainer(1, nn.Linear(2, 1, device=META), lambda module, batch: 0)

    def test_a_module_on_several_devices_is_refused(self):
        module = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1, device=META))
        with pytest.raises(StrategyError, match="on several devices, .* on cpu, .* on meta; move it to one"):
            sgd_trainer(1, module, lambda module, batch: 0)

    def test_the_optimizer_state_moves_to_the_device(self):
        module = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        move_state(optimizer, META)
        state = optimizer.state[module.weight]
        assert {name: value.device.type for name, value in state.items()} == {
            "step": "cpu",  # PyTorch keeps it there
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }

    def test_a_move_that_makes_new_parameters_is_refused(self):
        module = nn.Linear(2, 1)
        with pytest.raises(StrategyError, match="to.'meta'. has made new parameters.* before you construct"):
            move(module, torch.optim.Adam(module.parameters()), META)


class TestRandomNumbers:
    def test_drawing_on_a_device_leaves_the_generator_of_the_cpu_alone(self):
        with drawing_from(7, HOST):
            torch.empty(3, device=META).uniform_()
            drawn = torch.rand(5)
        assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(7)))

    def test_the_program_goes_on_as_if_nothing_had_been_drawn(self):
        torch.manual_seed(5)
        expected = torch.rand(2)
        torch.manual_seed(5)
        with drawing_from(7, HOST):
            torch.rand(9)
        assert torch.equal(torch.rand(2), expected)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of CUDA")
    def test_kernels_that_use_the_default_cuda_generator_draw_the_same_per_replica(self):
        """A GRU's dropout uses that generator; it is seeded for each replica, so both may draw from it."""
        layers = nn.GRU(3, 3, num_layers=2, dropout=0.5).cuda()
        rows = torch.ones(4, 2, 3, device="cuda")

        def drawn():
            with drawing_from(7, rows.device):
                return layers(rows)[0]

        assert torch.equal(drawn(), drawn())


COMPILED = Defaults(exchange="compiled")
OF_DEVICES = {
    "plain": {},
    "16 bits": {"gradient_transfer_dtype": "bfloat16", "compute_dtype": "bfloat16", "loss_scaling": "dynamic"},
    "sharded": {"replicated_optimizer_state_sharding": True, "check_numerics": True},
    "own buffers": {"model_state_aggregation": "per_replica", "gradient_accumulation_count": 2},
}


class TestExchangesOnTheDevice:
    @pytest.mark.parametrize("options", OF_DEVICES.values(), ids=OF_DEVICES)
    @pytest.mark.parametrize("replicas", only([6], [4, 6]))  # some instances have several nodes of the tree
    def test_exchanges_on_the_device_have_the_bits_of_the_host(self, on_instances, replicas, options):
        module = new_module("convolutions")
        [expected] = on_instances(1, replicas, lambda strategy: trained(strategy, module, **options))
        for instances in (1, 2, 3) if replicas == 6 else (1, 2, 4):
            words = []
            found = on_instances(
                instances,
                replicas,
                lambda strategy, words=words: trained(strategy, module, words, replica_device="cpu", **options),
                defaults=COMPILED,
            )
            assert found == [expected] * instances, instances
            assert set(words) == {"local" if instances == 1 else "compiled"}
