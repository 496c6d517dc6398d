"""Replicas take turns with one module: each has the bits of a copy of the module in a process of its own."""

from __future__ import annotations

import collections
import copy
import gc
import io
import math
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from copies import by_copies
from idiom import (
    CLASSES,
    FEATURES,
    WORDS,
    Apply,
    Idiom,
    bits_of,
    by_trainer,
    classify,
    drawn,
    mlp,
    named,
    read,
    rows_of,
    trained_by,
)
from idioms_of_losses import LOSSES
from idioms_of_modules import HEAD, LAYERS, WRAPPERS, layered
from idioms_of_optimizers import OPTIMIZERS
from idioms_of_programs import CHANGES, HOOKS
from tiers import first_of, only
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch_modules import sgd_trainer as trainer_of

import strategies
import strategies.torch
from strategies import StrategyError

REPLICAS, STEPS = 4, 5


def sgd_trainer(strategy, module, loss=classify, **options):
    return trainer_of(strategy, module, loss, **options)


pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]


def steps():
    """Run the steps, of which the first, second and fourth are repeated."""
    for _ in range(STEPS):
        yield


def uneventful(module, optimizer):
    yield from steps()


def row(name, module=mlp, loss=classify, program=uneventful, **options):
    return Idiom(name, module, loss, program=program, **options)


# ---- attributes


class Remembers(nn.Module):
    """A module whose forward pass changes an attribute, and scales its output by a number that it returns."""

    def __init__(self, value, change):
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.value, self.change = copy.deepcopy(value), change

    def forward(self, x):
        return self.last(x) * self.change(self, x.detach())


def remembers(value, change):
    return lambda: Remembers(value, change)


def counted(module, x):
    module.value += 1
    return module.value


def toggled(module, x):
    module.value = "right" if module.value == "left" else "left"
    return len(module.value)


def largest(module, x):
    """Keep a number that differs between replicas."""
    module.value = max(module.value, float(x.max()))
    return module.value


def appended(module, x):
    module.value.append(float(x.max()))
    return sum(module.value)


def replaced_list(module, x):
    module.value = [*module.value, float(x.max())]
    return sum(module.value)


def keyed(module, x):
    key = "positive" if x.sum() > 0 else "negative"
    module.value[key] = module.value.get(key, 0) + 1
    return 1 + module.value[key] / len(module.value)


def put_into_set(module, x):
    module.value.add(int(x.sum()))
    return len(module.value)


def emptied(module, x):
    """Remove elements from the front, and add others to the back."""
    module.value.append(module.value.pop(0) + float(x.max()))
    return module.value[0]


def made(module, x):
    """Make an attribute in the first pass, and delete it in the second."""
    if hasattr(module, "seen"):
        del module.seen
        return 2
    module.seen = True
    return 1


def mode_changed(module, x):
    module.train(not module.training)
    return 1 + module.training


def of_submodule(module, x):
    module.last.calls = getattr(module.last, "calls", 0) + float(x.max())
    return module.last.calls


def kept_tensor(module, x):
    """Keep a tensor of the last pass, which is replaced and not written."""
    before, module.value = module.value, x.mean()
    return 1 + before


def sometimes(module, x):
    """Keep a number of some batches only."""
    if x.sum() > 0:
        module.value = float(x.max())
    return module.value or 1.0


def sometimes_appended(module, x):
    if x.sum() > 0:
        module.value.append(float(x.max()))
    return 1 + sum(module.value)


def hidden(module, x):
    """Keep a matrix for the next pass, or nothing."""
    before, module.value = module.value, x.t() @ x if x.sum() > 0 else None
    return 1.0 if before is None else 1 + before.mean().tanh()


def at_least(module, x):
    """Keep a number of a part, which may be NaN."""
    before = getattr(module.last, "least", math.nan)
    module.last.least = float(x.max()) if x.sum() > 0 else math.nan
    return 1.0 if math.isnan(before) else before


ATTRIBUTES = [
    row("a number", remembers(0, counted)),
    row("a string", remembers("left", toggled)),
    row("a number that differs", remembers(0.0, largest)),
    row("a list", remembers([], appended)),
    row("a list that is replaced", remembers([], replaced_list)),
    row("a list that keeps its length", remembers([1.0, 2.0], emptied)),
    row("a dictionary", remembers({}, keyed)),
    row("a counter of words", remembers(collections.Counter(), keyed)),
    row("a dictionary with defaults", remembers(collections.defaultdict(int), keyed)),
    row("a dictionary in order", remembers(collections.OrderedDict(a=1), keyed)),
    row("a set", remembers(set(), put_into_set)),
    row("a deque", remembers(collections.deque(maxlen=2), appended)),
    row("an attribute that comes and goes", remembers(None, made)),
    row("the mode", remembers(None, mode_changed)),
    row("an attribute of a layer", remembers(None, of_submodule)),
    row("a tensor of the last pass", remembers(torch.zeros(()), kept_tensor)),
    row("a number of some replicas", remembers(None, sometimes)),
    row("a list of some replicas", remembers([], sometimes_appended)),
    row("a list that grows beyond a thousand elements", remembers([0.0] * 998, appended)),
    row("a matrix or nothing", remembers(None, hidden)),
]


