"""Copies of a module for replicas: parameters, hooks and compilation follow the module, also after changes."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrizations, parametrize, prune
from torch_modules import data, sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError

STEPS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 9), nn.Linear(9, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.flatten(1))))


class Scale:
    def __init__(self):
        self.by = 1.0


class Held(Net):
    """A module that computes with objects other than parameters and buffers."""

    def __init__(self, held):
        torch.manual_seed(1)
        super().__init__()
        self.held = held

    def forward(self, x):
        outputs, held = super().forward(x), self.held
        if isinstance(held, list) and held and isinstance(held[0], nn.Module):
            return held[0](outputs)
        if isinstance(held, list) and not held or isinstance(held, list) and isinstance(held[0], int):
            held.append(1)
            return outputs / len(held)
        if isinstance(held, torch.Tensor | np.ndarray):
            return outputs * torch.as_tensor(held)
        if isinstance(held, list):
            return outputs * held[0][-1]
        return outputs * (held["by"] if isinstance(held, dict) else held.by)


def net():
    torch.manual_seed(1)
    return Net()


def loss_fn(module, batch):
    return F.cross_entropy(module(batch["x"]), batch["y"])


def rows(count=8):
    return data(count)


def new_trainer(module, loss_fn=loss_fn, replicas=2, **options):
    return sgd_trainer(replicas, module, loss_fn, momentum=0.9, **options)


def by_trainer(module, change=lambda module: None, **options):
    """Return the parameters after some steps on one replica, with a change between them."""
    trainer = new_trainer(module, replicas=1, **options)
    for _ in range(STEPS):
        trainer.step(rows())
        change(module)
    return [parameter.detach().clone() for parameter in module.parameters()]


def by_plain_pytorch(module, change=lambda module: None):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.jit.optimized_execution(False):
            loss_fn(module, rows()).backward()
        optimizer.step()
        change(module)
    return [parameter.detach().clone() for parameter in module.parameters()]


def bits_of(module):
    return strategies.fingerprint([one.detach().numpy() for one in module.parameters()])


def masked(register):
    def make():
        module = net()
        register(module.first.weight)
        return module

    return make


def mask_gradient(weight):
    mask = (torch.arange(64) % 2).float()
    weight.register_hook(lambda gradient: gradient * mask)
    weight.register_hook(lambda gradient: gradient / 2)


def mask_accumulated(weight):
    def keep_first_rows(parameter):
        parameter.grad[:3] = 0

    weight.register_post_accumulate_grad_hook(keep_first_rows)


def changed_by(change):
    def make():
        module = net()
        change(module)
        return module

    return make


def with_weight_norm():
    module = net()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(module.first)
    return module


def scripted():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        return torch.jit.script(net())


def traced():
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        return torch.jit.trace(net(), rows()["x"])


def half_scripted():
    module = net()
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        module.first = torch.jit.script(module.first)
    return module


def compiled_with_spectral_norm():
    module = net()
    parametrizations.spectral_norm(module.first)
    return torch.compile(module, backend="aot_eager")


def of_a_class_made_after_parametrization():
    module = net()
    parametrizations.spectral_norm(module.first)
    module.first.__class__ = type("Renamed", (type(module.first),), {})
    return module


KINDS = {
    "scripted": scripted,
    "traced": traced,
    "scripted in part": half_scripted,
    "with hooks on gradients": masked(mask_gradient),
    "with hooks after accumulation": masked(mask_accumulated),
    "with weight norm": with_weight_norm,
    "with weight norm as parametrization": changed_by(lambda one: parametrizations.weight_norm(one.first)),
    "with orthogonal weights": changed_by(lambda one: parametrizations.orthogonal(one.second)),
    "with spectral norm": changed_by(lambda one: parametrizations.spectral_norm(one.first)),
    "pruned": changed_by(lambda one: prune.l1_unstructured(one.first, "weight", 0.5)),
    "compiled": lambda: torch.compile(net(), backend="aot_eager"),
    "compiled in place": changed_by(lambda one: one.compile(backend="aot_eager")),
    "compiled with spectral norm": compiled_with_spectral_norm,
    "of a class that was made after parametrization": of_a_class_made_after_parametrization,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_has_the_bits_of_plain_pytorch(kind):
    found, expected = by_trainer(KINDS[kind]()), by_plain_pytorch(KINDS[kind]())
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["scripted", "with hooks on gradients", "with spectral norm", "compiled in place"])
def test_a_module_has_the_same_bits_for_every_number_of_instances(kind, everywhere):
    modules = iter([KINDS[kind]() for _ in range(3)])

    def train(strategy):
        module = next(modules)
        optimizer = torch.optim.Adam(module.parameters(), 0.01)  # counts its steps, for each parameter
        trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer)
        for batch in strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0):
            trainer.step(batch)
        trainer.close()
        return bits_of(module)

    found = everywhere(2, train)
    assert found == [found[0]] * 3


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
class TestScriptedModules:
    """PyTorch's profiling executor computes other bits from the second call on."""

    def test_calls_outside_of_a_training_change_no_bits(self):
        def train(calls):
            torch.manual_seed(1)
            layers = [nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)]
            trainer = new_trainer(torch.jit.script(nn.Sequential(nn.Flatten(), *layers)), replicas=1)
            for _ in range(STEPS):
                for _ in range(calls):
                    trainer.module(rows()["x"]).sum().backward()
                trainer.optimizer.zero_grad()
                trainer.step(rows())
            return bits_of(trainer.module)

        assert train(0) == train(3)

    def called(self, times, context=nullcontext):
        """Return a new module that was called before PyTorch's profiling executor was turned off."""

        class Own(nn.Module):  # scripted modules of one class share their code, and what PyTorch knows about it
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.inner, self.outer = nn.Linear(64, 6), nn.Linear(6, 5)

            def forward(self, x):
                return self.outer(torch.tanh(self.inner(torch.flatten(x, 1))))

        with pytest.warns(DeprecationWarning, match="torch.jit.script"):
            given = torch.jit.script(Own())
        torch._C._jit_set_profiling_mode(True)  # as in a new process
        with context():
            for _ in range(times):
                given(rows()["x"])
        return given

    def test_a_module_that_pytorch_has_optimized_is_refused(self):
        given = self.called(times=3)
        for _ in range(2):  # also if another trainer has turned the executor off
            with pytest.raises(StrategyError, match="make the Trainer or DistributedModel before the first call"):
                new_trainer(given)

    @pytest.mark.parametrize(("times", "context"), [(1, nullcontext), (3, torch.no_grad)])
    def test_calls_that_pytorch_has_not_optimized_change_no_bits(self, times, context):
        """PyTorch optimizes in the second call; without gradients on a CPU, the operations stay the same."""
        trainers = [new_trainer(self.called(times, context)), new_trainer(self.called(0))]
        for trainer in trainers:
            trainer.step(rows())
        assert bits_of(trainers[0].module) == bits_of(trainers[1].module)


