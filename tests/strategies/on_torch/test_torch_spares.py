"""Spares of PyTorch trainings on threads: they take the places of lost instances, and nobody sees old values."""

from __future__ import annotations

import collections
import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from losing import OnMessage
from standby_instances import ASLEEP, StandbyJob, run_with_spares
from surviving_instances import hook
from torch_modules import data, loss_fn, new_module

import strategies
import strategies.torch
from collectives import PeerLostError, ThreadHub
from strategies import SpareError

REPLICAS = 6
STEPS = 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def train(strategy, module):
    """Train with a schedule of learning rates, and return the losses, an evaluation, and the bits of the state."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer)
    dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=2)
    held_out = strategies.torch.distribute_dataset(strategy, data(), 2, shuffle=False, remainder="pad")
    losses = []
    while trainer.steps_made < STEPS:
        for batch in dataset.epoch(trainer.steps_made):
            optimizer.zero_grad()
            losses.append(float(trainer.step(batch)["loss"]))
            scheduler.step()
            if trainer.steps_made == 2:
                losses.append(trainer.evaluate(held_out)["loss"])
            if trainer.steps_made == STEPS:
                break
    state = trainer.state
    trainer.close()
    return losses, strategies.fingerprint([state.variables, state.model_state, state.optimizer_state])


@pytest.fixture(scope="module")
def alone(module):
    return train(strategies.IPUStrategy(REPLICAS), module)


def test_a_spare_sleeps_through_a_training_without_losses(module, alone):
    assert run_with_spares(2, 1, REPLICAS, functools.partial(train, module=module)) == [alone, alone, ASLEEP]


@pytest.mark.parametrize(
    ("lost", "step", "phase"),
    [
        (1, 0, "update"),
        (0, 2, "all_reduce"),
        pytest.param(0, 0, "forward", marks=pytest.mark.complete),
        pytest.param(1, 3, "forward", marks=pytest.mark.complete),
        pytest.param(0, 2, "update", marks=pytest.mark.complete),
    ],
)
def test_a_spare_takes_the_place_of_a_lost_instance(module, alone, lost, step, phase):
    faults = [f"kill:instance={lost},step={step},phase={phase}"]
    found = run_with_spares(2, 1, REPLICAS, functools.partial(train, module=module), faults)
    assert found == [None if rank == lost else alone for rank in range(3)]


def test_the_job_shrinks_after_its_last_spare(module, alone):
    faults = ["kill:instance=0,step=1,phase=forward", "kill:instance=1,step=2,phase=update"]
    found = run_with_spares(2, 1, REPLICAS, functools.partial(train, module=module), faults)
    assert found == [None, None, alone]


@pytest.mark.parametrize("phase", ["all_reduce", pytest.param("update", marks=pytest.mark.complete)])
def test_an_active_instance_becomes_a_spare_and_active_again(module, alone, phase):
    job = StandbyJob(ThreadHub(3), num_active=3)
    hooks = [hook(0, phase, 1, resizing(job, 1)), hook(0, phase, 3, resizing(job, 3))]
    assert run_with_spares(3, 0, REPLICAS, functools.partial(train, module=module), hooks, job=job) == [alone] * 3


def resizing(job, number):
    """Return a function that asks for another number of active instances, between two steps of an instance."""

    def ask():
        job.num_active = number
        raise PeerLostError("another number of instances is wanted")

    return ask


MESSAGES = [pytest.param(number, marks=[] if number == 40 else pytest.mark.complete) for number in range(2, 66, 2)]


@pytest.mark.parametrize("number", MESSAGES)
def test_the_others_go_on_if_a_spare_is_lost_while_it_joins(module, alone, number):
    """The spare is lost at a message after the loss of instance 1 in step 1."""
    fault = OnMessage(2, number)
    faults = [hook(0, "forward", 1, fault.begin), "kill:instance=1,step=1,phase=all_reduce"]
    program, hub = functools.partial(train, module=module), ThreadHub(3, fault)
    assert run_with_spares(2, 1, REPLICAS, program, faults, mechanism="ring", hub=hub) == [alone, None, None]


@pytest.mark.parametrize("number", MESSAGES)
def test_a_spare_joins_although_an_instance_that_hands_its_state_over_is_lost(module, alone, number):
    fault = OnMessage(0, number)
    faults = [hook(1, "forward", 1, fault.begin), "kill:instance=1,step=1,phase=all_reduce"]
    program, hub = functools.partial(train, module=module), ThreadHub(4, fault)
    assert run_with_spares(3, 1, REPLICAS, program, faults, mechanism="ring", hub=hub) == [None, None, alone, alone]


@functools.cache
def message_of(read):
    """Return the message of the spare whose program reads something after the second step."""

    of_all = new_module("convolutions")

    def program(strategy):
        module = copy.deepcopy(of_all)
        optimizer = torch.optim.SGD(module.parameters(), 0.01, 0.9)
        trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer)
        for number, batch in enumerate(strategies.torch.distribute_dataset(strategy, data(), 2).epoch(0)):
            trainer.step(batch)
            if number == 1:
                read(trainer, batch)

    *_, found = run_with_spares(2, 1, REPLICAS, program)
    assert isinstance(found, SpareError), found
    return str(found)


def test_a_spare_that_waits_for_values_gets_them_if_it_becomes_active(module):
    """An instance is lost in the step after the read, so no other operation comes before the spare joins."""

    def program(strategy):
        own = copy.deepcopy(module)
        trainer = strategies.torch.Trainer(strategy, own, loss_fn, torch.optim.Adam(own.parameters(), 0.01))
        read = []
        for number, batch in enumerate(strategies.torch.distribute_dataset(strategy, data(), 2).epoch(0)):
            trainer.step(batch)
            if number == 1:
                read = [float(own.last.weight.detach().sum()), int(own.norm.num_batches_tracked)]
        return read, strategies.fingerprint(trainer.state.variables)

    expected = program(strategies.IPUStrategy(REPLICAS))
    found = run_with_spares(2, 1, REPLICAS, program, ["kill:instance=1,step=2,phase=forward"])
    assert found == [expected, None, expected]


def test_a_spare_has_no_outputs_of_an_earlier_step_when_it_becomes_active(module):
    def program(strategy):
        own = copy.deepcopy(module)
        trainer = strategies.torch.Trainer(strategy, own, loss_fn, torch.optim.SGD(own.parameters(), 0.01))
        for number, batch in enumerate(strategies.torch.distribute_dataset(strategy, data(), 2).epoch(0)):
            trainer.step(batch)
            if number == 1:
                assert trainer.outputs
        return True

    zero, one, spare = run_with_spares(2, 1, REPLICAS, program, ["kill:instance=1,step=2,phase=forward"])
    assert (zero, one) == (True, None)
    assert isinstance(spare, SpareError)
    assert "was a spare in the last step" in str(spare)


READS = {
    "a parameter": lambda trainer, batch: trainer.module.last.weight.sum(),
    "a buffer": lambda trainer, batch: trainer.module.norm.running_mean.tolist(),
    "a forward pass": lambda trainer, batch: trainer.module(data()["x"]),
    "a gradient": lambda trainer, batch: trainer.module.last.weight.grad,
    "a state dict": lambda trainer, batch: trainer.module.state_dict(),
    "a copy of the module": lambda trainer, batch: copy.deepcopy(trainer.module),
    "a write": lambda trainer, batch: torch.nn.init.zeros_(trainer.module.last.weight),
    "the state of the optimizer": lambda trainer, batch: trainer.optimizer.state_dict(),
    "a step of the optimizer": lambda trainer, batch: trainer.optimizer.step(),
    "an array of the state": lambda trainer, batch: trainer.state.variables["last.weight"] + 1,
    "outputs": lambda trainer, batch: trainer.outputs,
    "a batch": lambda trainer, batch: batch["x"].sum(),
}


SHORT = ("a parameter", "the state of the optimizer", "an array of the state", "outputs", "a batch")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.complete) for name in READS]
)
def test_a_spare_that_reads_values_ends_with_the_reason(name):
    assert "a spare" in message_of(READS[name])
    assert "becomes active" in message_of(READS[name])


def test_a_spare_may_ask_for_all_that_needs_no_values(alone, module):
    def program(strategy):
        own = copy.deepcopy(module)
        optimizer = torch.optim.SGD(own.parameters(), 0.01, 0.9)
        trainer = strategies.torch.Trainer(strategy, own, loss_fn, optimizer)
        for batch in strategies.torch.distribute_dataset(strategy, data(), 2).epoch(0):
            trainer.step(batch)
            own.train()
            own.zero_grad()
            weight = own.last.weight
            assert (weight.shape, weight.numel(), weight.device.type) == (weight.size(), 180, "cpu")
            assert trainer.state.variables["last.weight"].shape == tuple(weight.shape)
            optimizer.param_groups[0]["lr"] *= 0.9
        return True

    assert run_with_spares(2, 1, REPLICAS, program) == [True, True, ASLEEP]


def test_a_view_that_the_program_took_earlier_shows_no_old_values(module):
    seen = []

    def program(strategy):
        own = copy.deepcopy(module)
        view = own.last.weight.detach()
        trainer = strategies.torch.Trainer(strategy, own, loss_fn, torch.optim.SGD(own.parameters(), 0.1))
        for batch in strategies.torch.distribute_dataset(strategy, data(), 2).epoch(0):
            trainer.step(batch)
            seen.append((strategy.replicas.is_spare, bool(view.isnan().all())))

    run_with_spares(2, 1, REPLICAS, program)
    assert {is_nan for is_spare, is_nan in seen if is_spare} == {True}
    assert {is_nan for is_spare, is_nan in seen if not is_spare} == {False}


def test_a_spare_cannot_follow_a_loop(module):
    def program(strategy):
        model = strategies.torch.DistributedModel(copy.deepcopy(module), strategy)
        for batch in strategies.torch.distribute_dataset(strategy, data(), 2).epoch(0):
            model.backward(lambda rows: loss_fn(model, rows)[0], batch)
        return True

    *active, spare = run_with_spares(2, 1, REPLICAS, program)
    assert active == [True, True]
    assert isinstance(spare, SpareError)
    assert "cannot follow the loop of a DistributedModel" in str(spare)


class Remembers(torch.nn.Module):
    """A module with attributes that steps assign, and use in later steps."""

    def __init__(self, kind):
        super().__init__()
        self.last, self.part = torch.nn.Linear(4, 3), torch.nn.Module()
        self.calls, self.part.seen, self.part.kind, self.other = 0, [], "first", None
        self.kind = kind

    def forward(self, x):
        self.calls += 1
        self.part.seen.append(self.calls)
        self.other = self.kind(self.calls)
        scale = self.calls + len(self.part.seen) + (2 if self.part.kind == "first" else 0)
        self.part.kind = "later"
        return self.last(x) * scale


def trained_remembering(strategy, first):
    """Train a copy with batches of two shapes, and return attributes and bits."""
    module = copy.deepcopy(first)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    trainer = strategies.torch.Trainer(strategy, module, lambda module, batch: module(batch).square().mean(), optimizer)
    rows = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    wide, narrow = (strategies.torch.distribute_dataset(strategy, rows, size) for size in (3, 2))
    for batch in itertools.chain(itertools.islice(wide.epoch(0), 2), itertools.islice(narrow.epoch(0), 3)):
        trainer.step(batch)
    calls, seen = module.calls, list(module.part.seen)
    trainer.close()
    return calls, seen, strategies.fingerprint([one.detach().numpy() for one in module.parameters()])


@pytest.mark.parametrize(("kind", "replicas"), [(int, REPLICAS), (torch.tensor, 2)])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("phase", ["forward", "all_reduce", "update"])
def test_a_spare_begins_with_the_attributes_of_the_others(kind, replicas, step, phase):
    train = functools.partial(trained_remembering, first=Remembers(kind))
    alone = train(strategies.IPUStrategy(replicas))
    assert alone[:2] == (5, [1, 2, 3, 4, 5])
    found = run_with_spares(2, 1, replicas, train, [f"kill:instance=1,step={step},phase={phase}"])
    assert found == [alone, None, alone]


def test_an_instance_that_was_a_spare_begins_with_the_attributes_of_the_others():
    train = functools.partial(trained_remembering, first=Remembers(int))
    alone = train(strategies.IPUStrategy(REPLICAS))
    job = StandbyJob(ThreadHub(3), num_active=3)
    hooks = [hook(0, "all_reduce", 1, resizing(job, 1)), hook(0, "all_reduce", 3, resizing(job, 3))]
    assert run_with_spares(3, 0, REPLICAS, train, hooks, job=job) == [alone] * 3


def test_attributes_that_cannot_be_sent_are_named_and_the_others_go_on():
    train = functools.partial(trained_remembering, first=Remembers(complex_object))
    faults = ["kill:instance=1,step=2,phase=forward"]
    alone = train(strategies.IPUStrategy(REPLICAS))
    first, lost, spare = run_with_spares(2, 1, REPLICAS, train, faults)
    assert (first, lost) == (alone, None)
    assert isinstance(spare, SpareError)
    assert "steps assign Remembers.other, a deque, which cannot be sent; assign numbers" in str(spare)


def complex_object(number):
    return collections.deque([number])


class Cached(torch.nn.Module):
    """A module that makes a view of its weights and a function in the first step, and deletes an attribute later."""

    def __init__(self):
        super().__init__()
        self.last, self.view, self.function, self.count, self.double = torch.nn.Linear(4, 3), None, None, 0, True

    def forward(self, x):
        if self.view is None:
            self.view, self.function = self.last.weight.detach(), lambda rows: rows * 2
        self.count += 1
        if self.count == 2:
            del self.double
        return self.function(self.last(x)) * (1 + self.view.mean()) * (2 if hasattr(self, "double") else 1)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_spare_makes_caches_again_and_deletes_what_the_others_have_deleted(step):
    """A copy of a view would keep the old weights."""
    train = functools.partial(trained, first=Cached(), program=lambda module, step: None)
    alone = train(strategies.IPUStrategy(4))
    assert run_with_spares(2, 1, 4, train, [f"kill:instance=1,step={step},phase=forward"]) == [alone, None, alone]


def trained(strategy, first, program):
    """Train a copy of a module that the program changes before each step, and return its bits."""
    module = copy.deepcopy(first)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    trainer = strategies.torch.Trainer(strategy, module, lambda module, batch: module(batch).square().mean(), optimizer)
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    for step, batch in enumerate(strategies.torch.distribute_dataset(strategy, rows, batch_size=2).epoch(0)):
        program(module, step)
        trainer.step(batch)
    trainer.close()
    return strategies.fingerprint([one.detach().numpy() for one in module.state_dict().values()])


class Follows(torch.nn.Module):
    """A frozen layer, a frozen mean that the forward pass writes, and a trained layer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = torch.nn.Linear(4, 4), torch.nn.Module(), torch.nn.Linear(4, 4)
        self.first.requires_grad_(False)
        self.middle.mean = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.counter = Counts()

    def forward(self, x):
        rows = self.first(x)
        self.middle.mean.mul_(0.9).add_(rows.detach().mean(0) * 0.1)
        return self.last(rows + self.middle.mean) * self.counter()