def assigning(*values):
    """Return a program that assigns an attribute after some steps, and leaves it alone after others."""

    def program(module, optimizer):
        for value in values:
            yield
            if value is not None:
                module.value = copy.deepcopy(value)

    return program


def list_edited(module, optimizer):
    yield
    module.value.append(7.0)
    yield
    yield
    module.value.clear()
    yield
    yield


def cleared(module, optimizer):
    for number, _ in enumerate(steps()):
        yield
        if number % 2:
            module.value.clear()


def kept_two(module, x):
    """Keep the mean of the last pass, and use that of an earlier one."""
    before = getattr(module, "earlier", None)
    module.value = x.mean(0)
    return 1.0 if before is None else before.mean()


def handed_number(module, x):
    """Keep a number of the last pass, and use that of an earlier one."""
    before = getattr(module, "earlier", 1.0)
    module.value = float(x.max())
    return before


def counted_in_turn(module, x):
    """Append to the one list in odd passes, and to the other one in even passes."""
    module.value.append(float(x.max()))
    module.value, module.last.other = getattr(module.last, "other", [1.0]), module.value
    return sum(module.value) + 2 * sum(module.last.other)


def one_of_two(module, x):
    """Choose one of two objects, which the program may assign, too."""
    before = module.earlier.gain if hasattr(module, "earlier") else 1.0
    module.value = module.last.high if x.sum() > 0 else module.last.low
    return before


def with_objects():
    module = remembers(None, one_of_two)()
    module.last.high, module.last.low = SimpleNamespace(gain=2.0), SimpleNamespace(gain=0.5)
    return module


def handed_on(module, optimizer):
    for number, _ in enumerate(steps()):
        yield
        if number != 1:
            module.earlier = module.value


def exchanged(module, optimizer):
    for number, _ in enumerate(steps()):
        yield
        if number % 2:
            module.value.append(0.5)
            module.value, module.last.other = module.last.other, module.value


def object_assigned(module, optimizer):
    for number, _ in enumerate(steps()):
        yield
        module.earlier = module.last.high if number % 2 else module.last.low


def nothing_left(module, optimizer):
    for _ in steps():
        yield
        module.value = None


def nan_left(module, optimizer):
    for _ in steps():
        yield
        module.last.least = math.nan


ASSIGNED = [
    row("a number is assigned", remembers(0, counted), program=assigning(None, 10, None, 3, None)),
    row("a number that differs is assigned", remembers(0.0, largest), program=assigning(0.0, None, 0.5, None, None)),
    row("a list is assigned", remembers([], appended), program=assigning(None, [5.0], None, [], None)),
    row("a list of some replicas is cleared", remembers([], sometimes_appended), program=cleared),
    row("a set is cleared", remembers(set(), put_into_set), program=cleared),
    row("a list is edited", remembers([], appended), program=list_edited),
    row("nothing is assigned in place of a matrix", remembers(None, hidden), program=nothing_left),
    row("NaN is assigned to a part", remembers(None, at_least), program=nan_left),
    row("a tensor is handed on to another attribute", remembers(None, kept_two), program=handed_on),
    row("a number is handed on to another attribute", remembers(0.0, handed_number), program=handed_on),
    row("two lists are exchanged", remembers([0.0], counted_in_turn), program=exchanged),
    row("an object that some replicas have chosen is assigned", with_objects, program=object_assigned),
    row("a mode is assigned", remembers(None, mode_changed),
        program=lambda module, optimizer: (module.eval() if number == 2 else None for number in range(STEPS))),
]  # fmt: skip


# ---- parameters, buffers and layers


class Frozen(nn.Module):
    """A momentum encoder, whose frozen parameters the forward pass writes."""

    def __init__(self, write):
        super().__init__()
        self.query, self.last = nn.Linear(FEATURES, 6), HEAD()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.write = write

    def forward(self, x):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            self.write(key, query, x)
        return self.last(torch.tanh(self.query(x)) + self.key(x))


@torch.no_grad()
def moved(key, query, x):
    key.mul_(0.9).add_(query, alpha=0.1)


def by_data(key, query, x):
    key.data = key.data * 0.9 + query.data * 0.1


def of_rows(key, query, x):
    key.data.mul_(0.9).add_(x.mean(), alpha=0.1)


@torch.no_grad()
def copied_by_some(key, query, x):
    """Copy the query, to which the key is equal at first, for some rows only."""
    if x.sum() > 0:
        key.copy_(query)


def copied_later(key, query, x):
    """Copy the query for some rows in the first step, and for all rows later."""
    with torch.no_grad():
        if x.sum() > 0 or not torch.equal(key, query):
            key.copy_(query)


