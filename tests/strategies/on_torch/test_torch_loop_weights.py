"""Weighted losses in training loops of the program: token means over replicas and micro-batches that are not equal."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from losing_at_events import Events, run_losing
from tiers import also, first_of
from token_losses import (
    IGNORED,
    LR,
    STEPS,
    WORDS,
    alone,
    bits,
    check_close,
    check_gradients,
    data,
    loss_fn,
    mean_over_tokens,
    new_model,
    part_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_modules import distributed, sgd_trainer

import strategies
import strategies.torch
from strategies import StrategyError
from strategies.errors import WeightError, ZeroWeightError
from strategies.torch.distributed_model.passes import MeanPassResult

REPLICAS = 4


@pytest.fixture(params=["host", also("compiled")])
def on_every_path(request, on_path):
    """Provide a function that runs another one on instances with each path of gradients."""
    return functools.partial(on_path, request.param)


def in_turns(strategy, micro_batches=1, model=None, rows=None, **options):
    """Return the trained model and the losses of a loop whose replicas take turns on each instance."""
    module, model = distributed(strategy, model or new_model(), **options)
    optimizer, losses = torch.optim.SGD(module.parameters(), LR), []

    def of_rows(batch):
        loss, tokens = mean_over_tokens(model, batch)
        return strategies.Outcome(loss, weight=tokens)

    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(model.backward(of_rows, part_of(strategy, rows or data()), micro_batches)))
        optimizer.step()
    return module, losses


def looped(strategy, micro_batches=1, scaler=None, **options):
    """Return the model that a plain loop of one replica has trained."""
    module, model = distributed(strategy, new_model(), **options)
    optimizer, batch = torch.optim.SGD(module.parameters(), LR), part_of(strategy, data())
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = list(zip(batch["x"].chunk(micro_batches), batch["y"].chunk(micro_batches), strict=True))
        for number, (x, y) in enumerate(parts):
            loss, tokens = mean_over_tokens(model, {"x": x, "y": y})
            if scaler is not None:
                loss = scaler.scale(loss)
            if number < micro_batches - 1:
                with model.no_sync():
                    model.weighted_backward(loss, tokens)
            else:
                model.weighted_backward(loss, tokens)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return module


@functools.cache
def by_trainer():
    model = new_model()
    trainer = sgd_trainer(REPLICAS, model, loss_fn, lr=LR)
    losses = [trainer.step(data())["loss"] for _ in range(STEPS)]
    return bits(model), losses


def test_replicas_that_take_turns_have_the_bits_of_a_trainer(everywhere):
    for model, losses in everywhere(REPLICAS, in_turns):
        assert (bits(model), losses) == by_trainer()
    check_close(model, alone()[0])


@pytest.mark.parametrize("micro_batches", first_of([3, 9]))
def test_micro_batches_of_unequal_lengths_are_one_batch(everywhere, micro_batches):
    """The loop does not divide the loss by their number; some have no tokens, and a loss of NaN."""
    found = everywhere(REPLICAS, lambda strategy: in_turns(strategy, micro_batches))
    assert len({bits(model) for model, _ in found}) == 1
    expected, losses = alone()
    check_close(found[0][0], expected)
    assert found[0][1] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"stream_gradients": True}], ids=["whole", "streamed"])
def test_a_plain_loop_has_the_bits_of_a_trainer(on_instances, options):
    found = on_instances(REPLICAS, REPLICAS, lambda strategy: looped(strategy, **options))
    assert {bits(model) for model in found} == {by_trainer()[0]}


def test_two_micro_batches_have_the_bits_of_a_trainer(on_instances):
    model = new_model()
    trainer = sgd_trainer(2, model, loss_fn, lr=LR, gradient_accumulation_count=2)
    for _ in range(STEPS):
        trainer.step(data())
    found = on_instances(2, 2, lambda strategy: looped(strategy, 2))
    found.append(in_turns(strategies.IPUStrategy(2), 2)[0])
    assert set(map(bits, found)) == {bits(model)}


def test_weights_that_are_no_integers_have_the_bits_of_a_trainer():
    """They are added in float64, as a trainer adds them."""
    rows = {name: array[4:] for name, array in data().items()}

    def tenths(module, batch):
        loss, tokens = mean_over_tokens(module, batch)
        return strategies.Outcome(loss, weight=tokens / 10)

    by_trainer, (module, model) = new_model(), distributed(strategies.IPUStrategy(1), new_model())
    trainer = sgd_trainer(1, by_trainer, tenths, lr=LR, gradient_accumulation_count=8)
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(4):
        trainer.step(rows)
        optimizer.zero_grad()
        model.backward(functools.partial(tenths, model), rows, 8)
        optimizer.step()
    assert bits(module) == bits(by_trainer)


def test_a_plain_loop_accumulates_token_means(on_every_path):
    found = on_every_path(REPLICAS, REPLICAS, lambda strategy: looped(strategy, 3))
    assert len(set(map(bits, found))) == 1
    check_close(found[0], alone()[0])


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_replica_accumulates_token_means(micro_batches):
    strategy = strategies.IPUStrategy(1)
    for model in (looped(strategy, micro_batches), in_turns(strategy, micro_batches)[0]):
        check_close(model, alone()[0])


def test_replicas_may_have_batches_of_unequal_sizes(on_every_path):
    """A fast device gets more rows, or short rows are put into larger batches: the case of pytorch#67253."""
    sizes, batch = [2, 13, 5, 16], data()
    assert sum(sizes) == len(batch["x"])

    def run(strategy):
        module, model = distributed(strategy, new_model())
        x = batch["x"].split(sizes)[strategy.instance_index]
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())  # the mean over this replica's rows
        model.weighted_backward(loss, len(x))
        return [one.grad for one in module.parameters()]

    expected = new_model()
    F.cross_entropy(expected(batch["x"]).flatten(0, 1), batch["x"].flatten()).backward()
    for found in on_every_path(4, 4, run):
        check_gradients(found, expected)


