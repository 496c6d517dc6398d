"""Programs whose results would depend on the instances are refused, on all instances; other programs train."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from copies import by_copies
from idiom import CLASSES, FEATURES, WORDS, Apply, Idiom, bits_of, by_trainer, classify, drawn, read, rows_of
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch_modules import sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError

REPLICAS, STEPS = 4, 8
TWICE = "computed its part of the step twice"
OUTSIDE = r"replicas have written [\w.]+ of a \w+ outside of the module"
WRITTEN = "was written while a replica computed"

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def eight_steps(module, optimizer):
    for _ in range(STEPS):
        yield


@dataclass(frozen=True)
class Program:
    """A row of a table.

    Attributes:
        name: The name of the row.
        make: Makes the module and the loss function.
        refused: A pattern in the message of the error; empty if the program trains.
        like: Makes the module and the loss of a program with the same bits; None for the program itself.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Callable[..., Any]]]
    refused: str = ""
    like: Callable[[], tuple[nn.Module, Callable[..., Any]]] | None = None

    def __str__(self) -> str:
        return self.name

    def idiom(self, **options: Any) -> Idiom:
        """Return a new idiom: the loss function may have a state, which no other training shares."""
        return _idiom(self.name, self.make, options)

    def known(self) -> Idiom:
        """Return the idiom that plain PyTorch trains."""
        return _idiom(self.name, self.like or self.make, {})


def _idiom(name, make, options):
    module, loss = drawn(make)
    return Idiom(name, lambda: module, loss, program=eight_steps, options=options)


def mlp():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def with_norm(kind=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), kind(FEATURES))


def with_loss(make_loss):
    """Return a maker of two layers and of a loss function, which `make_loss` makes for them."""

    def make():
        module = mlp()
        return module, make_loss(module)

    return make


def through(make):
    """Let rows pass through a network outside of the module."""

    def make_loss(_):
        other = make()
        return lambda module, batch: classify(module, {**batch, "x": other(batch["x"]).detach()})

    return with_loss(make_loss)


def of_forward(make_state, forward):
    """Return a maker of a module whose forward pass has a state outside of PyTorch's parts."""

    def make():
        module = Apply(forward, last=nn.Linear(FEATURES, CLASSES))
        module.state = make_state()
        return module, classify

    return make


# ---- programs that train


def by_random_numbers(module, batch):
    return classify(module, batch) * random.random() * np.random.rand() * torch.rand(())  # noqa: NPY002


def mixup(module, batch):
    share, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(batch["x"]))  # noqa: NPY002
    logits = module(share * batch["x"] + (1 - share) * batch["x"][order])
    return share * F.cross_entropy(logits, batch["y"]) + (1 - share) * F.cross_entropy(logits, batch["y"][order])


def seeded_again(module, batch):
    """Seed a generator of the process in the loss function, as some samplers do."""
    torch.manual_seed(5)
    return classify(module, batch) * torch.rand(())


def stochastic_depth():
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu() if random.random() < 0.5 else x + layer(x).relu()
        return self.last(x)

    layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(4)])
    return Apply(forward, layers=layers, last=nn.Linear(FEATURES, CLASSES)), classify


def hooked_features(_):
    """Read what a hook of a teacher keeps in a dictionary of the program."""
    teacher, features = with_norm().eval().requires_grad_(False), {}
    teacher[1].register_forward_hook(lambda layer, given, output: features.update(seen=output))

    def loss(module, batch):
        teacher(batch["x"])
        return F.mse_loss(module(batch["x"]), features["seen"][:, :CLASSES])

    return loss


def hooked_penalty(module):
    """Read what a hook of the module itself keeps."""
    features = {}
    module[1].register_forward_hook(lambda layer, given, output: features.update(hidden=output))
    return lambda module, batch: classify(module, batch) + 0.1 * features["hidden"].square().mean()


def network_made_each_time(module, batch):
    projection = nn.Sequential(nn.Linear(CLASSES, 4), nn.BatchNorm1d(4))
    return classify(module, batch) + 0.1 * projection(module(batch["x"])).square().mean()


def frozen_teacher(_):
    teacher = nn.Sequential(with_norm(), nn.Dropout(), nn.Linear(FEATURES, CLASSES)).eval()
    return lambda module, batch: F.mse_loss(module(batch["x"]), teacher(batch["x"]).detach())


