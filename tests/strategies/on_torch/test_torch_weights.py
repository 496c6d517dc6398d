"""Weighted losses of the Trainer: means over all tokens of replicas and micro-batches, with the same bits anywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from poptorch_modules import new_options
from tiers import also, first_of, only
from token_losses import (
    IGNORED,
    LR,
    STEPS,
    WORDS,
    alone,
    bits,
    check_close,
    data,
    loss_fn,
    mean_over_tokens,
    new_model,
    part_of,
)
from torch import nn
from torch_modules import sgd_trainer

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch
from collectives import LayoutMismatchError
from strategies import StrategyError
from strategies.defaults import Defaults
from strategies.errors import DisagreementError, WeightError, ZeroWeightError

REPLICAS, MICRO_BATCHES = 4, 3


def trained(strategy, loss_fn=loss_fn, model=None, steps=STEPS, **options):
    """Return the model and the metrics of each step."""
    model = new_model() if model is None else model
    given = {"gradient_accumulation_count": MICRO_BATCHES} | options
    trainer = sgd_trainer(strategy, model, loss_fn, lr=LR, **given)
    seen = [dict(trainer.step(part_of(strategy, data()))) for _ in range(steps)]
    return model, seen


OPTIONS = {
    "plain": {},
    "at once": {"gradient_accumulation_count": 1},
    "running mean": {"reduction_method": "running_mean"},
    "scaled": {"loss_scaling": 2.0**10},
    "sharded": {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1},
    "checked": {"check_numerics": True},
    "mapped": {"map_gradient": lambda gradient, parameter: gradient * 1},
    "streamed": {"stream_gradients": True},
    "on a device": {"replica_device": "cpu"},
    "bfloat16": {"gradient_transfer_dtype": "bfloat16"},
    "computed": {"compute_dtype": "bfloat16"},
}
ROUNDED = {"bfloat16": 0.01, "computed": 0.02}


@pytest.mark.parametrize("name", only(["plain", "bfloat16", "on a device"], OPTIONS))
def test_a_training_is_that_of_one_process_with_all_tokens_for_every_option(everywhere, name):
    """A micro-batch without tokens has the loss NaN, and counts nothing. The case of transformers#34242."""
    found = everywhere(REPLICAS, lambda strategy: trained(strategy, **OPTIONS[name]))
    expected, losses = alone()
    limit = ROUNDED.get(name, 1e-6)
    for model, seen in found:
        assert bits(model) == bits(found[0][0])
        assert seen == found[0][1]
        check_close(model, expected, limit)
        assert [each["loss"] for each in seen] == pytest.approx(losses, rel=max(limit, 1e-5))
        assert [each["doubled"] for each in seen] == pytest.approx([2 * each for each in losses], rel=max(limit, 1e-5))


@pytest.mark.parametrize("exchange", ["compiled", also("window")])
def test_gradients_on_a_device_have_the_same_bits(on_instances, exchange):
    [(model, seen)] = on_instances(1, REPLICAS, trained)
    options = {"replica_device": "cpu"}
    defaults = Defaults(exchange=exchange)
    for own, metrics in on_instances(2, REPLICAS, lambda s: trained(s, **options), defaults=defaults):
        assert bits(own) == bits(model)
        assert metrics == seen


def test_a_sum_over_micro_batches_is_their_number_times_the_mean():
    model, _ = trained(strategies.IPUStrategy(REPLICAS), reduction_method="sum")
    check_close(model, alone(rate=MICRO_BATCHES * LR)[0])


def test_a_clipped_token_mean_is_that_of_one_process(on_instances):
    """Gradients are means before they are clipped, also where an optimizer is sharded: open-instruct#1736."""

    def clip(module):
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)

    found = on_instances(2, REPLICAS, lambda strategy: trained(strategy, steps=1, before_update=clip)[0])
    expected, batch = new_model(), data()
    mean_over_tokens(expected, batch)[0].backward()
    clip(expected)
    torch.optim.SGD(expected.parameters(), LR).step()
    for model in found:
        check_close(model, expected)