class TestHooksOfParameters:
    def test_hooks_see_the_gradient_of_each_replica_and_micro_batch(self):
        module, seen = net(), []
        module.second.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
        new_trainer(module, gradient_accumulation_count=2).step(rows())
        assert len(seen) == 4
        assert torch.allclose(sum(seen) / 2, module.second.bias.grad)

    @pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_hooks_come_and_go_between_steps(self, register):
        module, seen = net(), []
        trainer = new_trainer(module)
        trainer.step(rows())
        handle = getattr(module.first.weight, register)(lambda one: seen.append(one.shape))
        trainer.step(rows())
        handle.remove()
        trainer.step(rows())
        assert seen == [(9, 64)] * 2

    def test_all_hooks_of_a_module_can_be_replaced_at_once(self):
        module, seen = net(), []
        trainer = new_trainer(module, replicas=1)
        hook = module.first.register_forward_hook(lambda *_: seen.append("first"))
        trainer.step(rows())
        module.first._forward_hooks = OrderedDict()  # programs remove all hooks like this
        trainer.step(rows())
        module.first._forward_hooks[hook.id] = lambda *_: seen.append("second")
        trainer.step(rows())
        assert seen == ["first", "second"]

    def test_hooks_run_before_streamed_gradients_leave(self):
        module = net()
        mask_accumulated(module.first.weight)
        new_trainer(module, stream_gradients=True).step(rows())
        assert not module.first.weight.grad[:3].any()
        assert module.first.weight.grad[3:].any()


class TestHooksOfModules:
    def test_hooks_come_and_go_between_steps(self):
        def change(module):
            if module.handle is None:
                module.handle = [module.first.register_forward_hook(lambda one, given, out: out * 2)]
            else:
                module.handle.pop().remove()

        def make():
            module = net()
            module.handle = None
            return module

        assert all(map(torch.equal, by_trainer(make(), change), by_plain_pytorch(make(), change)))