class Counts(torch.nn.Module):
    count = 0

    def forward(self):
        self.count += 1
        return self.count


def thawing(module, step):
    """Freeze a layer and thaw another of the same size."""
    if step == 1:
        module.first.requires_grad_(True)
        module.last.requires_grad_(False)


def replacing(module, step):
    if step == 1:
        module.counter = torch.nn.Sequential(Counts(), torch.nn.Identity())
        module.counter.forward = module.counter[0].forward


def growing(module, step):
    if step == 1:
        module.register_buffer("later", torch.zeros(2))


@pytest.mark.parametrize("program", [thawing, replacing, growing])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_spare_follows_a_program_that_changes_the_parts_of_the_module(program, step):
    train = functools.partial(trained, first=Follows(), program=program)
    alone = train(strategies.IPUStrategy(4))
    assert run_with_spares(2, 1, 4, train, [f"kill:instance=1,step={step},phase=forward"]) == [alone, None, alone]


def test_a_spare_that_has_changed_its_module_otherwise_is_refused_and_the_others_go_on():
    def train(strategy):
        def freezing(module, step):
            if step == 1 and strategy.replicas.is_spare:
                module[0].bias.requires_grad_(False)

        return trained(strategy, first, freezing)

    first = torch.nn.Sequential(torch.nn.Linear(4, 4))
    alone = train(strategies.IPUStrategy(4))
    one, lost, spare = run_with_spares(2, 1, 4, train, ["kill:instance=1,step=2,phase=forward"])
    assert (one, lost) == (alone, None)
    assert isinstance(spare, SpareError)
    assert "its digest of the module's shapes is" in str(spare)


class Largest(torch.nn.Module):
    """A module with a number that differs between replicas."""

    def __init__(self):
        super().__init__()
        self.last, self.largest = torch.nn.Linear(4, 3), 0.0

    def forward(self, x):
        self.largest = max(self.largest, float(x.detach().max()))
        return self.last(x) * self.largest


def test_a_replica_alone_on_its_instance_has_its_attributes_after_others_were_there():
    """The bits are those of no other job: a replica whose instance has slept begins with another one's attributes."""
    train = functools.partial(trained, first=Largest(), program=lambda module, step: None)
    job = StandbyJob(ThreadHub(3), num_active=3)
    hooks = [hook(0, "all_reduce", 1, resizing(job, 1)), hook(0, "all_reduce", 3, resizing(job, 3))]
    found = run_with_spares(3, 0, 3, train, hooks, job=job)
    assert found == [found[0]] * 3
    assert isinstance(found[0], str)
