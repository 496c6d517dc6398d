"""Networks that a loss function uses besides the Trainer's module: replicas may read them, and may not write them."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from idiom import FEATURES, classify, rows_of
from torch import nn
from torch_modules import sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError


def with_norm(kind=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), kind(FEATURES))


def through(other, module, batch):
    return classify(module, {**batch, "x": other(batch["x"])})


def steps(loss, replicas=2, module=None, count=1, **options):
    """Make steps on one instance, and return the module."""
    module = nn.Linear(FEATURES, 3) if module is None else module
    trainer = sgd_trainer(replicas, module, loss, **options)
    for step in range(count):
        trainer.step(rows_of(step, range(2 * replicas)))
    return module


OUTSIDE = with_norm()
MANY = {"first": [OUTSIDE]}


def by_global_variable(module, batch):
    return through(OUTSIDE, module, batch)


def by_another_function(module, batch):
    return by_global_variable(module, batch)


def by_default(module, batch, net=OUTSIDE):
    return through(net, module, batch)


def by_container(module, batch):
    return through(MANY["first"][0], module, batch)


@torch.enable_grad()
def by_decorated_function(module, batch):
    return through(OUTSIDE, module, batch)


class Program:
    """A program whose method is the loss function."""

    kept = OUTSIDE

    def __init__(self):
        self.net = OUTSIDE

    def of_object(self, module, batch):
        return through(self.net, module, batch)

    @classmethod
    def of_class(cls, module, batch):
        return through(cls.kept, module, batch)


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A loss function that is an object without `__dict__`."""

    net: nn.Module

    def __call__(self, module, batch):
        return through(self.net, module, batch)


class CallsAGlobal(nn.Linear):
    def forward(self, x):
        return super().forward(OUTSIDE(x))


class TestAWrite:
    @pytest.mark.parametrize(
        ("loss", "name"),
        [
            (by_global_variable, "OUTSIDE"),
            (by_another_function, "OUTSIDE"),
            (by_default, "net"),
            (by_container, r"MANY\['first'\]\[0\]"),
            (by_decorated_function, "OUTSIDE"),
            (Program().of_object, r"self\.net"),
            (Program.of_class, r"self\.kept"),
            (Loss(OUTSIDE), r"loss_fn\.net"),
            (functools.partial(through, OUTSIDE), "loss_fn"),
            (lambda module, batch: through(OUTSIDE, module, batch), "OUTSIDE"),
        ],
    )
    def test_writes_are_refused_in_the_first_step_wherever_the_network_is(self, loss, name):
        with pytest.raises(StrategyError, match=rf"^replicas have written the buffer 1\.running_mean of {name} \(Seq"):
            steps(loss)

    def test_the_error_tells_what_happens_and_the_way_out(self):
        other = with_norm()
        with pytest.raises(
            StrategyError,
            match=r"of other \(Sequential\), which is outside of the Trainer's module\. Local replicas share .* write "
            r".* at the same time, .* torch\.nn\.ModuleDict, or call \.eval\(\) .* \(docs: torch_modules, Networks out",
        ):
            steps(lambda module, batch: through(other, module, batch))

    def test_writes_in_hooks_and_forward_methods_are_refused(self):
        other, module = with_norm(), nn.Linear(FEATURES, 3)
        module.register_forward_pre_hook(lambda own, given: (other(given[0]),))
        for one, name in ((module, "other"), (CallsAGlobal(FEATURES, 3), "OUTSIDE")):
            with pytest.raises(StrategyError, match=rf"1\.running_mean of {name} \(Sequential\)"):
                steps(classify, module=one)

    def test_writes_to_the_module_that_was_given_to_the_trainer_are_refused(self):
        module = nn.Sequential(with_norm(), nn.Linear(FEATURES, 3))

        def loss(own, batch):
            with torch.no_grad():
                target = module(batch["x"])
            return classify(own, batch) + F.mse_loss(own(batch["x"]), target)

        with pytest.raises(StrategyError, match=r"buffer 0\.1\.num_batches_tracked of the module that was given to"):
            steps(loss, module=module)

    @pytest.mark.parametrize("options", [{"stream_gradients": True}, {"replica_device": "cpu"}], ids=str)
    def test_writes_are_refused_with_every_exchange(self, options):
        with pytest.raises(StrategyError, match="of OUTSIDE"):
            steps(by_global_variable, **options)

    def test_instances_with_one_replica_each_refuse_writes(self, on_instances):
        def refused(strategy):
            other, module = with_norm(), nn.Linear(FEATURES, 3)
            trainer = sgd_trainer(strategy, module, lambda own, batch: through(other, own, batch))
            with pytest.raises(StrategyError, match=r"1\.running_mean of other"):
                trainer.step(rows_of(0, strategy.local_replicas))

        on_instances(2, 2, refused)

    def test_a_network_that_trains_later_is_refused_at_once(self):
        other = with_norm().eval()
        module = nn.Linear(FEATURES, 3)
        trainer = sgd_trainer(2, module, lambda own, batch: through(other, own, batch))
        for step in range(4):
            trainer.step(rows_of(step, range(4)))
        other.train()
        with pytest.raises(StrategyError, match=r"1\.num_batches_tracked of other"):
            trainer.step(rows_of(4, range(4)))

    def test_a_network_that_comes_later_is_refused_in_the_next_step_that_is_a_power_of_two(self):
        used = [with_norm().eval()]
        module = nn.Linear(FEATURES, 3)
        trainer = sgd_trainer(2, module, lambda own, batch: through(used[-1], own, batch))
        trainer.step(rows_of(0, range(4)))
        used.append(with_norm())
        with pytest.raises(StrategyError, match=r"1\.running_mean of used\[1\]"):
            trainer.step(rows_of(1, range(4)))