class TestChangesBetweenSteps:
    @pytest.mark.parametrize("sharding", [False, True])
    def test_new_memory_of_a_parameter_is_followed(self, sharding):
        def change(module):
            module.first.weight.data = module.first.weight.data / 2

        found = by_trainer(net(), change, replicated_optimizer_state_sharding=sharding)
        assert all(map(torch.equal, found, by_plain_pytorch(net(), change)))

    def test_another_order_in_memory_is_followed(self):
        def change(module):
            module.first.weight.data = module.first.weight.data.t().contiguous().t()

        assert all(map(torch.allclose, by_trainer(net(), change), by_plain_pytorch(net(), change)))

    def test_another_attribute_is_followed(self):
        class Masked(Net):
            def __init__(self):
                super().__init__()
                self.mask = torch.ones(5)

            def forward(self, x):
                return super().forward(x) * self.mask

        def change(module):
            module.mask = torch.tensor([1.0, 0, 1, 0, 1])

        first = Masked()
        found = by_trainer(copy.deepcopy(first), change)
        assert all(map(torch.equal, found, by_plain_pytorch(first, change)))

    def test_a_list_that_is_changed_in_place_is_followed(self):
        class Scaled(Net):
            def __init__(self):
                super().__init__()
                self.scales = [1.0, {"last": 2.0}]

            def forward(self, x):
                return super().forward(x) * self.scales[0] * self.scales[1]["last"]

        def change(module):
            module.scales[1]["last"] /= 4

        first = Scaled()
        found = by_trainer(copy.deepcopy(first), change)
        assert all(map(torch.equal, found, by_plain_pytorch(first, change)))

    @pytest.mark.parametrize(
        ("held", "change"),
        [
            ({"by": 1.0}, lambda held: held.update(by=0.5)),
            ([[1.0]], lambda held: held[0].append(0.5)),
            (SimpleNamespace(by=1.0), lambda held: setattr(held, "by", 0.5)),
            (Scale(), lambda held: setattr(held, "by", 0.5)),
            (torch.ones(5), lambda held: held.data.mul_(0.5)),
            (np.ones(5, np.float32), lambda held: held.__setitem__(0, 0.5)),
            ([nn.Linear(5, 5)], lambda held: held[0].weight.data.mul_(0.5)),
        ],
    )
    def test_an_attribute_that_is_changed_in_place_is_followed(self, held, change):
        first = Held(held)
        found = by_trainer(copy.deepcopy(first), lambda module: change(module.held))
        assert all(map(torch.equal, found, by_plain_pytorch(first, lambda module: change(module.held))))

    def test_a_list_that_a_replica_fills_stays_with_the_replica(self):
        found = by_trainer(Held([]))
        assert all(map(torch.equal, found, by_plain_pytorch(Held([]))))

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            (lambda one: setattr(one, "first", nn.Linear(64, 9)), "first"),
            (lambda one: setattr(one.second, "weight", nn.Parameter(torch.ones(5, 9))), r"second\.weight"),
            (lambda one: one.add_module("third", nn.ReLU()), "a part of the module itself"),
            (lambda one: one.second.register_buffer("seen", torch.ones(1)), "a part of second"),
        ],
    )
    def test_other_parts_are_refused(self, change, name):
        module = net()
        trainer = new_trainer(module)
        trainer.step(rows())
        change(module)
        with pytest.raises(StrategyError, match=rf"^{name} was replaced, added or removed after .* construct another"):
            trainer.step(rows())

    def test_another_shape_is_refused(self):
        module = net()
        trainer = new_trainer(module)
        module.second.bias.data = torch.ones(4)
        with pytest.raises(StrategyError, match=r"second\.bias is of shape \[4\], but was \[5\] when"):
            trainer.step(rows())


class TestOtherModules:
    def test_a_loss_of_the_outer_module_is_refused(self):
        module = net()
        with pytest.raises(StrategyError, match=r"gradient of first\.weight went to the module that was given to the"):
            new_trainer(module, lambda _, batch: loss_fn(module, batch)).step(rows())

    def test_a_replica_that_computes_with_another_is_refused(self):
        module, kept = net(), []
        module.first.register_forward_hook(lambda one, given, out: kept.append(out))

        def loss(module, batch):
            return loss_fn(module, batch) + kept[0].mean()

        with pytest.raises((StrategyError, RuntimeError), match=r"depends on parameters of replica [01]|second time"):
            new_trainer(module, loss).step(rows())

    def test_a_part_that_the_forward_pass_replaces_is_refused(self):
        class Replaces(Net):
            def forward(self, x):
                self.second = nn.Linear(9, 5)
                return super().forward(x)

        with pytest.raises(StrategyError, match="forward pass of a replica has replaced, added or removed second"):
            new_trainer(Replaces()).step(rows())

    def test_a_buffer_that_the_forward_pass_empties_is_refused(self):
        class Empties(Net):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(1))

            def forward(self, x):
                self.seen = None
                return super().forward(x)

        with pytest.raises(StrategyError, match="forward pass of a replica has replaced, added or removed seen,"):
            new_trainer(Empties()).step(rows())

    @pytest.mark.parametrize("is_late", [False, True])
    def test_an_attribute_that_cannot_be_copied_is_named(self, is_late):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        trainer = new_trainer(module)
        if is_late:
            trainer.step(rows())
        module[1].guard = threading.Lock()
        name = "guard" if is_late else "its attribute 1.guard"
        with pytest.raises(TypeError, match=rf"cannot be copied for a replica: {name}: cannot pickle '_thread.lock'"):
            trainer.step(rows())

    def test_a_module_that_is_its_own_copy_is_refused(self):
        class Single(nn.Linear):
            def __deepcopy__(self, memo):
                return self

        with pytest.raises(TypeError, match=r"cannot be copied for a replica: .*Single is its own copy"):
            new_trainer(nn.Sequential(nn.Flatten(), Single(64, 5))).step(rows())