class Meeting(Frozen):
    """A momentum encoder that some replicas write between two layers in which they meet."""

    def __init__(self, write):
        super().__init__(write)
        self.norm, self.again = nn.SyncBatchNorm(6), nn.SyncBatchNorm(6)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.query(x)))
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            self.write(key, query, x)
        return self.last(hidden + self.again(self.key(x)))


class Grows(nn.Module):
    """A buffer that is empty until the first pass, and is replaced in each pass."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x):
        now = x.detach().abs().amax(0)
        self.largest = now if not self.largest.numel() else self.largest * 0.9 + now * 0.1
        return self.last(x / (self.largest + 1))


def recurrent(kind):
    """Make a recurrent network with dropout between its layers, which C++ draws."""
    return lambda: Apply(
        lambda self, x: self.head(self.layers(x.view(-1, 4, 2))[0][:, -1]),
        layers=kind(2, 6, num_layers=2, dropout=0.4, batch_first=True),
        head=HEAD(),
    )


def first_changed(change):
    """Make two layers, and change the first."""

    def make():
        module = nn.Sequential(nn.Linear(FEATURES, 6), nn.Dropout(0.2), HEAD())
        change(module[0])
        return module

    return make


def cached(module, batch):
    with parametrize.cached():
        return classify(module, batch) + 0.1 * classify(module, batch)


def pruned_later(module, optimizer):
    yield
    yield
    prune.l1_unstructured(module[0], "bias", 0.5)
    optimizer.param_groups[0]["params"] = list(module.parameters())
    yield
    yield
    yield


def activation_replaced(module, optimizer):
    yield
    module[1] = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.4))
    module[1].requires_grad_(False)
    yield
    yield
    module[1] = nn.Dropout(0.1)
    yield
    yield


def layer_replaced(module, optimizer):
    yield
    module[-1] = drawn(HEAD)
    optimizer.param_groups[0]["params"] = list(module.parameters())
    yield
    yield
    yield
    yield


def hooks_come_and_go(module, optimizer):
    yield
    forward = module[0].register_forward_hook(lambda layer, given, output: output * 2)
    yield
    backward = module[1].register_full_backward_hook(lambda layer, given, gradients: (given[0] * 0.5,))
    forward.remove()
    yield
    before = module[1].register_forward_pre_hook(lambda layer, given: (given[0] + 1,))
    backward.remove()
    yield
    before.remove()
    yield


def tied():
    """Make a table that is also the last layer."""
    table = nn.Embedding(WORDS, 6)
    last = nn.Linear(6, WORDS)
    last.weight = table.weight
    return Apply(lambda self, x: self.last(torch.tanh(self.table(x).mean(1))), table=table, last=last)


PARTS = [
    row("frozen parameters", lambda: Frozen(moved)),
    row("frozen parameters with new data", lambda: Frozen(by_data)),
    row("frozen parameters that differ", lambda: Frozen(of_rows)),
    row("frozen parameters that some replicas copy", lambda: Frozen(copied_by_some)),
    row("frozen parameters that some replicas copy at first", lambda: Frozen(copied_later)),
    row("a buffer that grows", Grows),
    row("an LSTM with dropout", recurrent(nn.LSTM)),
    row("a GRU with dropout", recurrent(nn.GRU)),
    row("a plain recurrent network with dropout", recurrent(nn.RNN)),
    row("weight norm", first_changed(parametrizations.weight_norm)),
    row("spectral norm", first_changed(parametrizations.spectral_norm)),
    row("spectral norm, cached", first_changed(parametrizations.spectral_norm), cached),
    row("orthogonal weights, cached", first_changed(parametrizations.orthogonal), cached),
    row("spectral norm, the old one", first_changed(nn.utils.spectral_norm)),
    row("layers that are replaced", program=layer_replaced),
    row("layers without trained parameters that are replaced", program=activation_replaced),
    row("hooks that come and go", program=hooks_come_and_go),
    row("tied weights", tied, read),
]

# Modules that `copy.deepcopy` cannot copy, or without what it has been given since: only compared between instances.
UNCOPIED = [
    row("weight norm, the old one", first_changed(nn.utils.weight_norm)),
    row("pruned weights", first_changed(lambda one: prune.random_unstructured(one, "weight", 0.5))),
    row("weights that are pruned later", program=pruned_later),
    row("a scripted module", lambda: torch.jit.script(layered(nn.BatchNorm1d(6), nn.Dropout(0.3)))),
    row("a traced module", lambda: torch.jit.trace(layered(nn.Tanh()), torch.zeros(2, FEATURES))),
    row(
        "an exported module", lambda: torch.export.export(nn.Linear(FEATURES, 3), (torch.zeros(2, FEATURES),)).module()
    ),
]
COPIED = named([*ATTRIBUTES, *ASSIGNED, *PARTS])
_NO_COPY = {  # and no parameter's hooks come with a copy
    "synchronised batch norm", "pruned weights", "a scripted module", "a traced module", "a scripted layer",
    "a module that cannot be copied", "autocast as an option", "a gradient that a hook masks",
    "a hook on complete gradients",
}  # fmt: skip
OTHERS = {
    name: one
    for name, one in named([*LAYERS, *WRAPPERS, *OPTIMIZERS, *LOSSES, *HOOKS, *CHANGES]).items()
    if not one.refused and not one.waiting and name not in _NO_COPY
}


def has_bits_on_instances(idiom, expected, on_instances, counts=(1, 2, 4)):
    for instances in counts:
        found = on_instances(instances, REPLICAS, lambda strategy: by_trainer(idiom, strategy))
        assert [bits_of(one) for one in found] == [expected] * instances


@pytest.mark.parametrize("idiom", COPIED.values(), ids=str)
def test_replicas_have_the_bits_of_copies_in_plain_pytorch(idiom, on_instances):
    has_bits_on_instances(idiom, bits_of(by_copies(idiom, REPLICAS)), on_instances)


@pytest.mark.parametrize("idiom", first_of(OTHERS.values(), 12), ids=str)
def test_replicas_of_all_idioms_have_the_bits_of_copies(idiom):
    assert bits_of(by_trainer(idiom, strategies.IPUStrategy(REPLICAS))) == bits_of(by_copies(idiom, REPLICAS))


@pytest.mark.parametrize("idiom", UNCOPIED, ids=str)
def test_modules_that_nobody_can_copy_have_the_same_bits_on_all_instances(idiom, on_instances):
    has_bits_on_instances(idiom, bits_of(by_trainer(idiom, strategies.IPUStrategy(REPLICAS))), on_instances, (2, 4))


# ---- errors of the loss function


class Everything(nn.Module):
    """Buffers, frozen parameters, attributes and random numbers that each pass changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), HEAD()
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.count, self.name, self.seen, self.keys = 0, "left", [], {}
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        self.name = "right" if self.name == "left" else "left"
        self.seen.append(float(x.detach().max()))
        self.keys[self.count] = {self.name}
        self.table = self.table + x.detach().mean()
        self.frozen.data.mul_(1.5)
        self.norm.train(self.count % 3 > 0)
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return self.last(F.dropout(self.norm(self.first(x)), 0.3)) * noise / len(self.seen)