def test_weights_of_one_change_no_bit(on_every_path):
    def run(strategy, is_weighted):
        module, model = distributed(strategy, new_model())
        loss = model(part_of(strategy, data())["x"]).square().mean()
        model.weighted_backward(loss, 1) if is_weighted else loss.backward()
        return bits(nn.ParameterList([nn.Parameter(one.grad) for one in module.parameters()]))

    weighted, plain = (on_every_path(2, 2, functools.partial(run, is_weighted=each)) for each in (True, False))
    assert weighted == plain


def test_bfloat16_parameters_have_the_bits_of_a_trainer(on_instances):
    """Gradients are multiplied by weights and divided by the mean weight in float32."""
    model = new_model().bfloat16()

    def run(strategy):
        module, own = distributed(strategy, model)
        loss, tokens = mean_over_tokens(own, part_of(strategy, data()))
        own.weighted_backward(loss, tokens)
        return [one.grad for one in module.parameters()]

    by_trainer = copy.deepcopy(model)
    sgd_trainer(2, by_trainer, loss_fn).step(data())
    for found in on_instances(2, 2, run):
        for own, parameter in zip(found, by_trainer.parameters(), strict=True):
            assert torch.equal(own, parameter.grad)


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning")
def test_a_scaler_of_pytorch_works_with_weights(on_instances):
    """A power of two changes no bit."""

    def run(strategy):
        return looped(strategy, scaler=torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=99))

    found = on_instances(REPLICAS, REPLICAS, run)
    assert {bits(model) for model in found} == {by_trainer()[0]}


def test_synchronised_batch_norm_has_the_gradients_of_all_tokens(on_instances):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, _, self.last = new_model()
            self.norm = nn.SyncBatchNorm(8)

        def forward(self, x):
            return self.last(self.norm(self.table(x).flatten(0, 1))).view(*x.shape, WORDS)

    rows = {name: array[3:] for name, array in data().items()}  # without those that have no tokens

    def run(strategy):
        module, model = distributed(strategy, Normalised())
        part = {name: array.chunk(3)[strategy.instance_index] for name, array in rows.items()}
        model.weighted_backward(*mean_over_tokens(model, part))
        return [one.grad for one in module.parameters()]

    expected = Normalised()
    mean_over_tokens(expected, rows)[0].backward()
    for found in on_instances(3, 3, run):
        check_gradients(found, expected)