class Center(nn.Module):
    """A loss that replaces its moving mean in each call, as DINO does."""

    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(3))

    def forward(self, logits, labels):
        self.center = self.momentum * self.center + (1 - self.momentum) * logits.detach().mean(0)
        return F.cross_entropy(logits - self.center, labels)


class Uncounted(nn.Module):
    """A layer whose writes PyTorch does not count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("variance", torch.ones(FEATURES))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=True)


def with_instance_norm():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, FEATURES // 2)), norm, nn.Flatten())


class TestKindsOfWrites:
    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES)), r"buffer .*\._u of"),
            (Uncounted, "buffer mean of other"),
            (lambda: torch.jit.script(with_norm()), r"buffer 1\.running_mean of other"),
            (with_instance_norm, r"buffer 1\.running_mean of other"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_writes_to_buffers_are_refused(self, make, name):
        other = make()
        with pytest.raises(StrategyError, match=name):
            steps(lambda module, batch: through(other, module, batch))

    def test_a_loss_that_replaces_its_buffer_is_refused(self):
        criterion = Center()
        with pytest.raises(StrategyError, match=r"the buffer center of criterion \(Center\)"):
            steps(lambda module, batch: criterion(module(batch["x"]), batch["y"]))

    def test_writes_to_parameters_are_refused(self):
        module = nn.Linear(FEATURES, 3)
        teacher = copy.deepcopy(module).requires_grad_(False)

        def loss(own, batch):
            with torch.no_grad():
                teacher.weight.lerp_(own.weight, 0.1)
            return classify(own, batch) + F.mse_loss(own(batch["x"]), teacher(batch["x"]))

        with pytest.raises(StrategyError, match=r"the parameter weight of teacher \(Linear\).*; write it between"):
            steps(loss, module=module)


class Counts:
    """A metric outside of the module."""

    def __init__(self):
        self.rows, self.logits = 0, []

    def update(self, logits):
        self.rows += len(logits)
        self.logits.append(logits.detach())


class TestWhatIsAllowed:
    def test_a_frozen_teacher_is_allowed(self):
        teacher = nn.Sequential(with_norm(), nn.utils.spectral_norm(nn.Linear(FEATURES, 3)), nn.Dropout())
        teacher.eval().requires_grad_(False)

        def loss(module, batch):
            return classify(module, batch) + F.mse_loss(module(batch["x"]), teacher(batch["x"]))

        steps(loss, count=4)

    def test_a_teacher_may_move_between_steps(self):
        module = nn.Linear(FEATURES, 3)
        teacher = copy.deepcopy(module)
        trainer = sgd_trainer(2, module, lambda own, batch: F.mse_loss(own(batch["x"]), teacher(batch["x"]) + 1))
        for step in range(4):
            trainer.step(rows_of(step, range(4)))
            with torch.no_grad():
                teacher.weight.lerp_(module.weight, 0.1)

    def test_a_loss_may_have_class_weights(self):
        criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, 4))
        steps(lambda module, batch: criterion(module(batch["x"]), batch["y"]), count=4)

    def test_a_metric_may_count(self):
        counts = Counts()

        def loss(module, batch):
            logits = module(batch["x"])
            counts.update(logits)
            return F.cross_entropy(logits, batch["y"])

        steps(loss, count=4)
        assert counts.rows

    def test_a_loss_may_keep_the_copies_that_it_gets(self):
        kept = []

        def loss(module, batch):
            kept.append(module)
            return classify(module, batch)

        steps(loss, module=nn.Sequential(with_norm(), nn.Linear(FEATURES, 3)), verify_steps=0, count=4)

    def test_a_buffer_may_be_replaced_by_an_equal_one(self):
        criterion = Center(momentum=1.0)
        steps(lambda module, batch: criterion(module(batch["x"]), batch["y"]), count=4)

    def test_a_network_may_be_made_under_inference_mode(self):
        with torch.inference_mode():
            table = Uncounted()
        steps(lambda module, batch: classify(module, batch) + table.mean.clone().sum(), count=4)

    def test_a_single_replica_may_write_and_has_the_bits_of_plain_pytorch(self):
        torch.manual_seed(0)
        first, other = nn.Linear(FEATURES, 3), with_norm()
        plain, plain_other = copy.deepcopy((first, other))
        steps(lambda module, batch: through(other, module, batch), replicas=1, module=first, count=3)
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            through(plain_other, plain, rows_of(step, range(2))).backward()
            optimizer.step()
        for one, same in ((first, plain), (other, plain_other)):
            assert strategies.fingerprint(one.state_dict()) == strategies.fingerprint(same.state_dict())


def test_both_networks_in_one_module_give_the_same_bits_everywhere(everywhere):
    torch.manual_seed(0)
    both = nn.ModuleDict({"other": with_norm(), "own": nn.Linear(FEATURES, 3)})

    def train(strategy):
        module = copy.deepcopy(both)
        trainer = sgd_trainer(strategy, module, lambda m, batch: through(m["other"], m["own"], batch))
        for step in range(3):
            trainer.step(rows_of(step, strategy.local_replicas))
        return strategies.fingerprint(module.state_dict())

    assert len(set(everywhere(4, train))) == 1


def outside_and_trainer():
    """Return a network outside of the module, its optimizer, and a trainer whose loss function uses the network."""
    other = nn.Linear(FEATURES, FEATURES)
    module = nn.Linear(FEATURES, 3)
    trainer = sgd_trainer(2, module, lambda module, batch: through(other, module, batch))
    return other, torch.optim.SGD(other.parameters(), 0.1), trainer


def test_another_optimizer_may_not_use_gradients_left_by_replicas():
    other, optimizer, trainer = outside_and_trainer()
    trainer.step(rows_of(0, range(4)))
    assert other.weight.grad is not None
    with pytest.raises(StrategyError, match="SGD would use a gradient that the loss function of a Trainer has left in"):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_another_optimizer_may_use_gradients_of_its_own(set_to_none):
    other, optimizer, trainer = outside_and_trainer()
    trainer.step(rows_of(0, range(4)))
    optimizer.zero_grad(set_to_none)
    other(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()


def test_gradients_that_a_step_does_not_touch_belong_to_the_program():
    other, optimizer, trainer = outside_and_trainer()
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    trainer.step(rows_of(0, range(4)))
    for parameter in other.parameters():
        parameter.requires_grad_(True)
    other(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