def generators():
    """Return the states of the generators of the process, to compare."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def state_of(module):
    """Return all that a turn changes, to compare, besides gradients."""
    tensors = [
        strategies.fingerprint({name: one.detach().numpy()}) for name, one in sorted(module.state_dict().items())
    ]
    attributes = {
        (number, name): repr(value)
        for number, part in enumerate(module.modules())
        for name, value in vars(part).items()
        if not name.startswith("_")
    }
    return tensors, attributes, generators()


def rows_for(step, strategy):
    """Return four rows for each local replica."""
    local = strategy.local_replicas
    return rows_of(step, range(2 * local.start, 2 * local.stop))


class Fails(Exception):
    """The error of a loss function."""


class FailingLoss:
    """A loss function that fails once, for the rows of a replica's micro-batch in a step; `rows` are None then."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, module, batch):
        found = classify(module, batch)
        if self.rows is not None and torch.equal(batch["x"], self.rows):
            self.rows = None
            raise Fails
        return found


PLACES = [
    (step, replica, micro_batch)
    for step in (0, 2, 3)  # the first and fourth step are repeated
    for replica, micro_batch in ((0, 0), (1, 0), (0, 1), (3, 1))
]


@pytest.mark.parametrize("place", first_of(PLACES, 8))
def test_after_an_error_of_the_loss_function_all_is_as_before(place):
    strategy, (failing, replica, micro_batch) = strategies.IPUStrategy(REPLICAS), place
    first = 4 * replica + 2 * micro_batch
    found = []
    for rows in (None, rows_for(failing, strategy)["x"][first : first + 2]):
        loss, module = FailingLoss(rows), drawn(Everything)
        trainer = sgd_trainer(strategy, module, loss, gradient_accumulation_count=2)
        for step in range(STEPS):
            before = state_of(module)
            if rows is not None and step == failing:
                with pytest.raises(Fails):
                    trainer.step(rows_for(step, strategy))
                assert state_of(module) == before
                assert all(one.grad is None for one in module.parameters())
            trainer.step(rows_for(step, strategy))
        found.append(state_of(module)[:2])
    assert found[0] == found[1]


def test_an_instance_that_repeats_a_failed_step_meets_the_others(on_instances):
    def trained(strategy, rows):
        loss, module = FailingLoss(rows), drawn(Everything)
        trainer = sgd_trainer(strategy, module, loss, gradient_accumulation_count=2)
        for step in range(STEPS):
            try:
                trainer.step(rows_for(step, strategy))
            except Fails:
                trainer.step(rows_for(step, strategy))
        return state_of(module)[0], rows is not None and loss.rows is None

    one = strategies.IPUStrategy(REPLICAS)
    expected, _ = trained(one, None)
    rows = rows_for(3, one)["x"][-2:]
    found = on_instances(2, REPLICAS, lambda strategy: trained(strategy, rows))
    assert found == [(expected, False), (expected, True)]


