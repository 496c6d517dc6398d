"""Custom `train_step` methods for JAX, as in Keras's guides: each replica runs them, on mean gradients."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from small_models import TARGETS, X, bits_of, dense

import strategies
from strategies.errors import StrategyError

FIT = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}


class OfTheGuide(keras.Sequential):
    """The model of https://keras.io/guides/custom_train_step_in_jax"""

    def train_step(self, state, data):
        trainable, non_trainable, of_optimizer, metrics = state
        x, y = data
        gradients_of = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, y_pred, non_trainable, metrics)), grads = gradients_of(
            trainable, non_trainable, metrics, x, y, None, training=True, optimizer_variables=of_optimizer
        )
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
        logs, new = {}, []
        for metric in self.metrics:
            own = metrics[len(new) : len(new) + len(metric.variables)]
            own = metric.stateless_update_state(own, *((loss,) if metric.name == "loss" else (y, y_pred)))
            logs[metric.name] = metric.stateless_result(own)
            new += own
        return logs, (trainable, non_trainable, of_optimizer, new)


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, moments):
        mean, log_variance = moments
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Autoencoder(keras.Model):
    """A variational autoencoder with loss trackers of its own, and a log that is no metric."""

    def __init__(self):
        super().__init__()
        self.hidden, self.mean, self.log_variance = dense(4, 1, activation="relu"), dense(2, 2), dense(2, 3)
        self.sampling, self.decoder = Sampling(), dense(6, 4)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [self.total]

    def call(self, x):
        hidden = self.hidden(x)
        moments = self.mean(hidden), self.log_variance(hidden)
        return (*moments, self.decoder(self.sampling(moments)))

    def train_step(self, state, x):
        trainable, non_trainable, of_optimizer, metrics = state

        def loss_of(trainable, non_trainable):
            (mean, log_variance, made), new = self.stateless_call(trainable, non_trainable, x)
            divergence = -0.5 * ops.mean(1 + log_variance - mean**2 - ops.exp(log_variance))
            return ops.mean((made - x) ** 2) + divergence, (new, divergence)

        (loss, (non_trainable, divergence)), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable, non_trainable)
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
        metrics = self.total.stateless_update_state(metrics, loss)
        logs = {"total": self.total.stateless_result(metrics), "divergence": divergence}
        return logs, (trainable, non_trainable, of_optimizer, metrics)


