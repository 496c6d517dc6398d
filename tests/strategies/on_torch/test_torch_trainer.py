"""Modules of PyTorch are trained with the same bits for every number of instances."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiers import also, first_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_modules import MODULES, data, loss_fn, new_module, sgd_trainer

import strategies
import strategies.torch
from strategies import DisagreementError, NonFiniteGradientError, StrategyError

REPLICAS = 4


def trained(strategy, module, optimizer=torch.optim.Adam, steps=3, loss_fn=loss_fn, lr=1e-2, **options):
    """Return losses of all steps, and fingerprints of parameters, buffers and optimizer state at the end."""
    count = options.get("gradient_accumulation_count", 1)
    module = copy.deepcopy(module)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer(module.parameters(), lr), **options)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2, gradient_accumulation_count=count)
    losses = [trainer.step(batch)["loss"] for epoch in range(2) for batch in dataset.epoch(epoch)][:steps]
    state = trainer.state
    trainer.close()
    parts = (dict(state.variables), state.model_state)
    if not trainer.is_sharded:
        parts = (*parts, state.optimizer_state["state"])
    return losses, *map(strategies.fingerprint, parts)


def check_all_alike(found):
    assert all(one == found[0] for one in found)
    assert all(np.isfinite(found[0][0]))
    return found[0]


class TestBits:
    @pytest.mark.parametrize("name", MODULES)
    def test_bits_do_not_depend_on_the_instances(self, name, everywhere):
        module = new_module(name)
        check_all_alike(everywhere(REPLICAS, lambda strategy: trained(strategy, module)))

    @pytest.mark.parametrize(
        "options",
        [
            {"gradient_accumulation_count": 2, "reduction_method": "sum"},
            {"compute_dtype": "bfloat16", "loss_scaling": "dynamic"},
            {"stream_gradients": True},
            {"gradient_transfer_dtype": "bfloat16"},
            *map(
                also,
                (
                    {"gradient_accumulation_count": 2},
                    {"gradient_accumulation_count": 3, "reduction_method": "running_mean"},
                    {"gradient_transfer_dtype": torch.bfloat16},
                    {"compute_dtype": torch.bfloat16},
                    {"before_update": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1)},
                ),
            ),
        ],
        ids=", ".join,
    )
    def test_bits_do_not_depend_on_the_instances_with_any_option(self, options, everywhere):
        module = new_module("convolutions")
        check_all_alike(everywhere(REPLICAS, lambda strategy: trained(strategy, module, **options)))

    def test_one_replica_has_the_bits_of_plain_pytorch(self):
        module, count = new_module("embedding"), 2
        plain = copy.deepcopy(module)
        strategy = strategies.IPUStrategy(1)
        losses, parameters, *_ = trained(strategy, module, gradient_accumulation_count=count)
        optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
        batches = strategies.torch.distribute_dataset(strategy, data(), batch_size=2, gradient_accumulation_count=count)
        expected = []
        for epoch in range(2):
            for batch in batches.epoch(epoch):
                seen = []
                optimizer.zero_grad()
                for number in range(count):
                    torch.manual_seed(strategies.torch.seed_of(0, 0, len(expected), number))
                    rows = slice(2 * number, 2 * number + 2)
                    loss, _ = loss_fn(plain, {name: each[rows] for name, each in batch.items()})
                    (loss / count).backward()
                    seen.append(loss.item())
                optimizer.step()
                expected.append(float(np.float32(sum(seen) / count)))
        assert losses == expected[:3]
        assert parameters == strategies.fingerprint({n: p.detach().numpy() for n, p in plain.named_parameters()})

    def test_several_replicas_match_one_large_batch_up_to_rounding(self):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 5))

        def weights(replicas):
            own = copy.deepcopy(module)
            for _ in range(3):
                one_step(own, replicas=replicas, rows=8)
            return own[1].weight

        torch.testing.assert_close(weights(4), weights(1), rtol=0, atol=1e-6)

    def test_bits_do_not_depend_on_the_generator_of_the_process(self):
        module = new_module("recurrent")
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(trained(strategies.IPUStrategy(2), module, steps=2))
        assert found[0] == found[1]

    def test_bits_depend_on_the_seed(self):
        module = new_module("recurrent")
        one, other = (trained(strategies.IPUStrategy(2), module, seed=seed, steps=2) for seed in (0, 1))
        assert one != other


class TestSharding:
    @pytest.mark.parametrize("optimizer", first_of(["Adam", "SGD", "RMSprop"]))
    def test_sharding_gives_the_same_parameters(self, optimizer, everywhere):
        module, kind = new_module("mlp"), getattr(torch.optim, optimizer)
        options = {"momentum": 0.9, "weight_decay": 0.1} if optimizer == "SGD" else {}
        make = functools.partial(kind, **options)
        found = check_all_alike(
            everywhere(
                REPLICAS, lambda strategy: trained(strategy, module, make, replicated_optimizer_state_sharding=True)
            )
        )
        assert found == trained(strategies.IPUStrategy(REPLICAS), module, make)[:3]

    def test_means_of_large_parameters_are_scattered(self, on_instances):
        """Parameters of 1 MiB or more have buffers of their own; 3 replicas do not divide them evenly."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4099), nn.ReLU(), nn.Linear(4099, 5))
        function = functools.partial(trained, module=module, steps=2)
        whole = on_instances(1, 3, function)[0]
        sharded = functools.partial(function, replicated_optimizer_state_sharding=True)
        assert [one[:2] for one in on_instances(3, 3, sharded)] == [whole[:2]] * 3

    def test_sharding_needs_an_elementwise_optimizer(self):
        module = new_module("mlp")
        optimizer = torch.optim.Adafactor(module.parameters())
        with pytest.raises(StrategyError, match=r"Adafactor is not known to .*; use one of ASGD, "):
            strategies.torch.Trainer(
                strategies.IPUStrategy(2), module, loss_fn, optimizer, replicated_optimizer_state_sharding=True
            )

    def test_sharding_needs_an_optimizer_whose_bits_do_not_depend_on_array_ends(self):
        torch.manual_seed(0)
        first, gradient = torch.randn(1003), torch.randn(1003)

        def updated(part, **options):
            parameter = nn.Parameter(first[part].clone())
            parameter.grad = gradient[part].clone()
            torch.optim.Adam([parameter], 1e-2, **options).step()
            return parameter.detach()

        parts = [slice(start, start + 13) for start in range(0, 1003, 13)]
        assert torch.equal(updated(slice(None)), torch.cat([updated(part) for part in parts]))
        module = new_module("mlp")
        optimizer = torch.optim.Adam(module.parameters(), fused=True)
        with pytest.raises(StrategyError, match=r"Adam has fused=True, .*; use fused=False, or "):
            strategies.torch.Trainer(
                strategies.IPUStrategy(2), module, loss_fn, optimizer, replicated_optimizer_state_sharding=True
            )