def test_without_weights_a_short_micro_batch_counts_as_much_as_a_long_one():
    """So the mean over tokens is another one: the test above can fail."""
    expected, _ = alone()
    mean_of_means = trained(strategies.IPUStrategy(2), lambda *arguments: loss_fn(*arguments).loss.nan_to_num())[0]
    assert (mean_of_means[2].weight - expected[2].weight).abs().max() > 1e-3


# ---- weights of all kinds


def alike(weight):
    """Return a loss function with the same number of tokens in every row, and any weight."""

    def loss_fn(module, batch):
        loss = F.cross_entropy(module(batch["x"]).flatten(0, 1), batch["x"].flatten())
        metrics = {"squared": loss.detach() ** 2}
        return (loss, metrics) if weight is None else strategies.Outcome(loss, metrics, weight=weight)

    return loss_fn


@pytest.mark.parametrize("options", [{}, {"replica_device": "cpu", "loss_scaling": 256.0}], ids=["host", "device"])
def test_weights_of_one_change_no_bit(options):
    strategy = strategies.IPUStrategy(3)
    (one, seen), (other, metrics) = (trained(strategy, alike(weight), **options) for weight in (None, 1.0))
    assert bits(one) == bits(other)
    assert seen == metrics


@pytest.mark.parametrize(
    "weight", first_of([torch.tensor(5), 2**24, np.float32(7), torch.tensor([3.0], requires_grad=True), 1e-3, True])
)
def test_equal_weights_of_any_kind_change_results_by_rounding_only(weight):
    (one, seen), (other, metrics) = (trained(strategies.IPUStrategy(2), alike(each)) for each in (None, weight))
    check_close(one, other)
    assert metrics == [pytest.approx(step, rel=1e-5) for step in seen]


class Stating(nn.Module):
    """A module that returns its own loss, and states the loss's weight."""

    def __init__(self):
        super().__init__()
        self.model = new_model()

    def forward(self, x, y):
        loss, tokens = mean_over_tokens(self.model, {"x": x, "y": y})
        strategies.torch.loss_weight(tokens)
        return loss


@pytest.mark.parametrize("options", [{}, also({"map_gradient": lambda gradient, parameter: gradient * 1})])
def test_a_module_may_state_the_weight_of_its_loss(options):
    model, strategy = Stating(), strategies.IPUStrategy(REPLICAS)
    trained(strategy, lambda module, batch: module(batch["x"], batch["y"]), model, **options)
    assert bits(model) == bits(trained(strategy, **options)[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("record", [torch.jit.trace, also(torch.export.export)])
def test_a_recorded_module_warns_that_it_states_no_weight(record):
    batch = data()
    with pytest.warns(UserWarning, match="loss_weight is no part of a traced or exported module"):
        record(Stating(), (batch["x"], batch["y"]))


@pytest.mark.complete
@pytest.mark.parametrize("compiles", ["the module", "a method"])
def test_a_compiled_module_states_the_weights_of_every_batch(compiles):
    """A compilation that kept the first weight, or none, would train another model."""
    module, batch = Stating(), data()
    model = torch.compile(module, backend="aot_eager")
    if compiles == "a method":
        model, _ = module, module.compile(backend="aot_eager")
    trained(strategies.IPUStrategy(REPLICAS), lambda own, batch: own(batch["x"], batch["y"]), model)
    assert math.isfinite(model(batch["x"], batch["y"]).item())
    check_close(module.model, alone()[0])


def test_a_poptorch_model_trains_with_the_mean_over_all_tokens():
    """Its loss is `CrossEntropyLoss(ignore_index=...)` inside of the module, marked as PopTorch's examples do."""

    class WithLoss(Stating):
        def forward(self, x, y):
            return poptorch.identity_loss(super().forward(x, y), reduction="none")

    module, batch = WithLoss(), data()
    options = new_options(replicas=REPLICAS, accumulation=MICRO_BATCHES)
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), LR))
    rows = len(batch["x"]) // REPLICAS // MICRO_BATCHES
    # PopTorch deals micro-batches to replicas in turn; a mean over all tokens does not depend on who has which.
    for _ in range(STEPS):
        model(batch["x"], batch["y"])
    assert rows
    check_close(module.model, alone()[0])
    assert math.isfinite(Stating()(batch["x"], batch["y"]).item())  # states nothing outside of a training