class Adversaries(keras.Model):
    """A generator, and a critic that its own optimizer trains before the generator."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((1,)), dense(6, 1)])
        self.critic = keras.Sequential([keras.Input((6,)), dense(3, 2, activation="tanh"), dense(1, 3)])
        self.of_critic = keras.optimizers.Adam(0.02)
        self.of_critic.build(self.critic.trainable_variables)
        self.kept = self.of_critic.variables  # non-trainable variables of the model
        generators = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, clipnorm=1.0), initial_scale=1.0)
        generators.build(self.generator.trainable_variables)
        self.compile(generators)
        self.built = True

    @property
    def metrics(self):
        return []

    def call(self, noise):
        return self.critic(self.generator(noise))

    def train_step(self, state, data):
        trainable, non_trainable, of_optimizer, metrics = state
        noise, real = data[1], data[0]
        count = len(self.generator.trainable_variables)
        generator, critic = trainable[:count], trainable[count:]

        def said(critic, generator, values=None):
            values = self.generator.stateless_call(generator, [], noise)[0] if values is None else values
            return ops.mean(self.critic.stateless_call(critic, [], values)[0])

        of_critic, grads = jax.value_and_grad(lambda own: said(own, generator) - said(own, None, real))(critic)
        critic, non_trainable = self.of_critic.stateless_apply(non_trainable, grads, critic)
        of_generator, grads = jax.value_and_grad(lambda own: -said(critic, own))(generator)
        generator, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, generator)
        logs = {"critic": of_critic, "generator": of_generator}
        return logs, ([*generator, *critic], non_trainable, of_optimizer, metrics)


def of_the_guide(kind=OfTheGuide):
    hidden = [dense(5, 1, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3, seed=3)]
    model = kind([keras.Input((6,)), *hidden, dense(1, 2)])
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse", metrics=["mae"], steps_per_execution=2)
    return model, (X, TARGETS)


def autoencoder():
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.01))
    return model, (X[:48],)


class WithoutMetrics(keras.Sequential):
    """A model whose step returns a loss under the name of Keras's own metric, which it does not update."""

    def train_step(self, state, data):
        trainable, non_trainable, of_optimizer, metrics = state

        def loss_of(trainable):
            made, _ = self.stateless_call(trainable, non_trainable, data[0])
            return ops.mean((made - data[1]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(trainable)
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
        return {"loss": loss, "root": ops.sqrt(loss)}, (trainable, non_trainable, of_optimizer, metrics)


def without_metrics():
    model = WithoutMetrics([keras.Input((6,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, (X[:48], TARGETS[:48])


def adversaries():
    return Adversaries(), (X[:48], TARGETS[:48])


def trained(make):
    model, data = make()
    history = model.fit(*data, **FIT).history
    return history, bits_of(model)


MODELS = (of_the_guide, autoencoder, adversaries, without_metrics)


@pytest.mark.parametrize("make", MODELS)
def test_an_own_train_step_has_the_bits_of_keras_on_one_replica(alone, make):
    def program(strategy):
        return trained(make)

    model, data = make()
    history = model.fit(*data, **FIT).history
    assert alone(program, replicas=1) == (history, bits_of(model))


@pytest.mark.parametrize("make", MODELS)
def test_an_own_train_step_has_the_same_bits_for_every_number_of_instances(in_scopes, make):
    def program(strategy):
        return trained(make)

    [one] = in_scopes(1, program)
    assert in_scopes(2, program) == [one] * 2


def test_an_own_train_step_is_trained_with_the_mean_of_all_rows(alone):
    """A linear model makes the step of stock Keras with the rows of all replicas in a batch."""

    def model_of(kind):
        model = kind([keras.Input((6,)), dense(1, 2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    def program(strategy):
        model = model_of(OfTheGuide)
        history = model.fit(X[:48], TARGETS[:48], **FIT).history
        return model.get_weights(), history["loss"], model.evaluate(X, TARGETS, verbose=0)

    weights, losses, evaluated = alone(program)
    stock = model_of(keras.Sequential)
    history = stock.fit(X[:48], TARGETS[:48], **FIT | {"batch_size": 16}).history
    for found, wanted in zip(weights, stock.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses, history["loss"], rtol=1e-5)
    np.testing.assert_allclose(evaluated, stock.evaluate(X, TARGETS, verbose=0), rtol=1e-5)


def test_an_own_train_step_takes_single_batches_and_callbacks(in_scopes):
    def program(strategy):
        model, data = of_the_guide()[0], (X[:48], TARGETS[:48])
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
        model.fit(*data, **FIT, callbacks=[rates, stopping])
        logs = model.train_on_batch(X[:8], TARGETS[:8], return_dict=True)
        return sorted(logs), bits_of(model)

    [one] = in_scopes(1, program)
    assert one[0] == ["loss", "mae"]
    assert in_scopes(2, program) == [one] * 2


def by_hand(self, state, data):
    logs, (trainable, *others) = OfTheGuide.train_step(self, state, data)
    return logs, ([value - 0.1 * data[1].mean() for value in trainable], *others)


class ByHand(OfTheGuide):
    train_step = by_hand


class ForTensorFlow(keras.Sequential):
    def train_step(self, data):
        return {}


def test_a_step_that_changes_variables_by_the_rows_of_a_replica_is_refused(alone):
    with pytest.raises(StrategyError, match=r"train_step computes '.*kernel' from the rows .* use stateless_apply"):
        alone(lambda strategy: trained(lambda: of_the_guide(ByHand)))


def test_batches_of_another_size_get_the_step_that_was_looked_at(in_scopes):
    """Another step of the class, which would be refused, is for the next `compile`."""

    def program(strategy):
        class Own(OfTheGuide):
            pass

        model, data = of_the_guide(Own)[0], (X[:16], TARGETS[:16])
        model.fit(*data, **FIT)
        Own.train_step = by_hand
        model.fit(*data, **FIT | {"batch_size": 2})
        return bits_of(model)

    [one] = in_scopes(1, program)
    assert in_scopes(2, program) == [one] * 2


def test_a_step_of_one_model_is_refused_beside_an_own_step_of_its_class(alone):
    def program(strategy):
        model, data = of_the_guide()
        model.fit(*data, **FIT)
        model.train_step = lambda state, data: ({}, state)
        model.fit(*data, **FIT | {"batch_size": 2})

    with pytest.raises(RuntimeError, match="overrides train_step.*give a class of models its own train_step"):
        alone(program)


def test_a_step_that_is_written_for_another_backend_is_refused(alone):
    with pytest.raises(RuntimeError, match=r"train_step takes \(self, data\), .* called with \(state, data\)"):
        alone(lambda strategy: trained(lambda: of_the_guide(ForTensorFlow)))


def test_options_of_the_step_are_refused_beside_an_own_train_step(alone, tmp_path):
    def program(strategy):
        model, data = of_the_guide()
        with pytest.raises(RuntimeError, match="has strategies.keras.Checkpoints"):
            model.fit(*data, **FIT, callbacks=[strategies.keras.Checkpoints(tmp_path)])
        model.set_gradient_accumulation_options(2)
        for use in (model.fit, model.train_on_batch):
            with pytest.raises(RuntimeError, match="has set_gradient_accumulation_options, .* leave one of them out"):
                use(*data)

    alone(program)