class TestBuffers:
    def test_buffers_are_means_and_integers_are_those_of_replica_0(self):
        module = new_module("convolutions")
        parts, batch = [], data()
        for replica in range(2):
            own = copy.deepcopy(module)
            rows = slice(4 * replica, 4 * replica + 4)
            torch.manual_seed(strategies.torch.seed_of(0, replica, 0))
            own(batch["x"][rows])
            parts.append(own.norm)
        trainer = sgd_trainer(2, module)
        trainer.step({name: each[:8] for name, each in batch.items()})
        assert torch.equal(module.norm.running_mean, (parts[0].running_mean + parts[1].running_mean) / 2)
        assert module.norm.num_batches_tracked == 1

    def test_unchanged_buffers_keep_their_bits(self):
        """Three times a third of a number need not be that number."""
        module = new_module("embedding")
        before = module.constant.clone()
        trainer = sgd_trainer(3, module)
        trainer.step(data(6))
        assert torch.equal(module.constant, before)
        assert module.seen.sum() == 2 * 64, "replica 0 has seen two rows"

    def test_changes_by_the_program_reach_all_replicas(self):
        """The program changes the buffer in place, by another tensor, and with `per_replica` too."""

        def loss(module, batch):
            return loss_fn(module, batch)[0], {"constant": module.constant.sum()}

        for aggregation in (None, "per_replica"):
            module = new_module("embedding")
            trainer = sgd_trainer(3, module, loss, model_state_aggregation=aggregation)
            batch = data(6)
            trainer.step(batch)
            module.constant.fill_(2)
            assert trainer.step(batch)["constant"] == 2 * module.constant.numel()
            module.constant = torch.full_like(module.constant, 4)
            assert trainer.step(batch)["constant"] == 4 * module.constant.numel()

    def test_per_replica_buffers_with_a_nan_stay_separate(self):
        class Sum(torch.nn.Linear):
            def forward(self, x):
                self.sum[0] += x.sum().detach()
                return super().forward(x).mean()

        module = Sum(2, 1)
        module.register_buffer("sum", torch.tensor([0.0, torch.nan]))
        trainer = sgd_trainer(2, module, lambda own, x: own(x), model_state_aggregation="per_replica")
        for _ in range(2):
            trainer.step(torch.tensor([[1.0, 1.0], [5.0, 5.0]]))
        assert trainer.state.model_state["sum of each replica"][:, 0].tolist() == [4, 20]

    def test_unknown_or_unsuitable_buffer_names_are_refused(self):
        with pytest.raises(
            ValueError, match="there is no buffer or frozen parameter 'mean'; there are norm.running_mean"
        ):
            one_step(new_module("convolutions"), model_state_aggregation={"mean": "first"})
        with pytest.raises(ValueError, match="num_batches_tracked is torch.int64, which has no mean"):
            one_step(new_module("convolutions"), model_state_aggregation={"norm.num_batches_tracked": "mean"})