def test_several_weights_for_one_loss_are_refused():
    def loss_fn(module, batch):
        strategies.torch.loss_weight(3)
        return alike(2)(module, batch)

    with pytest.raises(StrategyError, match=r"2 weights were stated for one loss; return it in the Outcome, or"):
        trained(strategies.IPUStrategy(2), loss_fn)


# ---- layers and stages that need all replicas


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, _, self.last = new_model()
        self.norm = nn.SyncBatchNorm(8)

    def forward(self, x):
        return self.last(self.norm(self.table(x).flatten(0, 1))).view(*x.shape, WORDS)


def of_some_rows(module, batch):
    """Return the loss of rows with long texts, 0 if there is none."""
    logits, targets = module(batch["x"]), batch["y"].masked_fill(batch["y"][:, 6:7] == IGNORED, IGNORED)
    every = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    tokens = (targets != IGNORED).sum()
    return strategies.Outcome(every / tokens.clamp(min=1), weight=tokens)


def test_synchronised_batch_norm_has_the_gradients_of_all_tokens(everywhere):
    """Gradients of other replicas' losses arrive through the statistics, also at a replica without tokens."""
    options = {"gradient_accumulation_count": 1}
    found = everywhere(REPLICAS, lambda strategy: trained(strategy, of_some_rows, Normalised(), **options)[0])
    assert len(set(map(bits, found))) == 1
    expected = Normalised()
    optimizer, batch = torch.optim.SGD(expected.parameters(), LR), data()
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_some_rows(expected, batch).loss.backward()
        optimizer.step()
    check_close(found[0], expected)
    torch.testing.assert_close(found[0].norm.running_var, expected.norm.running_var)


@pytest.mark.parametrize(
    ("loss_fn", "options", "text"),
    [
        (loss_fn, {"gradient_accumulation_count": 9}, "a loss of the weight 0 is nan, and SyncBatchNorm would spread"),
        (of_some_rows, {"map_gradient": lambda gradient, parameter: gradient}, "map_gradient changes the gradients"),
    ],
)
def test_synchronised_batch_norm_refuses_weights_that_it_would_spoil(loss_fn, options, text):
    with pytest.raises(StrategyError, match=text):
        trained(strategies.IPUStrategy(REPLICAS), loss_fn, Normalised(), steps=1, **options)


class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = new_model()

    def forward(self, x):
        with poptorch.Block("first"):
            hidden = self.model[1](self.model[0](x))
        with poptorch.Block("last"):
            return self.model[2](hidden)


@pytest.mark.parametrize("schedule", first_of(["one_forward_one_backward", "grouped"], 2))
@pytest.mark.parametrize("mapped", [False, True])
def test_a_pipeline_trains_with_all_tokens(on_instances, schedule, mapped):
    """Micro-batches of unequal weights run at the same time, and one has no tokens."""
    pipeline = poptorch.PipelinedExecution("first", "last", schedule=schedule).pipeline
    options = {"map_gradient": lambda gradient, parameter: gradient * 1} if mapped else {}

    def run(strategy):
        return trained(strategy, model=Staged(), pipeline=pipeline, steps=3, **options)

    [(one, seen)] = on_instances(1, 2, run, ipus_per_replica=2)
    check_close(one.model, alone(3)[0])
    for other, metrics in on_instances(2, 2, run, ipus_per_replica=2):
        assert bits(other) == bits(one)
        assert metrics == seen


# ---- without weight