class TestParametrizations:
    @staticmethod
    def cached_loss(module, batch):
        with parametrize.cached():
            return loss_fn(module, batch) + loss_fn(module, batch)

    def test_each_replica_caches_its_own_weights(self):
        """All replicas compute their weights before any of them continues."""
        met = threading.Barrier(2)

        class Meets(nn.Module):
            def forward(self, weight):
                met.wait(timeout=20)
                return 2 * weight

        module = net()
        parametrize.register_parametrization(module.second, "weight", Meets(), unsafe=True)
        assert new_trainer(module, self.cached_loss, verify_steps=0).step(rows())["loss"] > 0
        assert met.n_waiting == 0

    def test_parametrizations_are_computed_as_often_as_by_pytorch(self):
        computed = []

        class Counts(nn.Module):
            def forward(self, weight):
                computed.append(threading.get_ident())
                return 2 * weight

        module = net()
        parametrize.register_parametrization(module.second, "weight", Counts())
        trainer = new_trainer(module, self.cached_loss, replicas=1)
        computed.clear()
        trainer.step(rows())
        assert len(computed) == 2  # for the replica, and for the comparison with plain PyTorch

    def test_copies_of_a_module_share_a_cache_as_in_pytorch(self, everywhere):
        """The copy that is asked first computes the weight of both."""
        torch.manual_seed(1)
        student = nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(64, 5)))
        both = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
        with torch.no_grad():
            for parameter in both["teacher"].parameters():
                parameter.add_(0.5)

        def loss(module, batch):
            with parametrize.cached():
                return loss_fn(module["student"], batch) + 2 * loss_fn(module["teacher"], batch)

        def train(strategy):
            """Give each replica the same rows: the mean of two equal gradients has their bits."""
            module, local = copy.deepcopy(both), len(strategy.replicas.local_replicas)
            trainer = sgd_trainer(strategy, module, loss, verify_steps=0)
            for _ in range(STEPS):
                trainer.step({key: torch.cat([one] * local) for key, one in rows().items()})
            return bits_of(module)

        plain = copy.deepcopy(both)
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(plain, rows()).backward()
            optimizer.step()
        assert everywhere(2, train) == [bits_of(plain)] * 3

    def test_a_cache_of_all_threads_is_refused(self):
        module = KINDS["with spectral norm"]()
        with pytest.raises(StrategyError, match="inside of a parametrize.cached"), parametrize.cached():
            new_trainer(module).step(rows())


def test_private_numbers_of_pytorch_are_not_compared():
    from strategies.torch.agreement import lines_of_module

    one, other = (torch.compile(net(), backend="eager") for _ in range(2))
    assert one._torchdynamo_wrapper_id != other._torchdynamo_wrapper_id
    assert lines_of_module(one) == lines_of_module(other)
    other.second.bias.requires_grad_(False)
    assert lines_of_module(one) != lines_of_module(other)


class TestCompiledModules:
    @pytest.mark.parametrize("compiled", [torch.compile, nn.Module.compile], ids=["wrapped", "in place"])
    def test_replicas_share_one_compilation(self, compiled):
        torch.compiler.reset()
        counters.clear()
        module = net()
        wrapped = compiled(module, backend="eager")
        given = module if wrapped is None else wrapped
        trainer = new_trainer(given, replicas=4)
        trainer.step(rows())
        trainer.step(rows())
        assert counters["stats"]["unique_graphs"] == 1

    def test_the_call_that_compiles_draws_the_same_numbers_as_later_calls(self, everywhere):
        """The first call of a compiled program takes another path than later calls."""
        torch.manual_seed(1)
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Dropout(0.5), nn.Linear(9, 5))

        def train(strategy):
            module = copy.deepcopy(first)
            module.compile(backend="aot_eager")
            trainer = sgd_trainer(strategy, module, loss_fn)
            for batch in strategies.torch.distribute_dataset(strategy, data(), batch_size=2).epoch(0):
                trainer.step(batch)
            return bits_of(module)

        found = everywhere(2, train)
        assert found == [found[0]] * 3

    def test_a_module_can_be_compiled_between_steps(self):
        module, made = net(), []
        trainer = new_trainer(module)
        trainer.step(rows())
        module.compile(backend=lambda graph, inputs: made.append(graph) or graph)
        trainer.step(rows())
        assert made
