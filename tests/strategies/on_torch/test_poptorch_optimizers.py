"""PopTorch's optimizers: variable numbers, dtypes of states, norms, and states that stay whole."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from poptorch_modules import Line, rows
from torch import nn

import strategies
import strategies.torch.poptorch as poptorch
from strategies import StrategyError


@pytest.fixture
def model():
    torch.manual_seed(4)
    return Line(2)


def sharding(replicas=2):
    options = poptorch.Options().replicationFactor(replicas)
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
    options.TensorLocations.setOptimizerLocation(location.minElementsForReplicatedTensorSharding(1))
    return options


def bits_of(model):
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


class TestAdamWithoutCorrection:
    def test_moments_are_not_corrected(self):
        value, gradients = np.array([3.0, -1.0]), np.random.default_rng(3).standard_normal((4, 2))
        parameter = nn.Parameter(torch.tensor(value))
        own = poptorch.optim.AdamW([parameter], 0.1, (0.8, 0.9), 0.01, weight_decay=0.2, bias_correction=False)
        first, second = np.zeros(2), np.zeros(2)
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient)
            own.step()
            first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
            value = value * (1 - 0.1 * 0.2) - 0.1 * first / (np.sqrt(second) + 0.01)
            np.testing.assert_allclose(parameter.detach(), value, rtol=1e-12)

    def test_maximize_ascends(self):
        up, down = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        for parameter, maximize in ((up, True), (down, False)):
            parameter.grad = torch.ones(2)
            own = poptorch.optim.AdamW([parameter], 0.1, weight_decay=0.0, bias_correction=False, maximize=maximize)
            own.step()
        torch.testing.assert_close(up - 1, 1 - down)

    def test_amsgrad_is_refused(self, model):
        with pytest.raises(StrategyError, match="amsgrad .* bias_correction=True"):
            poptorch.optim.AdamW(model.parameters(), amsgrad=True, bias_correction=False)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("Adam", {}),
        ("AdamW", {"bias_correction": False}),
        ("RMSprop", {"momentum": 0.5, "use_tf_variant": True}),
    ],
)
def test_states_are_sharded_without_a_change_of_bits(kind, numbers, model, on_instances):
    def train(strategy, shards):
        own = copy.deepcopy(model)
        options = sharding() if shards else poptorch.Options().replicationFactor(2)
        options._strategy = strategy
        training = poptorch.trainingModel(own, options, getattr(poptorch.optim, kind)(own.parameters(), **numbers))
        first, count = 2 * strategy.local_replicas.start, 2 * len(strategy.local_replicas)
        for _ in range(2):
            training(*(each[first : first + count] for each in rows(4, 2)))
        assert training.trainer.is_sharded is shards
        training.destroy()
        return bits_of(own)

    whole = on_instances(1, 2, lambda strategy: train(strategy, False))
    assert on_instances(2, 2, lambda strategy: train(strategy, True)) == whole * 2


@pytest.mark.parametrize(("limit", "size"), [(None, 5.0), (2.0, 2.0)])
def test_lamb_limits_the_norm_of_a_parameter(limit, size):
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.ones(2)
    poptorch.optim.LAMB([parameter], 0.1, eps=0.0, weight_decay=0.0, max_weight_norm=limit).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([3.0, 4.0]) - 0.1 * size / 2**0.5)


class TestStatesThatStayWhole:
    @pytest.mark.parametrize(
        "make",
        [
            lambda parameters: poptorch.optim.LAMB(parameters, lr=0.1),
            lambda parameters: poptorch.optim.SGD(parameters, lr=0.1, max_grad_norm=0.01),
        ],
    )
    def test_unsharded_states_are_logged_and_train_the_same(self, make, model, caplog):
        found = []
        for options in (poptorch.Options().replicationFactor(2), sharding()):
            own = copy.deepcopy(model)
            training = poptorch.trainingModel(own, options, make(own.parameters()))
            training(*rows(4, 2))
            assert not training.trainer.is_sharded
            found.append(bits_of(own))
        assert found[0] == found[1]
        assert "stays whole on every instance, because an update needs norms" in caplog.text


class TestNumbersThatChange:
    def test_loss_scaling_takes_effect_through_options_and_through_the_optimizer(self, model):
        optimizer = poptorch.optim.SGD(model.parameters(), 0.1)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training(*rows(4, 2))
        optimizer.loss_scaling = 64.0
        training.setOptimizer(optimizer)
        assert str(training.trainer.state.loss_scale) == "64"
        training(*rows(4, 2))
        training.setOptimizer(poptorch.optim.SGD(model.parameters(), 0.1, loss_scaling=2.0))
        training(*rows(4, 2))
        assert str(training.trainer.state.loss_scale) == "2"

    def test_loss_scaling_keeps_small_gradients_of_halves(self):
        """The gradient of 2e-8 underflows in 16 bits; the step scales it to a representable number."""

        class Small(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))

            def forward(self, x):
                return (self.weight * x).float().sum()

        own = Small()
        optimizer = poptorch.optim.SGD(own.parameters(), lr=1.0)
        training = poptorch.trainingModel(own, optimizer=optimizer)
        x = torch.full((2,), 6e-8, dtype=torch.float16)
        factor = 2.0**14
        optimizer.loss_scaling = factor
        training.setOptimizer(optimizer)
        training(x)
        assert own.weight[0] == -x[0]

    def test_a_step_that_overflows_is_left_out_once_losses_are_scaled(self, model):
        training = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), 0.1))
        training.setOptimizer(poptorch.optim.SGD(model.parameters(), 0.1, loss_scaling=8.0))
        before = bits_of(model)
        training(rows(4, 2)[0] * torch.inf, rows(4, 2)[1])
        assert bits_of(model) == before

    def test_a_limit_of_gradients_takes_effect(self, model):
        training = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), 0.1))
        training.setOptimizer(poptorch.optim.SGD(model.parameters(), 0.1, max_grad_norm=1e-3))
        training(*rows(4, 2))
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        assert norm.item() == pytest.approx(1e-3, rel=1e-3)

    def test_a_limit_is_refused_if_gradients_are_parts(self, model):
        training = poptorch.trainingModel(model, sharding(), poptorch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(StrategyError, match=r"max_grad_norm is 1\.0, .* useReplicatedTensorSharding"):
            training.setOptimizer(poptorch.optim.SGD(model.parameters(), 0.1, max_grad_norm=1.0))

    def test_set_optimizer_refuses_other_parameters(self, model):
        """Without the check, parameters of the first optimizer would continue to be trained."""
        training = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(StrategyError, match="are not those that the model trains; make a new model"):
            training.setOptimizer(poptorch.optim.SGD([model.layer.bias], 0.1))


class TestDtypes:
    def test_states_of_halves_are_float32_as_in_poptorch(self):
        """In 16 bits eps=1e-8 is zero, so PyTorch's Adam divides by zero."""
        parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
        parameter.grad = torch.tensor([0.0, 1e-7, 1.0], dtype=torch.float16)
        optimizer = poptorch.optim.Adam([parameter], lr=0.1)
        wide = nn.Parameter(parameter.detach().float())
        wide.grad = parameter.grad.float()
        optimizer.step()
        torch.optim.Adam([wide], lr=0.1).step()
        assert torch.equal(parameter, wide.half())
        state = optimizer.state[parameter]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}
        assert optimizer.param_groups[0]["params"][0] is parameter

    def test_states_have_the_dtypes_that_the_program_gives(self):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = poptorch.optim.AdamW([parameter], first_order_momentum_accum_type=torch.float16)
        for _ in range(2):
            parameter.grad = torch.full((3,), 0.3)
            optimizer.step()
        state = optimizer.state[parameter]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float16, torch.float32)
        with pytest.raises(ValueError, match=r"accum_type is torch\.int8; use torch\.float16 or torch\.float32"):
            poptorch.optim.SGD([parameter], 0.1, accum_type=torch.int8)

    def test_loaded_states_keep_their_dtypes(self):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
        parameter.grad = torch.full((3,), 1e-4, dtype=torch.float16)
        first, second = (poptorch.optim.Adam([parameter], lr=0.1) for _ in range(2))
        first.step()
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.state[parameter]["exp_avg_sq"], first.state[parameter]["exp_avg_sq"])
        assert second.state[parameter]["exp_avg_sq"].dtype is torch.float32

    def test_hooks_of_a_step_run_once(self, model):
        torch.optim.SGD(model.parameters(), 0.1)  # PyTorch puts hooks into the class with its first object
        optimizer = poptorch.optim.SGD(model.parameters(), 0.1)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        optimizer.step()
        assert seen == [1]

    def test_gradients_that_are_added_up_in_sixteen_bits_are_a_warning(self, model, caplog):
        options = poptorch.Options()
        options.Training.gradientAccumulation(2)
        options.Precision.enableStochasticRounding(True)
        half = copy.deepcopy(model).half()
        poptorch.trainingModel(half, options, poptorch.optim.SGD(half.parameters(), 0.1, accum_type=torch.float32))
        assert "accum_type is torch.float32, but gradients of torch.float16 parameters" in caplog.text
        assert "enableStochasticRounding: parameters are torch.float16" in caplog.text


