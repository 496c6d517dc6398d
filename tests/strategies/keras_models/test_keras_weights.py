"""Masks and sample weights of Keras models: the training of stock Keras with the rows of all replicas."""

from functools import partial

import jax
import keras
import numpy as np
import pytest
from keras import layers
from small_models import AddsLoss, bits_of, dense, largest_difference, values_of
from tiers import also, first_of, only

from strategies.errors import StrategyError, WeightError

REPLICAS, ROWS, TIME = 4, 32, 5
RNG = np.random.default_rng(8)
LENGTHS = RNG.integers(1, TIME + 1, ROWS)
LENGTHS[:4] = 0  # replica 0 begins with rows that are all masked
TOKENS = np.where(np.arange(TIME) < LENGTHS[:, None], RNG.integers(1, 7, (ROWS, TIME)), 0)
TAGS = RNG.integers(0, 3, (ROWS, TIME))
OF_TOKENS = RNG.uniform(0, 2, (ROWS, TIME)).astype(np.float32)
OF_ROWS = RNG.uniform(0, 2, ROWS).astype(np.float32)
OF_ROWS[8:12] = 0  # a replica without weight
LABELS = RNG.integers(0, 2, (ROWS, 1))
X = RNG.standard_normal((ROWS, 6)).astype(np.float32)

Tags = partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
Labels = partial(keras.losses.BinaryCrossentropy, from_logits=True)


class AddsLossToMasked(AddsLoss):
    def __init__(self, **named):
        super().__init__(**named)
        self.supports_masking = True


def tagger(loss=Tags, added=False, kind=keras.Sequential, optimizer=None, **named):
    embedding = layers.Embedding(7, 4, keras.initializers.RandomNormal(seed=1), mask_zero=True)
    own = [AddsLossToMasked()] if added else []
    model = kind([keras.Input((TIME,)), embedding, dense(6, 2, activation="tanh", **named), *own, dense(3, 3)])
    model.compile(optimizer or keras.optimizers.Adam(0.05), loss())
    return model


def of_rows(loss):
    model = keras.Sequential([keras.Input((6,)), dense(5, 1, activation="tanh"), dense(1, 2)])
    model.compile(keras.optimizers.Adam(0.05), loss())
    return model


def two_outputs(of_tags="sum_over_batch_size", optimizer=None):
    given, x = keras.Input((TIME,), name="tokens"), keras.Input((6,), name="x")
    tags = dense(3, 3, name="tags")(
        layers.Embedding(7, 4, keras.initializers.RandomNormal(seed=1), mask_zero=True)(given)
    )
    model = keras.Model([given, x], {"tags": tags, "label": dense(1, 2, name="label")(x)})
    losses = {"tags": Tags(reduction=of_tags), "label": Labels(reduction="mean_with_sample_weight")}
    model.compile(optimizer or keras.optimizers.Adam(0.05), losses, loss_weights={"tags": 1.0, "label": 0.5})
    return model