def one_step(module, loss_fn=loss_fn, replicas=2, rows=8, **options):
    return sgd_trainer(replicas, module, loss_fn, **options).step(data(rows))


class TestTheModule:
    def test_the_module_has_the_mean_gradient_of_its_replicas(self):
        module = new_module("mlp")
        one_step(module)
        plain = new_module("mlp")
        halves = []
        for replica in range(2):
            plain.zero_grad()
            torch.manual_seed(strategies.torch.seed_of(0, replica, 0))
            rows = slice(4 * replica, 4 * replica + 4)
            loss_fn(plain, {name: each[rows] for name, each in data().items()})[0].backward()
            halves.append(plain[1].weight.grad)
        assert torch.equal(module[1].weight.grad, (halves[0] + halves[1]) / 2)

    def test_the_module_can_be_changed_between_steps(self):
        """Changes: a dropout rate, a mode, trained layers, and parameters."""
        module = new_module("mlp")
        trainer, batch = sgd_trainer(2, module, lr=0.0), data(8)
        trainer.step(batch)
        module[3].p = 0.0
        without = trainer.step(batch)["loss"]
        module[3].p = 0.5
        module.eval()
        assert trainer.step(batch)["loss"] == without
        module[4].weight.requires_grad_(False)
        trainer.step(batch)
        assert module[1].weight.grad is not None
        with torch.no_grad():
            module[4].weight.zero_()
            module[4].bias.zero_()
        assert trainer.step(batch)["loss"] == pytest.approx(np.log(5))

    def test_tied_parameters_are_one(self, everywhere):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(64, 5, bias=False)
                self.down = nn.Linear(5, 64, bias=False)
                self.down.weight = nn.Parameter(self.up.weight.t().detach().contiguous())
                self.again = self.up

            def forward(self, x):
                return self.again(self.down(self.up(x.flatten(1))))

        torch.manual_seed(0)
        module = Tied()
        check_all_alike(everywhere(REPLICAS, lambda strategy: trained(strategy, module)))

    def test_the_optimizer_leaves_a_parameter_without_gradient_alone(self, everywhere):
        module = new_module("mlp")
        module.unused = nn.Linear(3, 3)

        def loss(module, batch):
            return F.cross_entropy(nn.Sequential.forward(nn.Sequential(*list(module)[:5]), batch["x"]), batch["y"])

        def train(strategy):
            own = copy.deepcopy(module)
            optimizer = torch.optim.AdamW(own.parameters(), 0.1, weight_decay=0.5)
            trainer = strategies.torch.Trainer(strategy, own, loss, optimizer)
            local = len(strategy.local_replicas)
            trainer.step({name: each[: 2 * local] for name, each in data().items()})
            return torch.equal(own.unused.weight, module.unused.weight), own.unused.weight.grad

        assert everywhere(REPLICAS, train) == [(True, None)] * 7


class TestPartsOutsideOfTheModule:
    def test_a_layer_that_is_taken_out_of_the_module_is_trained_no_more(self):
        module = nn.Sequential(nn.Linear(4, 3))
        removed, added = module[0], nn.Linear(4, 3)
        trainer = sgd_trainer(2, module, lambda module, batch: module(batch).square().mean())
        trainer.optimizer.add_param_group({"params": added.parameters()})
        trainer.step(torch.ones(4, 4))
        module[0], before = added, removed.weight.detach().clone()
        for _ in range(2):
            trainer.step(torch.ones(4, 4))
        assert torch.equal(removed.weight, before)

    def test_a_parameter_outside_of_the_module_is_refused_when_it_has_a_gradient(self):
        module, factor = nn.Linear(4, 3), nn.Parameter(torch.ones(()))
        trainer = sgd_trainer(2, module, lambda module, batch: (module(batch) * factor).square().mean())
        trainer.optimizer.add_param_group({"params": [factor]})
        with pytest.raises(ValueError, match="the optimizer has 1 parameters that do not belong to the module"):
            trainer.step(torch.ones(4, 4))

    def test_other_names_of_metrics_on_an_instance_are_refused(self, on_instances):
        def program(strategy):
            def loss(module, batch):
                return module(batch).mean(), {"long" if strategy.instance_index else "short": torch.ones(())}

            sgd_trainer(strategy, nn.Linear(4, 3), loss).step(torch.ones(2, 4))

        with pytest.raises(DisagreementError, match="has metrics loss, .* instance 0 metrics loss, short"):
            on_instances(2, 2, program)