def test_an_optimizer_that_is_pickled_keeps_what_poptorch_adds(model):
    optimizer = poptorch.optim.AdamW(
        model.parameters(),
        bias_correction=False,
        loss_scaling=8.0,
        max_grad_norm=0.5,
        second_order_momentum_accum_type=torch.float16,
    )
    again = pickle.loads(pickle.dumps(optimizer))
    assert (type(again), again.loss_scaling, again.max_grad_norm) == (type(optimizer), 8.0, 0.5)
    assert not again.variable_attrs.isConstant("loss_scaling")
    assert again._state_types == optimizer._state_types


def test_optimizers_are_of_one_class(model):
    for kind in ("SGD", "Adam", "AdamW", "RMSprop", "LAMB"):
        optimizer = getattr(poptorch.optim, kind)(model.parameters(), lr=0.1)
        assert isinstance(optimizer, poptorch.optim.Optimizer)
        assert isinstance(optimizer, torch.optim.Optimizer)


def test_scales_travel_with_checkpoints(model, tmp_path):
    training = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), 0.1, loss_scaling=4.0))
    training(*rows(4, 2))
    training.setOptimizer(poptorch.optim.SGD(model.parameters(), 0.1, loss_scaling=16.0))
    with strategies.Checkpoints(tmp_path, training.trainer) as checkpoints:
        training(*rows(4, 2))
        checkpoints.save(training.trainer.state)
    other = Line(2)
    again = poptorch.trainingModel(other, optimizer=poptorch.optim.SGD(other.parameters(), 0.1, loss_scaling=4.0))
    with strategies.Checkpoints(tmp_path, again.trainer) as checkpoints:
        again.trainer.restore(checkpoints)
    assert str(again.trainer.state.loss_scale) == "16"