class OwnLoss(keras.Sequential):
    """A model that adds a mean over all tokens to a mean over those of the mask."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(y_pred**2)


class OwnStep(keras.Sequential):
    def train_step(self, state, data):
        trained, others, of_optimizer, of_metrics = state
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        gradients_of = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, _, others, _)), gradients = gradients_of(
            trained, others, of_metrics, x, y, weights, training=True, optimizer_variables=of_optimizer
        )
        trained, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trained)
        return {"loss": loss}, (trained, others, of_optimizer, of_metrics)


def added_up(make=tagger, **named):
    """Make a model with a sum as loss; the optimizer shows the size of the gradients, as Adam does not."""
    return make(optimizer=keras.optimizers.SGD(0.01), **named)


OfTokens = partial(Tags, reduction="sum")
WEIGHTED = "mean_with_sample_weight"
TOKENS_AND_TAGS = {"x": TOKENS, "y": TAGS}
CASES = {
    "mask": (tagger, TOKENS_AND_TAGS),
    "mask and weights of tokens": (tagger, {**TOKENS_AND_TAGS, "sample_weight": OF_TOKENS}),
    "mask and mean with weights": (
        lambda: tagger(partial(Tags, reduction=WEIGHTED)),
        {**TOKENS_AND_TAGS, "sample_weight": OF_TOKENS},
    ),
    "mask and regularizer": (lambda: tagger(kernel_regularizer="l2"), TOKENS_AND_TAGS),
    "mask and added loss": (lambda: tagger(added=True), TOKENS_AND_TAGS),
    "mask and activity regularizer": (lambda: tagger(activity_regularizer="l2"), TOKENS_AND_TAGS),
    "mask and own loss": (lambda: tagger(kind=OwnLoss), TOKENS_AND_TAGS),
    "mask and own step": (lambda: tagger(kind=OwnStep), TOKENS_AND_TAGS),
    "nothing but masks": (tagger, {"x": 0 * TOKENS, "y": TAGS}),
    "two outputs": (two_outputs, {"x": {"tokens": TOKENS, "x": X}, "y": {"tags": TAGS, "label": LABELS}}),
    "mean over weights": (
        lambda: of_rows(partial(Labels, reduction=WEIGHTED)),
        {"x": X, "y": LABELS, "sample_weight": OF_ROWS},
    ),
    "mean over weights of classes": (
        lambda: of_rows(partial(Labels, reduction=WEIGHTED)),
        {"x": X, "y": LABELS, "class_weight": {0: 0.3, 1: 2.0}},
    ),
    "sum": (lambda: added_up(loss=OfTokens, kernel_regularizer="l2"), {**TOKENS_AND_TAGS, "sample_weight": OF_TOKENS}),
    "sum in own step": (lambda: added_up(loss=OfTokens, kind=OwnStep), TOKENS_AND_TAGS),
    "sum and mean over weights": (
        lambda: added_up(two_outputs, of_tags="sum"),
        {
            "x": {"tokens": TOKENS, "x": X},
            "y": {"tags": TAGS, "label": LABELS},
            "sample_weight": {"tags": OF_TOKENS, "label": OF_ROWS},
        },
    ),
    "scaled by the optimizer": (
        lambda: tagger(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=64.0)),
        TOKENS_AND_TAGS,
    ),
    "mean over rows": (lambda: of_rows(Labels), {"x": X, "y": LABELS, "sample_weight": OF_ROWS}),
}


def trained(name, batch_size, prepare=lambda model: model):
    make, given = CASES[name]
    model = prepare(make())
    history = model.fit(**given, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    return model, history


def check(name, ours, batch_size=16):
    stock, wanted = trained(name, batch_size)
    model, history = ours
    assert largest_difference(values_of(model), values_of(stock)) < 1e-5
    assert {each: pytest.approx(values, rel=1e-5) for each, values in wanted.items()} == history


@pytest.mark.parametrize("name", only(["mask and added loss", "mean over weights", "sum"], CASES))
def test_training_is_that_of_stock_keras_with_the_rows_of_all_replicas(in_scopes, name):
    found = in_scopes(2, lambda strategy: trained(name, 4))
    check(name, found[0])
    assert bits_of(found[0][0]) == bits_of(found[1][0])


@pytest.mark.parametrize("name", first_of(["mask", "two outputs", "mean over weights", "mask and own step", "sum"]))
def test_the_bits_are_the_same_for_every_number_of_instances(in_scopes, name):
    def run(strategy):
        model, history = trained(name, 4)
        return bits_of(model), history

    [one] = in_scopes(1, run)
    for instances in (2, 4):
        assert in_scopes(instances, run) == [one] * instances


def accumulating(model):
    model.set_gradient_accumulation_options(4, gradient_accumulation_reduction_method="mean")
    return model


def staged(model):
    model.set_pipelining_options(4, gradient_accumulation_reduction_method="mean")
    model.set_pipeline_stage_assignment([0, 0, 1])
    return model


@pytest.mark.parametrize(("prepare", "devices"), [also(accumulating, 1), (staged, 2)])
def test_micro_batches_count_with_their_tokens(in_scopes, prepare, devices):
    found = in_scopes(2, lambda strategy: trained("mask", 2, prepare), ipus_per_replica=devices)
    check("mask", found[0], batch_size=32)


@pytest.mark.complete
@pytest.mark.parametrize(("prepare", "devices"), [(accumulating, 1), (staged, 2)])
def test_a_sum_is_averaged_over_micro_batches_as_stock_keras_does(in_scopes, prepare, devices):
    found = in_scopes(2, lambda strategy: trained("sum", 2, prepare), ipus_per_replica=devices)
    accumulates = keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)
    stock = tagger(OfTokens, kernel_regularizer="l2", optimizer=accumulates)
    wanted = stock.fit(**CASES["sum"][1], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    for model, history in found:
        assert largest_difference(values_of(model), values_of(stock)) < 1e-5
        assert history["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.complete
def test_train_on_batch_weights_rows_of_all_replicas(alone):
    make, given = CASES["mean over weights"]
    stock = make()
    wanted = [float(stock.train_on_batch(**given)) for _ in range(2)]

    def run(strategy):
        model = make()
        return [float(model.train_on_batch(**given)) for _ in range(2)], values_of(model)

    losses, values = alone(run)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert largest_difference(values, values_of(stock)) < 1e-5


def test_batches_with_and_without_weights_may_alternate(alone):
    make, given = CASES["mean over weights"]
    unweighted = {name: given[name] for name in ("x", "y")}

    def run(strategy=None):
        model = make()
        for batch in (unweighted, given, unweighted):
            model.train_on_batch(**batch)
        return values_of(model)

    assert largest_difference(alone(run), run()) < 1e-5


def test_several_parts_of_a_loss_with_micro_batches_are_refused(alone):
    def run(strategy):
        with pytest.raises(StrategyError, match="such a loss must be the only one: leave added losses"):
            trained("mask and added loss", 4, accumulating)

    alone(run)


def test_weights_with_a_negative_sum_are_refused_on_all_instances(in_scopes):
    make, given = CASES["mean over weights"]

    def run(strategy):
        with pytest.raises(WeightError, match="negative or not finite"):
            make().fit(**{**given, "sample_weight": -OF_ROWS}, batch_size=4, verbose=0)

    in_scopes(2, run)