# ---- what the program sees


def test_steps_evaluations_and_predictions_leave_the_generators_of_the_program():
    def loss(module, batch):
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return classify(module, batch) * noise

    trainer = sgd_trainer(REPLICAS, mlp(), loss)
    before = generators()
    for step in range(2):
        trainer.step(rows_of(step, range(REPLICAS)))
        assert generators() == before
    trainer.evaluate([rows_of(2, range(REPLICAS))])
    assert generators() == before
    list(trainer.predict([rows_of(2, range(REPLICAS))], lambda module, batch: module(batch["x"]) + torch.rand(())))
    assert generators() == before


class Shows(nn.Module):
    """A module that returns a view of a buffer that each pass writes."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scratch", torch.zeros(2 * REPLICAS, FEATURES))

    def forward(self, x):
        with torch.no_grad():
            self.mean.copy_(x.mean(0))
            self.scratch[: len(x)].copy_(x)
        return self.last(x)


def test_outputs_and_predictions_that_are_views_of_buffers_keep_their_values():
    def loss(module, batch):
        found = classify(module, batch)
        return found, {"mean": module.mean[0]}, {"mean": module.mean[:2], "rows": module.scratch[: len(batch["x"])]}

    def shown(module, batch):
        module(batch["x"])
        return module.scratch[: len(batch["x"])]

    trainer = sgd_trainer(REPLICAS, Shows(), loss, gradient_accumulation_count=2)
    for step in range(3):
        batch = rows_of(step, range(2 * REPLICAS))
        metrics = trainer.step(batch)
        passes = batch["x"].split(2)
        outputs = [output for of_replica in trainer.outputs for output in of_replica]
        assert all(torch.equal(output["rows"], rows) for output, rows in zip(outputs, passes, strict=True))
        assert all(torch.equal(output["mean"], rows.mean(0)[:2]) for output, rows in zip(outputs, passes, strict=True))
        expected = float(torch.stack([rows.mean(0)[0] for rows in passes]).mean())
        assert metrics["mean"] == pytest.approx(expected, abs=1e-6)
    batches = [rows_of(step, range(REPLICAS)) for step in range(2)]
    predicted = list(trainer.predict(batches, shown))
    for one, batch in zip(predicted, batches, strict=True):
        assert torch.equal(torch.as_tensor(one), batch["x"])


def test_hooks_of_parameters_run_once_for_each_replica_and_micro_batch_on_its_own_gradient():
    """Step 3 is not repeated; gradients of micro-batches are added before the next hook sees the sum."""
    seen, sums = [], []

    def keep_sum(parameter):
        sums.append(parameter.grad.clone())

    module = nn.Linear(FEATURES, CLASSES)
    module.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    module.weight.register_post_accumulate_grad_hook(keep_sum)
    trainer = sgd_trainer(REPLICAS, module, classify, gradient_accumulation_count=2)
    for step in range(3):
        seen.clear()
        sums.clear()
        plain, batch = nn.Linear(FEATURES, CLASSES), rows_of(step, range(2 * REPLICAS))
        plain.load_state_dict(module.state_dict())
        trainer.step(batch)
    for number, (gradient, total) in enumerate(zip(seen, sums, strict=True)):
        rows = slice(2 * number, 2 * number + 2)
        plain.zero_grad()
        (classify(plain, {"x": batch["x"][rows], "y": batch["y"][rows]}) / 2).backward()
        assert torch.equal(gradient, plain.weight.grad)
        assert torch.equal(total, gradient + seen[number - 1] if number % 2 else gradient)
    assert len(seen) == 2 * REPLICAS


@pytest.mark.parametrize(("change", "place", "name"), [(largest, "", "value"), (of_submodule, ".last", "calls")])
def test_an_attribute_that_differs_between_replicas_has_no_value_between_steps(change, place, name, on_instances):
    """Until the trainer is closed: then it has the value of the last local replica."""

    def trained(strategy):
        module = drawn(remembers(0.0, change))
        trainer, of = sgd_trainer(strategy, module), module.get_submodule(place[1:])
        batch = rows_of(0, strategy.local_replicas)
        trainer.step(batch)
        last = float(batch["x"].chunk(len(strategy.local_replicas))[-1].max())
        if len(strategy.local_replicas) > 1:
            refused = rf"Remembers{place}\.{name} was assigned in a step and is .* in replica"
            with pytest.raises(StrategyError, match=refused):
                float(getattr(of, name))
            with pytest.raises(StrategyError, match=refused):
                getattr(of, name).upper()
        else:
            assert getattr(of, name) == last
        trainer.close()
        assert getattr(of, name) == last

    for instances in (1, 2, 4):
        on_instances(instances, REPLICAS, trained)


class Switched(nn.Module):
    """A module with a part that rows switch, and the program too."""

    def __init__(self):
        super().__init__()
        self.last, self.part = HEAD(), nn.Module()
        self.part.value = None

    def forward(self, x):
        scale = {None: 1.0, False: 2.0, True: 0.5, "far": 0.25, 3: 3.0}[self.part.value]
        self.part.value = (None, False, True, "far")[int(x.detach().sum()) % 4]
        return self.last(torch.cat([x, x], 1)[:, : self.last.in_features]) * scale


class Kept(nn.Module):
    """A part with a container of one value, which rows switch, and the program too."""

    def __init__(self, container, key):
        super().__init__()
        self.last, self.part, self.key = HEAD(), nn.Module(), key
        self.part.kept = container

    def forward(self, x):
        scale = {None: 1.0, False: 2.0, True: 0.5, "far": 0.25, 3: 3.0, 0.5: 0.7}[self.part.kept[self.key]]
        self.part.kept[self.key] = (None, False, True, "far", 0.5)[int(x.detach().sum()) % 5]
        return self.last(torch.cat([x, x], 1)[:, : self.last.in_features]) * scale


EDITS = {
    "nothing": lambda kept, key: kept.__setitem__(key, None),
    "a truth value": lambda kept, key: kept.__setitem__(key, True),
    "a string": lambda kept, key: kept.__setitem__(key, "far"),
    "a number": lambda kept, key: kept.__setitem__(key, 3),
    "a fraction": lambda kept, key: kept.__setitem__(key, 0.5),
    "another element": lambda kept, key: kept.update(other=1) if key == "mode" else kept.append(1),
    "a place": lambda kept, key: kept.__setitem__("mode", kept.pop("spare")) if key == "mode" else kept.reverse(),
}
CONTAINERS = {
    "a dictionary": (lambda: {"spare": 3, "mode": None}, "mode"),
    "a list": (lambda: [3, None], 1),
    "a deque": (lambda: collections.deque([3, None]), 1),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_edits_of_a_container_between_steps_hold_for_all_replicas(container, edit, on_instances):
    """Also if the last replica has left the very same element; other elements stay those of each replica."""
    make, key = CONTAINERS[container]

    def edited_between_steps(module, optimizer):
        for number in range(STEPS):
            yield
            if edit != "a place" or container != "a dictionary" or not number:
                EDITS[edit](module.part.kept, key)

    idiom = Idiom("edited", lambda: Kept(make(), key), program=edited_between_steps)
    has_bits_on_instances(idiom, bits_of(by_copies(idiom, REPLICAS)), on_instances)


@pytest.mark.parametrize("change", [put_into_set, sometimes_appended])
def test_a_container_of_other_lengths_has_no_value_between_steps(change):
    """`add` and `pop` could change nothing in that of the last replica."""
    module = drawn(remembers(set() if change is put_into_set else [], change))
    trainer = sgd_trainer(REPLICAS, module)
    trainer.step(rows_of(0, range(REPLICAS)))
    for use in (len, lambda value: value.pop()):
        with pytest.raises(StrategyError, match=r"Remembers\.value was assigned in a step and is .* assign one"):
            use(module.value)
    module.value = type(module.value.of_replicas[0].holder)()
    trainer.step(rows_of(1, range(REPLICAS)))


@pytest.mark.parametrize("value", [None, False, True, "far", 3])
def test_a_value_that_the_program_assigns_to_a_part_holds_for_all_replicas(value, on_instances):
    """Also if the last replica has left the very same value."""

    def assigned_between_steps(module, optimizer):
        for _ in steps():
            yield
            module.part.value = value

    idiom = Idiom("assigned", Switched, program=assigned_between_steps)
    has_bits_on_instances(idiom, bits_of(by_copies(idiom, REPLICAS)), on_instances)


class Remembering(nn.Module):
    """Attributes that differ between replicas: a number of a part, a tensor, and a list."""

    def __init__(self):
        super().__init__()
        self.last, self.part, self.before, self.seen = HEAD(), nn.Module(), None, []
        self.part.largest = 0.0

    def forward(self, x):
        self.part.largest = max(self.part.largest, float(x.detach().max()))
        self.seen.append(float(x.detach().min()))
        before, self.before = self.before, x.detach().mean(0)
        hidden = x if before is None else x + before
        return self.last(torch.cat([hidden, hidden], 1)[:, : self.last.in_features]) * self.part.largest + self.seen[0]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_second_trainer_goes_on_with_the_attributes_of_each_replica(is_closed, on_instances):
    def trained(strategy):
        module = drawn(Remembering)
        for rate in (0.1, 0.05):
            trainer = sgd_trainer(strategy, module, lr=rate)
            for step in range(2):
                trainer.step(rows_of(step, strategy.local_replicas))
            if is_closed:
                trainer.close()
        assert "_attributes_of_replicas" not in module.state_dict()
        return strategies.fingerprint(module.state_dict())

    assert len({one for count in (1, 2, 4) for one in on_instances(count, REPLICAS, trained)}) == 1


def test_copies_and_files_of_a_module_have_no_attributes_of_replicas():
    module = nn.Sequential(drawn(lambda: nn.Linear(FEATURES, CLASSES)))
    trainer = sgd_trainer(REPLICAS, module)
    trainer.step(rows_of(0, range(REPLICAS)))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert vars(copied)["_attributes_of_replicas"] is None
        sgd_trainer(REPLICAS, copied).step(rows_of(0, range(REPLICAS)))


def test_a_module_is_freed_at_once_although_it_has_attributes_of_replicas():
    def weight_after_a_step():
        model = strategies.torch.DistributedModel(nn.Linear(FEATURES, CLASSES), strategies.IPUStrategy(2))
        model.backward(lambda rows: classify(model, rows), rows_of(0, range(2)))
        return weakref.ref(model.module.weight)

    gc.disable()
    try:
        assert weight_after_a_step()() is None
    finally:
        gc.enable()


def test_an_attribute_that_only_some_instances_have_assigned_is_no_disagreement(on_instances):
    """Batches of a new size, and evaluations, compare the attributes of the module between instances."""

    def trained(strategy):
        module = drawn(remembers(None, sometimes))
        trainer, local = sgd_trainer(strategy, module), strategy.local_replicas
        for step in range(STEPS):
            rows = slice((1 + step % 2) * local.start, (1 + step % 2) * local.stop)
            batch = {name: one[rows] for name, one in rows_of(step, range(REPLICAS)).items()}
            trainer.step(batch)
            trainer.evaluate([batch])
        return strategies.fingerprint(module.state_dict())

    assert len({one for count in (1, 2, 4) for one in on_instances(count, REPLICAS, trained)}) == 1


# ---- parts of the library together


def grouped_and_tied():
    """Make a table with a row for each pair of replicas, which two layers use."""

    def forward(self, x):
        weight = self.table if self.table.ndim == 2 else self.table[0]
        return self.last(torch.tanh(x @ weight) @ self.again.table.t())

    module = Apply(forward, last=nn.Linear(FEATURES, CLASSES))
    module.table = nn.Parameter(torch.randn(2, FEATURES, 6))
    module.again = nn.Module()
    module.again.table = module.table
    strategies.torch.group_replicas(module.table, strategies.torch.ReplicaGroups(2))
    return module


def grouped_by_copies():
    """Train with plain PyTorch: a copy of the module for each replica, with the row of its group."""
    first = drawn(grouped_and_tied)
    table, last = first.table.detach().clone(), first.last
    optimizer = torch.optim.SGD([*last.parameters()], 0.1, momentum=0.9)
    velocity = None
    for step in range(3):
        optimizer.zero_grad()
        rows = [table[replica // 2].clone().requires_grad_() for replica in range(REPLICAS)]
        for replica, row_ in enumerate(rows):
            batch = rows_of(step, range(replica, replica + 1))
            F.cross_entropy(last(torch.tanh(batch["x"] @ row_) @ row_.t()), batch["y"]).div(REPLICAS).backward()
        gradient = torch.stack([(rows[0].grad + rows[1].grad) * 2, (rows[2].grad + rows[3].grad) * 2])
        velocity = gradient if velocity is None else 0.9 * velocity + gradient
        table = table - 0.1 * velocity
        optimizer.step()
    return table, last


def test_rows_of_groups_with_tied_parameters_train_as_in_plain_pytorch(on_instances):
    idiom = Idiom("groups", grouped_and_tied)
    found = [one for count in (1, 2, 4) for one in on_instances(count, REPLICAS, lambda s: by_trainer(idiom, s))]
    assert [bits_of(one) for one in found] == [bits_of(found[0])] * 7
    table, last = grouped_by_copies()
    module = drawn(grouped_and_tied)
    names = [*module.state_dict()]
    trained = dict(zip(names, found[0][0], strict=True))
    torch.testing.assert_close(trained["table"], table)
    torch.testing.assert_close(trained["last.weight"], last.weight.detach())


class Synchronised(nn.Module):
    """Layers that meet those of other replicas, between attributes and random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 6), HEAD()
        self.norm, self.again = nn.SyncBatchNorm(6), nn.SyncBatchNorm(6)
        self.dropout, self.largest, self.seen = nn.Dropout(0.3), 0.0, []

    def forward(self, x):
        self.largest = max(self.largest, float(x.detach().max()))
        hidden = self.dropout(self.norm(self.first(x))) * self.largest
        self.seen.append(self.largest + random.random())
        hidden = self.again(self.second(hidden))
        return self.last(self.dropout(hidden)) * (np.random.rand() + sum(self.seen))  # noqa: NPY002