def training_teacher_without_state(_):
    """Draw dropout in a teacher in training mode, which nobody writes."""
    teacher = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)).train()
    return lambda module, batch: F.mse_loss(module(batch["x"]), teacher(batch["x"]).detach())


def made_for_inference(_):
    with torch.inference_mode():
        teacher = with_norm().eval()

    def loss(module, batch):
        with torch.no_grad():
            target = teacher(batch["x"])[:, :CLASSES].clone()
        return F.mse_loss(module(batch["x"]), target)

    return loss


def equal_center(_):
    """Replace the buffer of a loss by an equal one."""
    criterion = Center(momentum=1.0)
    return lambda module, batch: criterion(module(batch["x"]), batch["y"])


def counting_metric(_):
    counts, logits = [0], []

    def loss(module, batch):
        found = module(batch["x"])
        counts[0] += len(found)
        logits.append(found.detach())
        return F.cross_entropy(found, batch["y"]), {"seconds": time.perf_counter()}

    return loss


def cached_table(_):
    """Keep a constant in a dictionary at the first use."""
    cache = {}

    def loss(module, batch):
        shape = tuple(batch["x"].shape[1:])
        if shape not in cache:
            cache[shape] = torch.linspace(0, 1, FEATURES)
        return classify(module, {**batch, "x": batch["x"] + cache[shape]})

    return loss


def popping(module, batch):
    """Take a value out of the batch, as Hugging Face's examples take labels."""
    labels = batch.pop("y")
    return F.cross_entropy(module(batch["x"]), labels)


def written_rows(module, batch):
    """Write the rows of the batch, as to normalise them."""
    batch["x"].sub_(batch["x"].mean()).add_(0.1 * torch.randn(batch["x"].shape))
    return classify(module, batch)


def keeping_module(_):
    kept = []

    def loss(module, batch):
        kept.append(module)
        return classify(module, batch)

    return loss


def holds_a_lock(self, x):
    with self.state:
        return self.last(x)


def counts_passes(self, x):
    self.state += 1
    return self.last(x) / self.state


def generated(parameters):
    """Return a maker of a module that computes the parameters of a network outside of it."""

    def make():
        last, network = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

        def forward(self, x):
            return functional_call(network, {"weight": parameters(self), "bias": self.last.bias}, (x,))

        return Apply(forward, last=last), classify

    return make


def ensemble():
    """Make three layers that compute at once, through a network without values."""
    parameters, _ = torch.func.stack_module_state([nn.Linear(FEATURES, CLASSES) for _ in range(3)])
    base = nn.Linear(FEATURES, CLASSES, device="meta")

    def forward(self, x):
        of_all = torch.func.vmap(lambda own: functional_call(base, own, (x,)))
        return of_all({"weight": self.weight, "bias": self.bias}).mean(0)

    return Apply(forward, **{name: nn.Parameter(one.detach()) for name, one in parameters.items()}), classify


def plain_layer():
    return Apply(lambda self, x: self.last(x), last=nn.Linear(FEATURES, CLASSES)), classify


def plain_mlp():
    return mlp(), classify


TRAINS = [
    Program("numbers of three generators", with_loss(lambda _: by_random_numbers)),
    Program("mixup by NumPy", with_loss(lambda _: mixup)),
    Program("a generator that is seeded again", with_loss(lambda _: seeded_again)),
    Program("stochastic depth by Python", stochastic_depth),
    Program(
        "a loss that closes over the module",
        with_loss(lambda module: lambda _, batch: classify(module, batch)),
        like=plain_mlp,
    ),
    Program("features of a teacher's hook", with_loss(hooked_features)),
    Program("features of the module's hook", with_loss(hooked_penalty)),
    Program("a network that is made each time", with_loss(lambda _: network_made_each_time)),
    Program("a teacher in evaluation mode", with_loss(frozen_teacher)),
    Program("a teacher with dropout", with_loss(training_teacher_without_state)),
    Program("a teacher that was made for inference", with_loss(made_for_inference)),
    Program("a buffer that is replaced by an equal one", with_loss(equal_center)),
    Program("metrics that count and tell the time", with_loss(counting_metric), like=plain_mlp),
    Program("a constant in a cache", with_loss(cached_table)),
    Program("a batch of which the loss takes a value", with_loss(lambda _: popping), like=plain_mlp),
    Program("a batch that the loss writes", with_loss(lambda _: written_rows)),
    Program("a loss that keeps the module", with_loss(keeping_module), like=plain_mlp),
    Program("a lock", of_forward(threading.Lock, holds_a_lock), like=plain_layer),
    Program("a number that forward counts", of_forward(int, counts_passes)),
    Program("a network with the module's parameters", generated(lambda module: module.last.weight), like=plain_layer),
    Program("a network with computed parameters", generated(lambda module: module.last.weight.tanh())),
    Program("an ensemble", ensemble),
    Program("a mode that is left alone", through(lambda: nn.Sequential(with_norm().eval(), nn.Dropout(0.3)))),
]