def without_weight(strategy, **options):
    """Return the error or the metrics of a step without weight, and the training's results after another step."""
    model, empty = new_model(), data() | {"y": torch.full_like(data()["y"], IGNORED)}
    trainer = sgd_trainer(strategy, model, loss_fn, momentum=0.9, **options)
    trainer.step(part_of(strategy, data()))
    before = bits(model)
    try:
        told = dict(trainer.step(part_of(strategy, empty)))
    except ZeroWeightError as error:
        told = str(error)
    assert bits(model) == before
    after = dict(trainer.step(part_of(strategy, data())))
    return told, trainer.steps_made, bits(model), after


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_step_without_weight_is_an_error_on_all_instances_and_training_goes_on(on_instances, device):
    found = [
        each
        for instances in (1, 2)
        for each in on_instances(instances, REPLICAS, lambda s: without_weight(s, replica_device=device))
    ]
    for told, steps, *_ in found:
        assert "all replicas and micro-batches have weight 0 at step 1" in told
        assert steps == 2
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_step_without_weight_is_skipped_if_so_told(device):
    strategy = strategies.IPUStrategy(REPLICAS)
    options = {"replica_device": device, "loss_scaling": strategies.LossScaling(initial=8.0, interval=2)}
    told, steps, found, after = without_weight(strategy, zero_weight="skip", **options)
    assert math.isnan(told["loss"])
    assert math.isnan(told["doubled"])
    assert steps == 3
    assert (told["skipped_steps"], told["loss_scale"]) == (1, 8)
    assert (after["skipped_steps"], after["loss_scale"]) == (1, 16)  # the second good step
    assert found == without_weight(strategy)[2]


# ---- weights that are refused


@pytest.mark.parametrize("bad", first_of([-1.0, math.nan, math.inf, 1e39]))
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_bad_weight_on_one_replica_is_an_error_on_all_instances(on_instances, bad, device):
    """The sum of the weights is above 0."""

    def loss_fn(module, batch):
        is_bad = bool((batch["x"][0] == data()["x"][-1]).all())
        return alike(bad if is_bad else 100.0)(module, batch)

    def refused(strategy):
        model = new_model()
        trainer = sgd_trainer(strategy, model, loss_fn, zero_weight="skip", replica_device=device)
        rows = {name: array.flip(0)[-len(array) :] for name, array in data().items()}
        with pytest.raises(WeightError, match=r"negative or not finite at step 0 on the replicas \[\d\]; the"):
            trainer.step(part_of(strategy, rows))
        return bits(model)

    found = [each for instances in (1, 2) for each in on_instances(instances, REPLICAS, refused)]
    assert set(found) == {bits(new_model())}


@pytest.mark.parametrize(
    ("weight", "options", "error", "text"),
    [
        (torch.ones(2), {}, TypeError, r"weight of the loss is torch.float32\[2\]; give a real scalar"),
        (torch.tensor(1j), {}, TypeError, "give a real scalar"),
        ("3", {}, TypeError, "weight of the loss is '3', a str; give a real scalar"),
        (torch.tensor(3, dtype=torch.bfloat16), {}, TypeError, "torch.bfloat16.*; give a real scalar of 32 or 64 bits"),
        (1.0, {"gradient_transfer_dtype": "float16"}, ValueError, "use gradient_transfer_dtype='bfloat16'"),
        (1.0, {"zero_weight": "ignore"}, ValueError, "use 'error' or 'skip'"),
    ],
)
def test_wrong_weights_and_options_are_refused(weight, options, error, text):
    with pytest.raises(error, match=text):
        trained(strategies.IPUStrategy(2), alike(weight), **options)


def test_parameters_of_groups_of_replicas_are_refused():
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2))
    strategies.torch.group_replicas(model[1].weight, strategies.torch.ReplicaGroups(size=1))
    loss_fn = lambda module, batch: strategies.Outcome(module[0](batch).sum() + module[1].weight.sum(), weight=1)  # noqa: E731
    trainer = sgd_trainer(2, model, loss_fn)
    with pytest.raises(StrategyError, match=r"losses have weights, but 1\.weight has a row for each group"):
        trainer.step(torch.ones(2, 4))


def test_an_outcome_of_pytorch_has_no_model_state():
    def loss_fn(module, batch):
        return strategies.Outcome(module(batch["x"]).sum(), model_state={"count": 1})

    with pytest.raises(TypeError, match="the buffers of a PyTorch module are its model state; leave it out"):
        trained(strategies.IPUStrategy(2), loss_fn)