@pytest.mark.parametrize("write", [copied_by_some, copied_later])
def test_layers_that_meet_have_the_same_bits_with_frozen_parameters_that_some_write(write, on_instances):
    idiom = Idiom("meets", lambda: Meeting(write), program=uneventful)
    has_bits_on_instances(idiom, bits_of(by_trainer(idiom, strategies.IPUStrategy(REPLICAS))), on_instances)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_layers_that_meet_have_the_same_bits_with_attributes_and_random_numbers(micro_batches, on_instances):
    idiom = Idiom("meets", Synchronised, program=uneventful, options={"gradient_accumulation_count": micro_batches})
    found = [one for count in (1, 2, 4) for one in on_instances(count, REPLICAS, lambda s: by_trainer(idiom, s))]
    assert [bits_of(one) for one in found] == [bits_of(found[0])] * 7


def test_a_compiled_module_trains_with_batches_of_several_sizes(on_instances):
    def trained(strategy, compiles):
        module = drawn(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), HEAD()))
        trainer = sgd_trainer(
            strategy, torch.compile(module, backend="aot_eager", dynamic=True) if compiles else module
        )
        for step in range(STEPS):
            per_replica = 1 + step % 3
            local = strategy.local_replicas
            rows = slice(per_replica * local.start, per_replica * local.stop)
            trainer.step({name: one[rows] for name, one in rows_of(step, range(8)).items()})
        return strategies.fingerprint(module.state_dict())

    torch.compiler.reset()
    expected = trained(strategies.IPUStrategy(REPLICAS), True)
    assert expected == trained(strategies.IPUStrategy(REPLICAS), False)
    assert on_instances(2, REPLICAS, lambda strategy: trained(strategy, True)) == [expected] * 2