@pytest.mark.parametrize("program", TRAINS, ids=str)
def test_programs_train_with_the_bits_of_copies_on_all_instances(program, on_instances):
    expected = bits_of(by_copies(program.known(), REPLICAS))
    for instances in (1, 2, 4):
        found = on_instances(instances, REPLICAS, lambda strategy: by_trainer(program.idiom(), strategy))
        assert [bits_of(one) for one in found] == [expected] * instances


# ---- programs that are refused


def counter(_):
    count = [0]

    def loss(module, batch):
        count[0] += 1
        return classify(module, batch) / count[0]

    return loss


def history(_):
    outputs = []

    def loss(module, batch):
        output = module(batch["x"])
        outputs.append(output.detach().mean())
        return F.cross_entropy(output, batch["y"]) + torch.stack(outputs).mean() * output.mean()

    return loss


def late_counter(_):
    """Count from the beginning, and use the count from the sixth pass on."""
    count = [0]

    def loss(module, batch):
        count[0] += 1
        return classify(module, batch) * (1 if count[0] < 6 else count[0])

    return loss


def moving_scale(_):
    """Divide the loss by a moving mean, which a closure keeps."""
    mean = None

    def loss(module, batch):
        nonlocal mean
        found = classify(module, batch)
        now = float(found.detach())
        mean = now if mean is None else 0.9 * mean + 0.1 * now
        return found / mean

    return loss


def iterator(*factors):
    def make_loss(_):
        numbers = itertools.cycle(factors)
        return lambda module, batch: classify(module, batch) * next(numbers)

    return make_loss


def queue_of_keys(_):
    """Compare with the rows of passes before, as MoCo's queue does, outside of the module."""
    queue = torch.zeros(6, CLASSES)

    def loss(module, batch):
        logits = module(batch["x"])
        found = F.cross_entropy(logits, batch["y"]) + 0.1 * (logits @ queue.clone().t()).mean()
        queue.copy_(torch.cat([logits.detach(), queue])[:6])
        return found

    return loss


def moving_teacher(module):
    teacher = copy.deepcopy(module).requires_grad_(False)

    def loss(module, batch):
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), module.parameters(), strict=True):
                one.lerp_(other + 0.1, 0.1)
        return classify(module, batch) + F.mse_loss(module(batch["x"]), teacher(batch["x"]))

    return loss


def inner_optimizer(_):
    """Train a critic inside of the loss function."""
    critic = nn.Linear(CLASSES, 1)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)

    def loss(module, batch):
        logits = module(batch["x"])
        optimizer.zero_grad()
        critic(logits.detach()).square().mean().backward()
        optimizer.step()
        return F.cross_entropy(logits, batch["y"]) + critic(logits).mean()

    return loss


class Center(nn.Module):
    """A loss that replaces its moving mean, as DINO's does."""

    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, logits, labels):
        self.center = self.momentum * self.center + (1 - self.momentum) * logits.detach().mean(0)
        return F.cross_entropy(logits - self.center, labels)


def centered(_):
    criterion = Center()
    return lambda module, batch: criterion(module(batch["x"]), batch["y"])