class TestLossScaling:
    def test_gradients_of_16_bits_are_divided_in_32(self):
        module = new_module("mlp")
        one_step(module, loss_scaling=3.0, gradient_transfer_dtype="bfloat16")
        mean = module[1].weight.grad
        assert torch.equal((mean * 3).bfloat16().float() / 3, mean)
        assert not torch.equal(mean.bfloat16().float(), mean)

    def test_powers_of_two_change_no_bit(self):
        module = new_module("mlp")
        with_scale = trained(strategies.IPUStrategy(2), module, loss_scaling=2.0**7)
        assert with_scale == trained(strategies.IPUStrategy(2), module)


def by_reentrant_checkpoints(module, batch):
    """Return a loss for which a layer is used so often as `module.uses` says, each time in a reentrant checkpoint."""
    x = batch["x"].flatten(1).requires_grad_()
    return sum(checkpoint(module[1], x * number, use_reentrant=True) for number in range(1, module.uses + 1)).mean()


@pytest.mark.parametrize("instances", [1, 2])
def test_gradients_that_come_twice_do_not_leave_during_the_backward_pass(instances, on_instances):
    module = new_module("mlp")
    module.uses = 2

    def train(strategy, **options):
        own = copy.deepcopy(module)
        trainer = sgd_trainer(strategy, own, by_reentrant_checkpoints, **options)
        local = strategy.local_replicas
        for _ in range(4):
            trainer.step({name: rows[2 * local.start : 2 * local.stop] for name, rows in data(4).items()})
        return strategies.fingerprint(trainer.state.variables)

    [expected] = on_instances(1, 2, train)
    assert on_instances(instances, 2, lambda strategy: train(strategy, stream_gradients=True)) == [expected] * instances


