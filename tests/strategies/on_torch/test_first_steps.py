"""First steps of a training, compared with plain PyTorch and between instances without side effects."""

from __future__ import annotations

import collections
import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from idiom import FEATURES, Apply, classify, mlp, rows_of
from idioms_of_modules import Teacher, layered
from torch import nn
from torch_modules import sgd_trainer

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch
from strategies import DivergenceError, StrategyError
from strategies.torch.plain_pass import Comparison, Expected, expected_of
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.undoing import CannotBeUndoneError, undone


def trainer_of(module, loss=classify, strategy=None, replicas=2, **options):
    strategy = strategy or strategies.IPUStrategy(replicas)
    return sgd_trainer(strategy, module, loss, **options)


def one_step(module, loss=classify, replicas=2, **options):
    return trainer_of(module, loss, replicas=replicas, **options).step(rows_of(0, range(2 * replicas)))


TOLD, CALLS = [], 0


class Kept:
    """An object whose method is the loss function, with its own state and state in global variables."""

    def __init__(self):
        self.calls = 0

    def loss(self, module, batch):
        global CALLS
        self.calls, CALLS = self.calls + 1, CALLS + 1
        TOLD.append(1)
        return classify(module, batch)


class Forgets(nn.Module):
    """A layer whose copies differ, like those of a library that ignores the memo of `copy.deepcopy`."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(FEATURES, 3)
        self.is_copy = False

    def __deepcopy__(self, memo):
        found = type(self)()
        found.last = copy.deepcopy(self.last, memo)
        found.is_copy = True
        return found

    def forward(self, x):
        return self.last(x) * (2 if self.is_copy else 1)


class TestADifference:
    def test_the_error_names_the_loss_and_the_step(self):
        with pytest.raises(
            StrategyError, match=r"in step 0 the loss of micro-batch 0 on replica 0 is .* plain PyTorch"
        ):
            one_step(Forgets())

    def test_the_error_names_the_first_parameter_and_both_norms(self):
        class Halves(Forgets):
            def forward(self, x):
                found = self.last(x)
                if self.is_copy:
                    found.register_hook(lambda gradient: gradient / 2)
                return found

        with pytest.raises(
            StrategyError,
            match=r"the gradient of last\.weight on replica 0 has the norm .* computes the norm .* verify_steps=0",
        ):
            one_step(Halves())

    def test_the_error_leaves_the_training_unchanged(self):
        module = Forgets()
        before = copy.deepcopy(module.last.state_dict())
        with pytest.raises(StrategyError, match="the step was not applied"):
            one_step(module)
        assert all(torch.equal(one, before[name]) for name, one in module.last.state_dict().items())

    def test_all_instances_raise_the_error(self, on_instances):
        def refused(strategy):
            trainer = trainer_of(Forgets(), strategy=strategy)
            with pytest.raises(StrategyError, match="in step 0 the loss"):
                trainer.step(rows_of(0, strategy.local_replicas))

        torch.manual_seed(0)
        on_instances(2, 4, refused)

    def test_later_steps_and_verify_steps_0_skip_the_comparison(self):
        one_step(Forgets(), verify_steps=0)
        module, factors = mlp(), [1]
        trainer = trainer_of(module, lambda own, batch: classify(own, batch) * (1 if own is module else factors[0]))
        trainer.step(rows_of(0, range(2)))
        factors[0] = 2
        trainer.step(rows_of(1, range(2)))
        module[0].requires_grad_(False)  # replicas get new copies
        with pytest.raises(StrategyError, match="in step 2 the loss"):
            trainer.step(rows_of(2, range(2)))

    @pytest.mark.parametrize(
        "options",
        [
            {"stream_gradients": True},
            {"gradient_accumulation_count": 2},
            {"gradient_accumulation_count": 2, "reduction_method": "running_mean"},
            {"gradient_accumulation_count": 2, "reduction_method": "sum"},
            {"gradient_transfer_dtype": "int8", "loss_scaling": 8.0},
            {"gradient_transfer_dtype": "bfloat16"},
            {"compute_dtype": "bfloat16", "loss_scaling": "dynamic"},
            {"replicated_optimizer_state_sharding": True},
            {"replica_device": "cpu"},
        ],
        ids=str,
    )
    def test_every_option_finds_a_real_difference_and_no_false_one(self, options):
        told = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Comparison, "_tell", lambda self, *words: told.append(words))
            one_step(layered(nn.BatchNorm1d(6), nn.Dropout(0.3)), **options)
            assert told == []
            one_step(Forgets(), **options)
        assert len(told) >= 2

    def test_a_pipeline_finds_the_difference(self):
        class Staged(Forgets):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(FEATURES, FEATURES)

            def forward(self, x, labels):
                with poptorch.Block("first", ipu_id=0):
                    hidden = F.dropout(self.first(x), 0.3)
                with poptorch.Block("second", ipu_id=1):
                    output = super().forward(hidden)
                    return output, F.cross_entropy(output, labels)

            def __deepcopy__(self, memo):
                found = super().__deepcopy__(memo)
                found.first, found.is_copy = copy.deepcopy(self.first, memo), not self.is_right
                return found

        options = poptorch.Options()
        options.Training.gradientAccumulation(2)
        batch = rows_of(0, range(2))
        for is_right in (True, False):
            model = Staged()
            model.is_right = is_right
            optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
            training = poptorch.trainingModel(model, options, optimizer)
            if is_right:
                training(batch["x"], batch["y"])
            else:
                with pytest.raises(StrategyError, match="the loss of micro-batch 0 on replica 0"):
                    training(batch["x"], batch["y"])
            training.destroy()


class TestInstancesThatDrift:
    def test_the_second_step_refuses_drift(self, on_instances):
        def drift(strategy):
            module = nn.Linear(FEATURES, 3)
            trainer = trainer_of(module, strategy=strategy)
            trainer.step(rows_of(0, strategy.local_replicas))
            with torch.no_grad():
                module.bias += strategy.instance_index
            with pytest.raises(DivergenceError, match=r"before step 1 .*\['bias'\], with the norms .* on the inst"):
                trainer.step(rows_of(1, strategy.local_replicas))

        on_instances(2, 4, drift)

    def test_a_loop_refuses_drift_after_its_first_update(self, on_instances):
        def drift(strategy):
            module = drawn_linear()
            model = strategies.torch.DistributedModel(module, strategy)
            classify(model, rows_of(0, strategy.local_replicas)).backward()
            with torch.no_grad():
                module.bias -= 0.1 * strategy.instance_index
            with pytest.raises(DivergenceError, match=r"before step 1 .*\['bias'\]"):
                classify(model, rows_of(1, strategy.local_replicas)).backward()

        on_instances(2, 2, drift)

    def test_later_drift_is_refused_at_the_next_power_of_two_step(self, on_instances):
        def drift(strategy):
            module = drawn_linear()
            trainer = trainer_of(module, strategy=strategy)
            for step in range(4):
                if step == 3:
                    module.bias.data += strategy.instance_index
                trainer.step(rows_of(step, strategy.local_replicas))
            with pytest.raises(DivergenceError, match=r"before step 4 .*\['bias'\]"):
                trainer.step(rows_of(4, strategy.local_replicas))

        on_instances(2, 4, drift)

    @pytest.mark.parametrize("is_counted", [True, False])
    def test_a_loop_refuses_counted_writes_at_once_and_others_at_a_power_of_two(self, on_instances, is_counted):
        def drift(strategy):
            module = drawn_linear()
            model = strategies.torch.DistributedModel(module, strategy)
            for step in range(9):
                if step == 6:
                    with torch.no_grad():
                        (module.bias if is_counted else module.bias.data).add_(strategy.instance_index)
                        (module.weight if is_counted and strategy.instance_index else torch.zeros(1)).add_(0)
                try:
                    classify(model, rows_of(step, strategy.local_replicas)).backward()
                except DivergenceError as error:
                    return step, str(error)
            return None

        for step, said in on_instances(2, 2, drift):
            assert step == (6 if is_counted else 8)
            assert "['bias']" in said

    def test_weights_that_one_instance_swaps_and_restores_are_no_drift(self, on_instances):
        def evaluate_with_other_weights(strategy):
            module = drawn_linear()
            model = strategies.torch.DistributedModel(module, strategy)
            for step in range(7):
                if strategy.is_chief:
                    with torch.no_grad():
                        kept = module.weight.clone()
                        module.weight.zero_()
                        module.weight.copy_(kept)
                classify(model, rows_of(step, strategy.local_replicas)).backward()

        on_instances(2, 2, evaluate_with_other_weights)

    def test_verify_steps_0_lets_instances_drift(self, on_instances):
        def drift(strategy):
            module = drawn_linear()
            model = strategies.torch.DistributedModel(module, strategy, verify_steps=0)
            for step in range(2):
                classify(model, rows_of(step, strategy.local_replicas)).backward()
                with torch.no_grad():
                    module.bias -= 0.1 * strategy.instance_index

        on_instances(2, 2, drift)


def drawn_linear():
    return nn.Linear(FEATURES, 3)


class TestNoSideEffects:
    """Absence of side effects of the comparison: a training has the same bits with and without it."""

    def test_trained_parameters_are_unchanged(self):
        found = []
        for steps in (0, 1):
            torch.manual_seed(0)
            module = nn.Sequential(Teacher(), nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.4))
            trainer = trainer_of(module, verify_steps=steps)
            for step in range(3):
                trainer.step(rows_of(step, range(2)))
            found.append(strategies.fingerprint([one.numpy() for one in module.state_dict().values()]))
        assert found[0] == found[1]

    def test_generators_are_unchanged(self):
        own, array = torch.Generator().manual_seed(1), np.random.default_rng(2)

        def loss(module, batch):
            noise = random.random() + np.random.rand() + array.random() + torch.rand((), generator=own)  # noqa: NPY002
            return classify(module, batch) * noise

        def after(steps):
            random.seed(3)
            np.random.seed(4)  # noqa: NPY002
            own.manual_seed(1)
            array.bit_generator.state = state
            return float(one_step(nn.Linear(FEATURES, 3), loss, replicas=1, verify_steps=steps)["loss"])

        state, before = array.bit_generator.state, torch.get_rng_state()
        torch.manual_seed(5)
        one = after(0)
        torch.manual_seed(5)
        assert after(1) == one
        torch.set_rng_state(before)

    def test_gradients_and_batches_are_unchanged(self):
        def loss(module, batch):
            batch["x"].mul_(2)
            return classify(module, batch)

        batch = rows_of(0, range(1))
        expected = batch["x"] * 2
        trainer = trainer_of(nn.Linear(FEATURES, 3), loss, replicas=1)
        trainer.step(batch)
        assert torch.equal(batch["x"], expected)

    def test_objects_that_the_loss_function_and_hooks_reach_are_unchanged(self):
        seen, counts, center = [], collections.Counter(), torch.zeros(3)
        calls = 0

        def loss(module, batch):
            nonlocal calls
            calls += 1
            counts["calls"] += 1
            center.add_(1)
            return classify(module, batch)

        module = nn.Linear(FEATURES, 3)
        module.register_forward_hook(lambda *_: seen.append(1))
        one_step(module, loss, replicas=1)
        assert (calls, counts["calls"], len(seen), center.tolist()) == (1, 1, 1, [1.0, 1.0, 1.0])

    def test_global_variables_and_objects_of_the_program_are_unchanged(self):
        kept = Kept()
        one_step(mlp(), kept.loss, replicas=1)
        assert (kept.calls, TOLD, CALLS) == (1, [1], 1)

    def test_a_loss_function_that_reads_an_iterator_is_called_only_once(self):
        numbers = itertools.count(1)
        metrics = one_step(
            mlp(), lambda module, batch: (classify(module, batch), {"number": next(numbers)}), replicas=1
        )
        assert metrics["number"] == 1

    def test_attributes_of_a_module_are_unchanged(self):
        class Remembers(nn.Linear):
            def __init__(self):
                super().__init__(FEATURES, 3)
                self.calls, self.log, self.by_name = 0, collections.deque(), {"x": {1}}
                self.register_buffer("grown", torch.zeros(1))

            def forward(self, x):
                self.calls += 1
                self.log.append(x)
                self.by_name["x"].add(len(self.log))
                self.by_name["y"] = self.hidden = super().forward(x)
                self.grown = torch.ones(2)
                self.weight.data.mul_(2)
                self.bias.data = self.bias.data + 1
                return self.hidden

        module = Remembers()
        weight, bias = module.weight.clone(), module.bias.clone()
        with undone(module, classify):
            classify(module, rows_of(0, range(1))).backward()
        assert (module.calls, len(module.log), module.by_name, module.grown.shape) == (0, 0, {"x": {1}}, (1,))
        assert not hasattr(module, "hidden")
        assert torch.equal(module.weight, weight)
        assert torch.equal(module.bias, bias)
        assert module.weight.grad is None

    def test_the_sign_of_zero_is_unchanged(self):
        module = Apply(lambda self, x: self.zero.neg_() + x, zero=nn.Parameter(torch.zeros(3)))
        with undone(module, classify), torch.no_grad():
            module(torch.ones(3))
        assert not module.zero.signbit().any()

    def test_more_memory_than_the_limit_is_not_copied(self):
        large = [torch.zeros(9 << 20), torch.zeros(9 << 20)]
        with pytest.raises(CannotBeUndoneError, match="more objects or bytes than"), undone(mlp(), lambda *_: large):
            raise AssertionError


class TestThresholds:
    """Thresholds of the comparison: equal or different."""

    GRADIENT = torch.linspace(-1, 1, 64)

    def found(self, mine, expected=GRADIENT, dtype=None):
        comparison = Comparison(Expected((1.0,), (expected, torch.ones(4)), ("one", "other"), frozenset(), dtype))
        comparison.gradient(0, mine)
        return comparison.difference

    def test_half_of_the_digits_must_agree(self):
        assert not self.found(self.GRADIENT * (1 + 1e-4))
        assert self.found(self.GRADIENT * (1 + 1e-3))
        assert not self.found(self.GRADIENT * (1 + 1e-2), dtype=torch.bfloat16)
        assert self.found(self.GRADIENT * 1.2, dtype=torch.bfloat16)

    def test_rounding_of_a_gradient_that_is_rounding_alone(self):
        assert not self.found(self.GRADIENT * 1e-8, -self.GRADIENT * 1e-8)
        assert self.found(self.GRADIENT * 1e-4, -self.GRADIENT * 1e-4)

    def test_a_missing_gradient_differs(self):
        assert "has no value, but plain PyTorch" in self.found(None)
        assert self.found(self.GRADIENT, None)
        assert not self.found(None, None)
        assert not self.found(None, torch.zeros(3))

    def test_numbers_that_are_not_finite(self):
        broken = self.GRADIENT * torch.inf
        assert not self.found(broken, broken + torch.nan)
        assert self.found(self.GRADIENT, broken)

    def test_another_shape_differs(self):
        assert self.found(self.GRADIENT[:3])

    @pytest.mark.parametrize(
        ("mine", "other", "is_alike"),
        [(1.0, 1.0001, True), (1.0, 1.1, False), (math.nan, 1.0, False), (1.0, math.nan, False), (1.0, math.inf, False)]
        + [(math.nan, math.nan, True), (math.inf, math.nan, True)],
    )
    def test_a_loss_that_is_not_finite_on_one_side_only(self, mine, other, is_alike):
        comparison = Comparison(Expected((other,), (), (), frozenset(), None))
        comparison.losses([mine])
        assert (not comparison.difference) is is_alike


class TestSkippedComparisons:
    def expected(self, module, loss=classify, **options):
        return expected_of(
            ReplicaMemory(module), loss, rows_of(0, range(1)), 0, 1.0, strategies.torch.TorchOptions(**options)
        )

    def test_if_plain_pytorch_fails_the_replica_raises_the_error(self):
        def loss(module, batch):
            return F.cross_entropy(module(batch["x"]), batch["y"][:1])

        assert self.expected(mlp()) is not None
        assert self.expected(mlp(), loss) is None
        with pytest.raises(ValueError, match="Expected input batch_size"):
            one_step(mlp(), loss)

    def test_replicas_that_compute_together_or_have_own_rows_are_not_compared(self):
        module = Apply(lambda self, x: x @ self.table[0], table=nn.Parameter(torch.ones(2, FEATURES, 3)))
        assert self.expected(module) is not None
        strategies.torch.group_replicas(module.table, strategies.torch.ReplicaGroups())
        assert self.expected(module) is None
        assert self.expected(layered(nn.SyncBatchNorm(6))) is None