class Uncounted(nn.Module):
    """A layer whose writes PyTorch does not count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("variance", torch.ones(FEATURES))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=True)


def own_generator(_):
    generator = torch.Generator().manual_seed(0)
    return lambda module, batch: classify(module, batch) * torch.rand((), generator=generator)


def own_numpy_generator(_):
    generator = np.random.default_rng(0)
    return lambda module, batch: classify(module, batch) * generator.random()


def own_python_generator(_):
    generator = random.Random(0)
    return lambda module, batch: classify(module, batch) * generator.random()


def clock(_):
    return lambda module, batch: classify(module, batch) * (1 + time.perf_counter_ns() % 10**9 / 1e9)


def grown_gradient(module):
    """Change gradients by a hook with a state; the loss is always the same."""
    count = [0]

    def scale(gradient):
        count[0] += 1
        return gradient * count[0]

    module[0].weight.register_hook(scale)
    return classify


def fails_twice(_):
    """Raise where a graph of the pass before is used."""
    before = []

    def loss(module, batch):
        found = classify(module, batch)
        before.append(found)
        return before[0] + found if len(before) > REPLICAS else found

    return loss


def max_norm():
    module = nn.Sequential(nn.Embedding(WORDS, 4, max_norm=0.1), nn.Flatten(), nn.Linear(16, CLASSES))
    return module, read


def clipped(self, x):
    self.last.weight.data.clamp_(-0.1, 0.1)
    return self.last(x)


def nested(self, x):
    self.state[0].append(float(x.max()))
    return self.last(x) * sum(self.state[0])


def of_object(self, x):
    self.state.count += 1
    return self.last(x) / self.state.count


def of_tensor(self, x):
    self.state += x.detach().max()
    return self.last(x) * self.state


def holding_a_network(self, x):
    return self.last(self.state[0](x).detach())


def freezing(self, x):
    self.state += 1
    self.last.bias.requires_grad_(self.state < 3)
    return self.last(x)


def replacing(self, x):
    self.state = nn.Tanh()
    return self.state(self.last(x))


class Once:
    """A hook that removes itself."""

    def __init__(self, layer):
        self.handle = layer.register_forward_hook(self)

    def __call__(self, layer, given, output):
        self.handle.remove()
        return output * 2


def hook_that_removes_itself(module):
    Once(module[0])
    return classify


def previous_features(module):
    """Compare with the features of the pass before."""
    seen = []
    module[1].register_forward_hook(lambda layer, given, output: seen.append(output))

    def loss(module, batch):
        found = classify(module, batch)
        return found if len(seen) < 2 else found + 0.1 * (seen[-1] - seen[-2].detach()).square().mean()

    return loss


def moved_after_use(module):
    """Move a teacher through `data`, which PyTorch does not count, after it was used."""
    teacher = copy.deepcopy(module).requires_grad_(False)

    def loss(module, batch):
        found = F.mse_loss(module(batch["x"]), teacher(batch["x"]))
        for one, other in zip(teacher.parameters(), module.parameters(), strict=True):
            one.data.mul_(0.9).add_(other.data + 0.1, alpha=0.1)
        return found

    return loss


def scripted():
    return torch.jit.script(with_norm())


def not_called():
    """Make a network whose forward pass is called without its hooks."""
    return with_norm(nn.BatchNorm1d).forward


REFUSED = [
    Program("a network in training mode", through(with_norm), OUTSIDE),
    Program("a spectral norm", through(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES))),
            f"{OUTSIDE}|{TWICE}"),
    Program("a counter", with_loss(counter), TWICE),
    Program("a list that the loss reads", with_loss(history), TWICE),
    Program("a counter that is used later", with_loss(late_counter), f"in step [137] .*{TWICE}"),
    Program("a moving mean of the loss", with_loss(moving_scale), TWICE),
    Program("an iterator", with_loss(iterator(1.0, 2.0, 3.0)), TWICE),
    Program("an iterator with two values", with_loss(iterator(1.0, 2.0)), TWICE),
    Program("an iterator with a value for each replica", with_loss(iterator(1.0, 1.0, 1.0, 2.0)), TWICE),
    Program("a queue of rows", with_loss(queue_of_keys), TWICE),
    Program("a teacher that the loss moves", with_loss(moving_teacher), f"{OUTSIDE}|{TWICE}"),
    Program("an optimizer in the loss", with_loss(inner_optimizer), f"{OUTSIDE}|{TWICE}"),
    Program("a loss with a moving center", with_loss(centered), f"{OUTSIDE}|{TWICE}"),
    Program("a generator of PyTorch", with_loss(own_generator), TWICE),
    Program("a generator of NumPy", with_loss(own_numpy_generator), TWICE),
    Program("a generator of Python", with_loss(own_python_generator), TWICE),
    Program("a clock", with_loss(clock), TWICE),
    Program("a hook with a state", with_loss(grown_gradient), f"{TWICE}, and the gradient of 0.weight"),
    Program("a graph of another pass", with_loss(fails_twice), "second time"),
    Program("a hook that removes itself", with_loss(hook_that_removes_itself), TWICE),
    Program("features of the pass before", with_loss(previous_features), TWICE),
    Program("a teacher that moves after its use", with_loss(moved_after_use), TWICE),
    Program("a layer that forward freezes", of_forward(int, freezing), r"forward pass has frozen last\.bias"),
    Program("a layer that forward replaces", of_forward(nn.ReLU, replacing), "added, removed or replaced a part"),
    Program("a table of bounded norm", max_norm, WRITTEN),
    Program("weights that forward clips", of_forward(int, clipped), WRITTEN),
    Program("a list in a list", of_forward(lambda: [[1.0]], nested), TWICE),
    Program("a counter in an object", of_forward(lambda: SimpleNamespace(count=0), of_object), TWICE),
    Program("a tensor in an attribute", of_forward(lambda: torch.ones(()), of_tensor), TWICE),
    Program("a network in a list of the module", of_forward(lambda: [with_norm()], holding_a_network), OUTSIDE),
    Program("a scripted network", through(scripted), OUTSIDE),
    Program("a norm of instances", through(lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())), OUTSIDE),
    Program("a network whose writes are not counted", through(Uncounted), OUTSIDE),
    Program("a network that is not called", through(not_called), OUTSIDE),
]  # fmt: skip


def refusal(strategy, program, **options):
    """Return the error of a program on this instance, None if it trains."""
    try:
        by_trainer(program.idiom(**options), strategy)
    except (StrategyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("program", REFUSED, ids=str)
def test_programs_that_depend_on_the_spread_are_refused_on_all_instances(program, on_instances):
    for instances in (1, 2):
        for said in on_instances(instances, REPLICAS, lambda strategy: refusal(strategy, program)):
            assert said is not None
            assert re.search(program.refused, said), said


NEVER = ("a graph of another pass", "a clock", "a layer that forward freezes", "a layer that forward replaces")
ONE_REPLICA = [one for one in REFUSED if one.name not in NEVER]


@pytest.mark.parametrize("program", ONE_REPLICA, ids=str)
def test_one_replica_is_never_refused(program):
    found = by_trainer(program.idiom(), strategies.IPUStrategy(1))
    assert bits_of(found)[0] == bits_of(by_copies(program.idiom(), 1))[0]


# ---- where and when programs are refused


@pytest.mark.parametrize(
    "options",
    [{"stream_gradients": True}, {"replica_device": "cpu"}, {"gradient_accumulation_count": 1, "loss_scaling": 8.0}],
    ids=str,
)
@pytest.mark.parametrize("program", [REFUSED[0], REFUSED[2]], ids=str)
def test_programs_are_refused_with_every_exchange(program, options, on_instances):
    for instances in (1, 2):
        for said in on_instances(instances, REPLICAS, lambda strategy: refusal(strategy, program, **options)):
            assert said is not None
            assert re.search(program.refused, said), said


@pytest.mark.parametrize("program", REFUSED, ids=str)
def test_loops_refuse_the_same_programs(program, on_instances):
    def said_in_a_loop(strategy):
        module, loss = drawn(program.make)
        model = strategies.torch.DistributedModel(module, strategy)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        try:
            for step in range(STEPS):
                optimizer.zero_grad()
                model.backward(lambda rows: loss(model, rows), rows_of(step, strategy.local_replicas))
                optimizer.step()
        except (StrategyError, RuntimeError) as error:
            return str(error)
        return "it trains"

    for said in [said for instances in (1, 2) for said in on_instances(instances, REPLICAS, said_in_a_loop)]:
        assert re.search(program.refused.removeprefix("in step [137] .*"), said), said


@pytest.mark.parametrize("begins", [1, 3, 6])
def test_a_program_that_begins_later_is_refused_in_the_next_step_that_is_repeated(begins):
    count = [0]

    def loss(module, batch):
        count[0] += 1
        return classify(module, batch) * (count[0] if step >= begins else 1)

    trainer = sgd_trainer(REPLICAS, mlp(), loss)
    for step in range({1: 1, 3: 3, 6: 7}[begins]):
        trainer.step(rows_of(step, range(REPLICAS)))
    step += 1
    with pytest.raises(StrategyError, match=TWICE):
        trainer.step(rows_of(step, range(REPLICAS)))


def test_a_refused_step_changes_neither_the_module_nor_the_generators():
    module, loss = drawn(with_loss(counter))
    before = {name: one.clone() for name, one in module.state_dict().items()}
    trainer, state = sgd_trainer(REPLICAS, module, loss), torch.get_rng_state()
    with pytest.raises(StrategyError, match=TWICE):
        trainer.step(rows_of(0, range(REPLICAS)))
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert trainer.steps_made == 0


# ---- gradients that are left outside of the module


def outside_and_trainer():
    """Return a network outside of the module, its optimizer, and a trainer whose loss function uses the network."""
    other = nn.Linear(FEATURES, FEATURES)

    def loss(module, batch):
        return classify(module, {**batch, "x": other(batch["x"])})

    return (
        other,
        torch.optim.SGD(other.parameters(), 0.1),
        sgd_trainer(2, nn.Linear(FEATURES, CLASSES), loss),
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_another_optimizer_may_not_use_gradients_left_by_replicas(steps):
    other, optimizer, trainer = outside_and_trainer()
    for step in range(steps):
        optimizer.zero_grad()
        trainer.step(rows_of(step, range(2)))
    assert other.weight.grad is not None
    with pytest.raises(StrategyError, match="SGD would use a gradient that the loss function of a Trainer has left in"):
        optimizer.step()


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(())), lambda: torch.ones((), requires_grad=True)])
def test_another_optimizer_may_not_use_gradients_left_in_a_parameter_of_no_network(make):
    scale = make()
    optimizer = torch.optim.Adam([scale], 0.1)
    trainer = sgd_trainer(2, nn.Linear(FEATURES, CLASSES), lambda module, batch: classify(module, batch) * scale)
    for step in range(3):
        optimizer.zero_grad()
        trainer.step(rows_of(step, range(2)))
    with pytest.raises(StrategyError, match=r"Adam would use a gradient .* left in the parameter of the shape \[\]"):
        optimizer.step()


def reentrant(module, batch, scale):
    x = batch["x"].clone().requires_grad_()
    return classify(module, {**batch, "x": checkpoint(lambda x: x * scale, x, use_reentrant=True)})


def with_a_pass_inside(module, batch, scale):
    (module(batch["x"]).square().mean() * scale).backward()
    return classify(module, batch)


@pytest.mark.parametrize("loss", [reentrant, with_a_pass_inside])
def test_another_optimizer_may_not_use_gradients_left_by_nested_backward_passes(loss):
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([scale], 0.1)
    trainer = sgd_trainer(2, nn.Linear(FEATURES, CLASSES), lambda module, batch: loss(module, batch, scale))
    trainer.step(rows_of(0, range(2)))
    assert scale.grad is not None
    with pytest.raises(StrategyError, match=r"SGD would use a gradient .* left in the parameter of the shape \[\]"):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_another_optimizer_may_use_gradients_of_its_own(set_to_none):
    other, optimizer, trainer = outside_and_trainer()
    trainer.step(rows_of(0, range(2)))
    optimizer.zero_grad(set_to_none)
    other(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()


# ---- gradients that some replicas lack


def experts():
    """Make a layer for all rows, one for some, and one for none."""
    return nn.ModuleDict({name: nn.Linear(FEATURES, CLASSES) for name in ("all", "some", "none")})


def by_experts(module, batch):
    module = getattr(module, "module", module)  # of a DistributedModel
    loss = F.cross_entropy(module["all"](batch["x"]), batch["y"])
    return loss + 0.1 * module["some"](batch["x"]).square().mean() if batch["y"].sum() > 2 else loss


class Experts(nn.Module):
    """The same as a module, which a loop calls."""

    def __init__(self):
        super().__init__()
        self.experts = experts()

    def forward(self, batch):
        return by_experts(self.experts, batch)


def called(module, batch):
    return module(batch)


def looped(strategy, by_call):
    """Train in a loop of the program's own, with `loss.backward()` or `model.backward`."""
    module = drawn(Experts)
    model = strategies.torch.DistributedModel(module, strategy, missing_gradients="zero")
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = rows_of(step, strategy.local_replicas)
        if by_call:
            model.backward(model, rows)
        else:
            model(rows).backward()
        optimizer.step()
    return [one.detach().clone() for one in module.state_dict().values()], []