class TestRefusals:
    def test_gradients_that_only_some_replicas_have(self):
        def loss(module, batch):
            hidden = module[:4](batch["x"])
            return (module[4](hidden) if batch["y"][0] == data()["y"][0] else hidden).mean()

        with pytest.raises(StrategyError, match=r"4\.weight has no gradient on the replicas \[1\], and one on the oth"):
            one_step(new_module("mlp"), loss)

    def test_gradients_that_are_not_finite(self):
        def loss(module, batch):
            return loss_fn(module, batch)[0] * (torch.nan if batch["y"][0] != data()["y"][0] else 1)

        module = new_module("mlp")
        before = module[1].weight.clone()
        with pytest.raises(NonFiniteGradientError, match=r"1\.weight is not finite at step 0 .* \[1\]"):
            one_step(module, loss, check_numerics=True)
        assert torch.equal(module[1].weight, before)

    def test_values_that_are_no_loss(self):
        for returned, message in (
            (lambda m, b: m(b["x"]), r"the loss is a torch.float32 of shape \[4, 5\]; return a floating-point scalar"),
            (lambda m, b: 3.0, "the loss is float; return"),
            (lambda m, b: torch.ones(()), "the loss depends on no trained parameter"),
            (lambda m, b: (m(b["x"]).mean(), [1]), r"the metrics are a list; return \(loss, dictionary"),
            (lambda m, b: (m(b["x"]).mean(), {"loss": 1.0}), "a metric is called 'loss', which is the name of the"),
            (lambda m, b: (m(b["x"]).mean(), {"all": m(b["x"])}), r"the metric 'all' is of shape \[4, 5\]; .* scalars"),
            (lambda m, b: (m(b["x"]).mean(), {"word": "all"}), "the metric 'word' is 'all'; metrics are scalars"),
        ):
            with pytest.raises(TypeError, match=message):
                one_step(new_module("mlp"), returned)

    def test_sparse_gradients(self):
        module = nn.Sequential(nn.Embedding(9, 5, sparse=True))
        with pytest.raises(StrategyError, match=r"0\.weight is sparse, .* with sparse=False"):
            one_step(module, lambda module, batch: module(batch["y"]).mean())

    def test_a_gradient_that_comes_twice_in_one_backward_pass_but_not_in_the_first_steps(self):
        """In the first steps nothing leaves during the backward pass. In step 3 a half of the gradient has left."""
        module = new_module("mlp")
        module.uses = 1
        trainer = sgd_trainer(2, module, by_reentrant_checkpoints, stream_gradients=True)
        for _ in range(2):
            trainer.step(data(4))
        module.uses = 2
        with pytest.raises(StrategyError, match=r"1\.(weight|bias) came twice in one backward pass"):
            trainer.step(data(4))

    @pytest.mark.parametrize("name", ["check_numerics", "replicated_optimizer_state_sharding", "stream_gradients"])
    def test_options_that_are_neither_true_nor_false(self, name):
        with pytest.raises(TypeError, match=f"^{name} is 'no'; it is True or False"):
            one_step(new_module("mlp"), loss_fn, **{name: "no"})

    def test_another_strategy_for_an_existing_trainer(self):
        trainer = sgd_trainer(1, new_module("mlp"))
        with pytest.raises(AttributeError, match="strategy"):
            trainer.strategy = strategies.IPUStrategy(2)

    def test_modules_that_cannot_be_trained(self):
        strategy = strategies.IPUStrategy(1)
        module = new_module("mlp")
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def make(module, optimizer=optimizer, **options):
            return strategies.torch.Trainer(strategy, module, loss_fn, optimizer, **options)

        with pytest.raises(TypeError, match="the module is a dict; give a torch.nn.Module"):
            make({})
        with pytest.raises(ValueError, match="has no trained parameter"):
            make(nn.ReLU())
        with pytest.raises(
            ValueError, match=r"0\.weight belongs to a lazy module that was not called yet, .* call the module"
        ):
            make(nn.Sequential(nn.LazyLinear(2)))
        with pytest.raises(ValueError, match="the optimizer has 4 parameters that do not belong to the module"):
            make(new_module("mlp"))
        with pytest.raises(TypeError, match="the optimizer is a type; give an instance of a class of torch.optim"):
            make(module, torch.optim.SGD)
        with pytest.raises(StrategyError, match="LBFGS computes the loss several times"):
            make(module, torch.optim.LBFGS(module.parameters()))
        with pytest.raises(StrategyError, match=r"is on 'meta', whose tensors have no values"):
            make(copy.deepcopy(module).to("meta"))
        for options, message in (
            ({"gradient_accumulation_count": 0}, "gradient_accumulation_count is 0"),
            ({"compute_dtype": "int8"}, "compute_dtype is 'int8'; use"),
            ({"model_state_aggregation": "median"}, "model_state_aggregation has 'median'"),
            ({"model_state_aggregation": ""}, "model_state_aggregation has ''"),
            ({"check_numerics": True, "loss_scaling": 2.0}, "use one of them"),
        ):
            with pytest.raises(ValueError, match=message):
                make(module, **options)

    def test_metrics_that_change_their_names(self):
        names = iter(["one", "other"])
        module = new_module("mlp")
        trainer = sgd_trainer(1, module, lambda m, b: (loss_fn(m, b)[0], {next(names): 1.0}))
        trainer.step(data())
        with pytest.raises(StrategyError, match="has the metrics loss, other, but earlier the metrics were loss, one"):
            trainer.step(data())

    def test_a_step_whose_exchange_cannot_be_made_can_be_repeated(self, monkeypatch):
        def fail(*_):
            raise ZeroDivisionError

        trainer, batch = sgd_trainer(2, new_module("mlp"), loss_fn), data(8)
        with monkeypatch.context() as patch:
            patch.setattr("strategies.torch.engine.GradientExchange", fail)
            with pytest.raises(ZeroDivisionError):
                trainer.step(batch)
        assert trainer.step(batch)["loss"] > 0

    @pytest.mark.parametrize(
        ("rates", "dropouts", "message"),
        [
            ((0.1, 1.1), (0.5, 0.5), r"instance 1 computes the update differently .*lr=1.1"),
            ((0.1, 0.1), (0.2, 0.3), r"computes the module differently .*Dropout\(p=0.3"),
        ],
    )
    def test_instances_that_differ(self, rates, dropouts, message, on_instances):
        module = new_module("mlp")

        def train(strategy):
            own = copy.deepcopy(module)
            own[3].p = dropouts[strategy.instance_index]
            trainer = sgd_trainer(strategy, own, lr=rates[strategy.instance_index])
            with pytest.raises(DisagreementError, match=message):
                trainer.step(data())

        on_instances(2, 2, train)