def test_a_loss_may_go_through_several_models(on_every_path):
    """The weight holds for the whole backward pass, also for terms that are added to the loss of the tokens."""

    def run(strategy):
        parts = new_model()[:2], new_model()[2:]
        modules, models = zip(*(distributed(strategy, part) for part in parts), strict=True)
        loss, tokens = mean_over_tokens(lambda x: models[1](models[0](x)), part_of(strategy, data()))
        models[0].weighted_backward(loss + sum(one.square().sum() for one in modules[0].parameters()), tokens)
        return [one.grad for module in modules for one in module.parameters()]

    expected = new_model()
    loss, _ = mean_over_tokens(expected, data())
    (loss + expected[0].weight.square().sum()).backward()
    for found in on_every_path(2, 2, run):
        check_gradients(found, expected, 1e-5)


def test_models_go_on_together_after_a_step_without_weight(on_instances):
    def run(strategy, has_empty_step):
        parts = new_model()[:2], new_model()[2:]
        modules, models = zip(*(distributed(strategy, part) for part in parts), strict=True)
        batch = part_of(strategy, data())
        for targets in (torch.full_like(batch["y"], IGNORED), batch["y"])[not has_empty_step :]:
            for module in modules:
                module.zero_grad()
            loss, tokens = mean_over_tokens(lambda x: models[1](models[0](x)), batch | {"y": targets})
            with pytest.raises(ZeroWeightError) if not tokens else nullcontext():
                models[0].weighted_backward(loss, tokens)
        return bits(nn.ParameterList([nn.Parameter(one.grad) for each in modules for one in each.parameters()]))

    after, without = (on_instances(2, 2, functools.partial(run, has_empty_step=each)) for each in (True, False))
    assert after == without


# ---- modules that state the weight