@pytest.mark.parametrize(("failing", "replica"), [(2, 1), (0, 0), (3, 3)])
def test_after_an_error_where_replicas_meet_all_is_as_before(failing, replica):
    found = []
    for rows in (None, rows_of(failing, range(REPLICAS))["x"][2 * replica : 2 * replica + 2]):
        loss, module = FailingLoss(rows), drawn(Synchronised)
        trainer = sgd_trainer(REPLICAS, module, loss)
        for step in range(STEPS):
            before = state_of(module)
            if rows is not None and step == failing:
                with pytest.raises(Fails):
                    trainer.step(rows_of(step, range(REPLICAS)))
                assert state_of(module) == before
            trainer.step(rows_of(step, range(REPLICAS)))
        found.append(state_of(module)[0])
    assert found[0] == found[1]


# ---- a loop of the program


def by_backward(idiom, strategy):
    """Train by `DistributedModel.backward`."""
    module = drawn(idiom.module)
    optimizer, model = idiom.optimizer(module), strategies.torch.DistributedModel(module, strategy)

    def step(number):
        optimizer.zero_grad()
        loss = model.backward(lambda rows: idiom.loss(model, rows), rows_of(number, strategy.local_replicas))
        optimizer.step()
        return float(loss)

    return trained_by(idiom, module, optimizer, step)