LACKING = Idiom("experts", Experts, called, program=eight_steps)


def test_in_some_steps_all_replicas_have_a_gradient_and_in_others_some():
    users = [sum(int(rows_of(step, range(r, r + 1))["y"].sum()) > 2 for r in range(REPLICAS)) for step in range(STEPS)]
    assert {0, 1, 2} & set(users)
    assert len(set(users)) > 2


@pytest.mark.parametrize(
    "options",
    [{}, {"replica_device": "cpu"}, {"stream_gradients": True}, {"check_numerics": True}, {"loss_scaling": 4.0}],
    ids=str,
)
def test_missing_gradients_count_as_zeros_in_plain_pytorch(options, on_instances):
    expected = bits_of(by_copies(LACKING, REPLICAS, "zero"))
    idiom = dataclasses.replace(LACKING, options={"missing_gradients": "zero", **options})
    for instances in (1, 2, 4):
        found = on_instances(instances, REPLICAS, lambda strategy: by_trainer(idiom, strategy))
        assert [bits_of(one) for one in found] == [expected] * instances


def test_missing_gradients_count_as_zeros_in_a_loop(on_instances):
    expected = bits_of(by_copies(LACKING, REPLICAS, "zero"))[0]
    for instances in (1, 2, 4):
        found = on_instances(instances, REPLICAS, lambda strategy: looped(strategy, by_call=True))
        assert [bits_of(one)[0] for one in found] == [expected] * instances
    found = on_instances(REPLICAS, REPLICAS, lambda strategy: looped(strategy, by_call=False))
    assert [bits_of(one)[0] for one in found] == [expected] * REPLICAS