class Stating(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.model, self.recomputes = new_model(), recomputes

    def forward(self, x, y):
        loss, tokens = mean_over_tokens(self.model, {"x": x, "y": y})
        strategies.torch.loss_weight(tokens)
        return loss


@pytest.mark.parametrize("recomputes", [False, also(True)])
def test_a_module_may_state_the_weight_of_its_loss(on_instances, recomputes):
    def run(strategy):
        module, model = distributed(strategy, Stating())
        optimizer, batch = torch.optim.SGD(module.parameters(), LR), part_of(strategy, data())
        # Instances are threads here, and would put back the states of one generator: the model seeds it anyway.
        again = functools.partial(checkpoint, model, use_reentrant=False, preserve_rng_state=False)
        call = again if recomputes else model
        for _ in range(STEPS):
            model.eval()(batch["x"], batch["y"])  # states nothing for the training
            model.train()
            with torch.no_grad():
                model(batch["x"], batch["y"])
            optimizer.zero_grad()
            model.weighted_backward(call(batch["x"], batch["y"]))
            optimizer.step()
        return bits(module)

    assert on_instances(REPLICAS, REPLICAS, run) == [by_trainer()[0]] * REPLICAS


def test_a_stated_weight_serves_replicas_that_take_turns():
    module, model = distributed(strategies.IPUStrategy(REPLICAS), Stating())
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.backward(lambda rows: model(rows["x"], rows["y"]), data())
        optimizer.step()
    assert bits(module) == by_trainer()[0]


def test_a_stated_weight_is_not_forgotten():
    module, model = distributed(strategies.IPUStrategy(1), Stating())
    batch = data()
    with pytest.raises(StrategyError, match=r"stated .* call model\.weighted_backward\(loss\), not"):
        model(batch["x"], batch["y"]).backward()
    module.zero_grad()
    one, _ = (model(batch["x"], batch["y"]) for _ in range(2))
    with pytest.raises(StrategyError, match=r"weights were stated for one loss; give the weight: model\.weighted"):
        model.weighted_backward(one)
    model(batch["x"], batch["y"])  # its loss is dropped, its weight not yet
    with pytest.raises(StrategyError, match="2 weights were stated for one loss"):
        model.weighted_backward(model(batch["x"], batch["y"]))
    model.weighted_backward(model(batch["x"], batch["y"]))  # the error comes once


# ---- what is refused, on all instances


def refusals(strategy, attempt, error, match):
    module, model = distributed(strategy, new_model())
    batch = part_of(strategy, data())
    with pytest.raises(error, match=match):
        attempt(strategy, model, functools.partial(mean_over_tokens, model, batch))
    return module


def of_some(strategy, model, compute):
    loss, tokens = compute()
    model.weighted_backward(loss, tokens) if strategy.instance_index else loss.nan_to_num().backward()


def in_some_passes(strategy, model, compute):
    with model.no_sync():
        model.weighted_backward(*compute())
    compute()[0].backward()


def over_old_gradients(strategy, model, compute):
    for _ in range(2):
        model.weighted_backward(*compute())


@pytest.mark.parametrize(
    ("attempt", "match"),
    [
        (of_some, r"losses of the replicas \[0\] have no weight, and those of the others have one"),
        (in_some_passes, "some backward passes of a step have weights, .* and others have none"),
        (over_old_gradients, r"gradients of an earlier step are left, .* call optimizer\.zero_grad\(\)"),
    ],
)
def test_passes_without_a_weighted_mean_are_refused(on_every_path, attempt, match):
    on_every_path(2, 2, lambda strategy: refusals(strategy, attempt, StrategyError, match))


def grads_of(module):
    return [one.grad for one in module.parameters()]


def check_token_means(found):
    """Compare gradients of every instance with those of all tokens in one process."""
    expected = new_model()
    mean_over_tokens(expected, data())[0].backward()
    for own in found:
        for one, other in zip(own, grads_of(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_zero_grad_begins_a_step_again(on_instances, instances, set_to_none, fails):
    """After a batch that is given up, such as one that is too long, its weight does not count."""

    def fail(gradient):
        raise MemoryError

    def run(strategy):
        module, model = distributed(strategy, new_model())
        batch = part_of(strategy, data())
        with nullcontext() if fails else model.no_sync():
            loss, tokens = mean_over_tokens(model, batch)
            hook = module[0].weight.register_hook(fail) if fails else None
            with pytest.raises(MemoryError) if fails else nullcontext():
                model.weighted_backward(loss, tokens)
        if hook is not None:
            hook.remove()
        module.zero_grad(set_to_none)
        model.weighted_backward(*mean_over_tokens(model, batch))
        return grads_of(module)

    check_token_means(on_instances(instances, instances, run))


def clipped(module):
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


def partly_zeroed(module):
    module[0].zero_grad()


@pytest.mark.parametrize("change", [clipped, partly_zeroed])
def test_gradients_changed_between_weighted_passes_are_refused(change):
    module, model = distributed(strategies.IPUStrategy(1), new_model())
    rows = {name: array[3:] for name, array in data().items()}
    with model.no_sync():
        model.weighted_backward(*mean_over_tokens(model, rows))
    change(module)
    with pytest.raises(StrategyError, match=r"was changed between weighted backward passes .*optimizer\.zero_grad\(\)"):
        model.weighted_backward(*mean_over_tokens(model, rows))


def test_an_optimizer_refuses_sums_of_weighted_gradients():
    """Such sums remain at the end of an epoch whose micro-batches do not divide evenly."""
    (module, model), (other, _) = (distributed(strategies.IPUStrategy(1), new_model()) for _ in range(2))
    optimizer, of_other = (torch.optim.SGD(one.parameters(), LR) for one in (module, other))
    rows = {name: array[3:] for name, array in data().items()}
    with model.no_sync():
        model.weighted_backward(*mean_over_tokens(model, rows))
    of_other.step()
    with pytest.raises(StrategyError, match=r"SGD would use gradients that are sums of weighted gradients"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # without gradients
    assert bits(module) == bits(other)
    model.weighted_backward(*mean_over_tokens(model, rows))
    optimizer.step()
    check_close(module, alone(1)[0])


def test_a_micro_batch_whose_gradients_are_zero_counts():
    """A hinge loss has such micro-batches."""
    module, model = distributed(strategies.IPUStrategy(1), nn.Linear(1, 1))
    with model.no_sync():
        model.weighted_backward(model(torch.ones(2, 1)).sum() * 0, 3)
    model.weighted_backward(model(torch.ones(2, 1)).sum(), 1)
    assert [float(one) for one in grads_of(module)] == [0.5, 0.5]


def test_gradients_that_are_zero_are_no_obstacle():
    """`zero_grad(set_to_none=False)` leaves zeros."""
    module, model = distributed(strategies.IPUStrategy(1), new_model())
    for _ in range(2):
        module.zero_grad(set_to_none=False)
        model.weighted_backward(*mean_over_tokens(model, data()))
    expected = new_model()
    mean_over_tokens(expected, data())[0].backward()
    check_gradients([one.grad for one in module.parameters()], expected)


@pytest.mark.parametrize(
    ("weight", "error", "match"),
    [
        (None, ValueError, r"the loss has no weight; give it, as in model\.weighted_backward\(loss, tokens\)"),
        (torch.ones(2), TypeError, r"weight of the loss is torch.float32\[2\]; give a real scalar"),
        (np.float16(257), TypeError, r"weight of the loss is .*257.*, a float16; give a real scalar of 32 or 64 bits"),
        (-1.0, WeightError, "weight of a loss is negative or not finite at step 0"),
        (math.nan, WeightError, "weight of a loss is negative or not finite at step 0"),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_wrong_weights_are_refused(on_instances, replicas, weight, error, match):
    def attempt(strategy, model, compute):
        model.weighted_backward(compute()[0], weight)

    on_instances(replicas, replicas, lambda strategy: refusals(strategy, attempt, error, match))


def test_a_model_is_freed_after_a_loss_of_weight_zero():
    _, model = distributed(strategies.IPUStrategy(1), new_model())
    loss, _ = mean_over_tokens(model, data())
    with pytest.raises(ZeroWeightError):
        model.weighted_backward(loss, 0)
    parameter = weakref.ref(next(model.parameters()))
    del model, loss, _
    gc.collect()
    assert parameter() is None


@pytest.mark.parametrize("instances", [1, 2])
def test_float16_gradients_are_refused(on_instances, instances):
    def run(strategy):
        _, model = distributed(strategy, new_model(), gradient_transfer_dtype="float16")
        with pytest.raises(ValueError, match="travels as float16, which overflows when it is multiplied by large"):
            model.weighted_backward(*mean_over_tokens(model, part_of(strategy, data())))

    on_instances(instances, instances, run)


# ---- without weight


def without_weight(strategy, steps, **options):
    """Return the results of a loop whose second batch has no tokens."""
    module, model = distributed(strategy, nn.Sequential(new_model(), nn.BatchNorm1d(9)), **options)
    optimizer, told = torch.optim.SGD(module.parameters(), LR, 0.9), []
    for step in range(3):
        batch = part_of(strategy, data())
        if step == 1:
            batch["y"] = torch.full_like(batch["y"], IGNORED)
        optimizer.zero_grad()
        try:
            steps(model, batch)
        except ZeroWeightError as error:
            told.append(str(error))
            assert not any(one.grad.any() for one in module.parameters())
        else:
            optimizer.step()
            is_skipped = all(one.grad is None for one in module.parameters())
            assert is_skipped == (step == 1)
    return told, strategies.fingerprint([one.detach().numpy() for one in module.state_dict().values()])


def turns(model, batch):
    def of_rows(rows):
        loss, tokens = mean_over_tokens(model, rows)
        return strategies.Outcome(loss, weight=tokens)

    loss = model.backward(of_rows, batch)
    assert math.isnan(loss) == bool((batch["y"] == IGNORED).all())


def one_pass(model, batch):
    model.weighted_backward(*mean_over_tokens(model, batch))


def test_a_step_without_weight_is_an_error_on_all_instances_and_the_loop_goes_on(everywhere, on_every_path):
    found = everywhere(REPLICAS, lambda strategy: without_weight(strategy, turns))
    found += on_every_path(REPLICAS, REPLICAS, lambda strategy: without_weight(strategy, one_pass))
    assert all(each == found[0] for each in found)
    [told] = found[0][0]
    assert "all replicas and micro-batches have weight 0 at step 1" in told


def test_a_step_without_weight_is_skipped_if_so_told(everywhere, on_every_path):
    """Also momentum stays: an optimizer of PyTorch passes over parameters without a gradient."""

    def run(strategy, steps):
        return without_weight(strategy, steps, zero_weight="skip")

    _, expected = without_weight(strategies.IPUStrategy(REPLICAS), turns)
    found = everywhere(REPLICAS, lambda strategy: run(strategy, turns))
    found += on_every_path(REPLICAS, REPLICAS, lambda strategy: run(strategy, one_pass))
    assert found == [([], expected)] * len(found)


def test_lbfgs_makes_no_move_without_weight(on_instances):
    def run(strategy):
        module, model = distributed(strategy, new_model(), zero_weight="skip")
        optimizer = torch.optim.LBFGS(module.parameters())
        batch = part_of(strategy, data())
        batch["y"] = torch.full_like(batch["y"], IGNORED)

        def closure():
            loss, tokens = mean_over_tokens(model, batch)
            model.weighted_backward(loss, tokens)
            return loss

        assert math.isnan(optimizer.step(closure))
        return bits(module)

    assert on_instances(2, 2, run) == [bits(new_model())] * 2


def test_instances_agree_on_the_end_of_steps_without_weight(on_instances):
    def run(strategy):
        zero_weight = ("error", "skip")[strategy.instance_index]
        with pytest.raises(strategies.DisagreementError, match="zero_weight"):
            distributed(strategy, new_model(), zero_weight=zero_weight)

    on_instances(2, 2, run)
    with pytest.raises(ValueError, match="zero_weight is 'none'; use 'error' or 'skip'"):
        distributed(strategies.IPUStrategy(1), new_model(), zero_weight="none")


def test_an_instance_that_ends_early_has_no_weight_in_join(on_every_path):
    def run(strategy):
        module, model = distributed(strategy, new_model())
        batch = part_of(strategy, data())
        with model.join():
            for _ in range(1 + strategy.instance_index):
                module.zero_grad()
                model.weighted_backward(*mean_over_tokens(model, batch))
        return [one.grad for one in module.parameters()]

    expected = new_model()
    rows = {name: array[len(array) // 2 :] for name, array in data().items()}
    mean_over_tokens(expected, rows)[0].backward()
    check_gradients(on_every_path(2, 2, run)[1], expected)


def test_an_optimizer_that_looks_at_the_loss_gets_the_weighted_mean(on_instances):
    def run(strategy):
        module, model = distributed(strategy, new_model())
        optimizer, batch = torch.optim.LBFGS(module.parameters(), 0.1, max_iter=3), part_of(strategy, data())

        def closure():
            optimizer.zero_grad()
            loss, tokens = mean_over_tokens(model, batch)
            model.weighted_backward(loss, tokens)
            return loss

        return module, float(optimizer.step(closure))

    (module, loss), (other, _) = on_instances(2, 2, run)
    assert bits(module) == bits(other)
    assert loss == pytest.approx(mean_over_tokens(new_model(), data())[0].item(), rel=1e-6)


# ---- losses of instances


@pytest.mark.parametrize("weight", [None, 0.0, 2.5])
def test_a_late_instance_hears_the_mean_weight(on_instances, weight):
    """So it raises as the others do, if all weights are 0."""
    means = MeanPassResult(3.0, {"weight": torch.ones(1, 2)}, {}, weight)

    def run(strategy):
        _, model = distributed(strategy, nn.Linear(2, 1, bias=False))
        return model._averaging.shared(means if strategy.instance_index == 1 else None, 1)

    for found in on_instances(2, 2, run):
        assert (found.loss, found.weight) == (3.0, weight)


@pytest.mark.parametrize(("count", "lost"), [(2, 1), also(4, 0)])
def test_a_loop_with_weights_survives_a_loss_at_every_event_of_a_step(count, lost):
    def program(strategy):
        module, model = distributed(strategy, new_model())
        optimizer = torch.optim.SGD(module.parameters(), LR)
        dataset = strategies.torch.distribute_dataset(strategy, data(), batch_size=3)
        for batch in dataset.epoch(0):
            optimizer.zero_grad()
            turns(model, batch)
            optimizer.step()
        return bits(module)

    expected = program(strategies.IPUStrategy(REPLICAS))
    counted = Events(lost, 1)
    assert run_losing(count, REPLICAS, program, "ring", counted) == [expected] * count
    for number in range(len(counted.seen)):
        found = run_losing(count, REPLICAS, program, "ring", Events(lost, 1, number))
        assert found == [None if rank == lost else expected for rank in range(count)], counted.seen[number]