@pytest.mark.parametrize("idiom", only([*ATTRIBUTES[::4], *PARTS[::5]], COPIED.values()), ids=str)
def test_a_loop_has_the_bits_of_copies_too(idiom, on_instances):
    expected = bits_of(by_copies(idiom, REPLICAS))
    for instances in (1, 2, 4):
        found = on_instances(instances, REPLICAS, lambda strategy: by_backward(idiom, strategy))
        assert [bits_of(one) for one in found] == [expected] * instances


# ---- attributes in evaluations, and after changes of the module


class Sums(nn.Module):
    """A module whose replicas keep a list that differs, and use it in evaluations."""

    def __init__(self):
        super().__init__()
        self.last, self.seen, self.passes = nn.Linear(FEATURES, CLASSES), [], 0

    def forward(self, x):
        self.seen.append(float(x.detach().max()))
        self.passes += 1
        return self.last(x) * (self.passes + sum(self.seen))


def test_evaluations_and_predictions_begin_with_the_attributes_of_each_replica(on_instances):
    """They change nothing: the next step goes on as if there had been none."""

    def trained(strategy, evaluates):
        module, found = drawn(Sums), []
        trainer = sgd_trainer(strategy, module)
        batches = [rows_of(step, strategy.local_replicas) for step in range(4)]
        for batch in batches:
            trainer.step(batch)
            if evaluates:
                found += [trainer.evaluate(batches[:2])["loss"] for _ in range(2)]
                found += [np.asarray(one).tolist() for one in trainer.predict(batches[:1], lambda m, b: m(b["x"]))]
        return strategies.fingerprint(module.state_dict()), found

    expected = trained(strategies.IPUStrategy(REPLICAS), True)
    assert expected[0] == trained(strategies.IPUStrategy(REPLICAS), False)[0]
    assert expected[1][0] == expected[1][1]
    for instances in (2, 4):
        assert on_instances(instances, REPLICAS, lambda strategy: trained(strategy, True)) == [expected] * instances


def frozen_between_steps(module, optimizer):
    yield
    yield
    module.last.bias.requires_grad_(False)
    yield
    module.last.bias.requires_grad_(True)
    yield
    yield


def test_replicas_keep_their_attributes_when_the_program_freezes_a_layer(on_instances):
    idiom = Idiom("frozen between steps", Sums, program=frozen_between_steps)
    has_bits_on_instances(idiom, bits_of(by_copies(idiom, REPLICAS)), on_instances)