@pytest.mark.parametrize("options", [{}, {"replica_device": "cpu"}, {"stream_gradients": True}], ids=str)
def test_missing_gradients_are_refused_with_the_way_out(options, on_instances):
    idiom = dataclasses.replace(LACKING, options=options)

    def refused(strategy):
        with pytest.raises(StrategyError, match=r"some\.weight has no gradient .* missing_gradients=\"zero\""):
            by_trainer(idiom, strategy)

    for instances in (1, 2):
        on_instances(instances, REPLICAS, refused)


def test_missing_gradients_are_refused_in_a_loop_with_the_way_out(on_instances):
    def refused(strategy):
        model = strategies.torch.DistributedModel(drawn(Experts), strategy)
        with pytest.raises(StrategyError, match=r"some\.weight has no gradient .* missing_gradients=\"zero\""):
            train(model, strategy)

    def train(model, strategy):
        for step in range(STEPS):
            model.zero_grad()
            model.backward(model, rows_of(step, strategy.local_replicas))

    for instances in (1, 2, 4):
        on_instances(instances, REPLICAS, refused)


@pytest.mark.parametrize("missing", ["error", "zero"])
def test_buckets_that_leave_during_the_backward_pass_may_lack_gradients(missing, on_instances, monkeypatch):
    monkeypatch.setattr("strategies.torch.exchange.plan.BUCKET_BYTES", 64)
    options = {"missing_gradients": missing, "stream_gradients": True}
    idiom, expected = dataclasses.replace(LACKING, options=options), by_copies(LACKING, REPLICAS, "zero")

    def trained(strategy):
        try:
            return bits_of(by_trainer(idiom, strategy))
        except StrategyError:
            return "refused"

    wanted = bits_of(expected) if missing == "zero" else "refused"
    for instances in (1, 2, 4):
        assert on_instances(instances, REPLICAS, trained) == [wanted] * instances