def test_all_micro_batches_have_weights_or_none():
    def loss_fn(module, batch):
        has_none = bool((batch["x"][0] == data()["x"][0]).all())
        return alike(None if has_none else 1.0)(module, batch)

    with pytest.raises(StrategyError, match="the loss of some micro-batches has a weight, and that of others has none"):
        trained(strategies.IPUStrategy(1), loss_fn)


@pytest.mark.parametrize("is_weighted_there", first_of([True, False]))
def test_instances_agree_on_whether_losses_have_weights(on_instances, is_weighted_there):
    def run(strategy):
        is_other = strategy.instance_index == 1
        with pytest.raises(DisagreementError):
            trained(strategy, alike(1.0 if is_other is is_weighted_there else None))

    on_instances(2, REPLICAS, run)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_instances_agree_on_weights_that_depend_on_their_data(on_instances, device):
    """The programs are the same, and as many numbers travel, but the exchanges have different names."""

    def loss_fn(module, batch):
        loss = alike(None)(module, batch)[0]
        is_first = bool((batch["x"][0] == data()["x"][0]).all())
        return strategies.Outcome(loss, {"one": 1.0}) if is_first else strategies.Outcome(loss, weight=1.0)

    def run(strategy):
        with pytest.raises((LayoutMismatchError, DisagreementError), match="weight"):
            trained(strategy, loss_fn, gradient_accumulation_count=1, replica_device=device)

    on_instances(2, 2, run)


# ---- evaluation


def padded_rows(strategy, rows=None):
    rows = rows or data()
    return strategies.torch.distribute_dataset(strategy, rows, batch_size=2, shuffle=False, remainder="pad")


@pytest.mark.parametrize("instances", [1, 2])
def test_an_evaluation_is_the_mean_over_all_tokens(on_instances, instances):
    rows = {name: array[:21] for name, array in data().items()}

    def evaluated(strategy):
        trainer = sgd_trainer(strategy, new_model(), loss_fn)
        return dict(trainer.evaluate(padded_rows(strategy, rows)))

    with torch.no_grad():
        expected = mean_over_tokens(new_model(), rows)[0].item()
    found = on_instances(instances, REPLICAS, evaluated)
    for each in found:
        assert each["loss"] == pytest.approx(expected, rel=1e-6)
        assert each["doubled"] == pytest.approx(2 * expected, rel=1e-6)


def test_a_bad_weight_in_an_evaluation_is_an_error_on_all_instances(on_instances):
    def refused(strategy):
        trainer = sgd_trainer(strategy, new_model(), alike(1.0))
        testing = padded_rows(strategy)

        def fn(module, batch):
            is_first = bool((batch["x"][0] == data()["x"][0]).all())
            return alike(-1.0 if is_first else 1.0)(module, batch)

        with pytest.raises(WeightError, match="weight of a row is negative or not finite"):
            trainer.evaluate(testing, fn)

    on_instances(2, REPLICAS, refused)


@pytest.mark.parametrize("instances", [1, 2])
def test_an_evaluation_refuses_weights_of_some_rows_only(on_instances, instances):
    """Weights for all rows of one instance, and for none of the other, are refused on both."""

    def refused(strategy):
        trainer = sgd_trainer(strategy, new_model(), loss_fn)

        def fn(module, batch):
            is_of_replica_0 = bool((batch["x"][:1] == data()["x"][:16:4]).all(1).any())
            return alike(None if is_of_replica_0 else 1.0)(module, batch)

        with pytest.raises(StrategyError, match="the loss of some rows has a weight, and that of others has none"):
            trainer.evaluate(padded_rows(strategy, {name: array[:16] for name, array in data().items()}), fn)

    on_instances(instances, 2, refused)


def test_predictions_come_from_an_outcome():
    def loss_fn(module, batch):
        logits = module(batch["x"])
        return strategies.Outcome(logits.sum(), outputs=logits.argmax(-1), weight=2)

    trainer = sgd_trainer(2, new_model(), loss_fn)
    testing = strategies.torch.distribute_dataset(
        trainer.strategy, data(), batch_size=2, shuffle=False, remainder="pad"
    )
    assert np.concatenate([*trainer.predict(testing)]).shape == data()["x"].shape
