"""Models and optimizers of Keras in functions of `strategy.run`, as in programs of the original."""

import importlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from small_models import TARGETS, X, bits_of, largest_difference, regression, values_of

import strategies
from strategies import InfeedMode, InfeedQueue, loops
from strategies.errors import StrategyError

ROWS = 2
ELEMENTS = [(X[start : start + ROWS], TARGETS[start : start + ROWS]) for start in range(0, 48, ROWS)]


def one_weight():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])


def test_the_next_run_uses_newly_set_weights(alone):
    def program(strategy):
        model, traces = one_weight(), []

        def function(x):
            traces.append(1)
            return model(x)

        found = []
        for weight in (1, -1):
            model.set_weights([np.float32([[weight]])])
            found.append(float(strategy.run(function, (np.float32([[2.5]]),)).values[0][0, 0]))
        return found, len(traces)

    assert alone(program, 2) == ([2.5, -2.5], 1)


def test_a_loop_called_from_python_uses_newly_set_weights(alone):
    def program(strategy):
        model, found = one_weight(), []
        for weight in (1, 3):
            model.set_weights([np.float32([[weight]])])
            found.append(float(loops.repeat(2, model, [np.float32([[1]])])[0, 0]))
        return found

    assert alone(program, 1) == [1, 9]


def training(model, optimizer, steps):
    """Return a step function of a program that trains without `fit`."""

    def loss_of(values, x, y):
        others = [variable.value for variable in model.non_trainable_variables]
        predicted, _ = model.stateless_call(values, others, x)
        return jnp.mean((predicted - y) ** 2)

    def train(iterator):
        for _ in range(steps):
            x, y = next(iterator)
            values = [variable.value for variable in model.trainable_variables]
            loss, gradients = jax.value_and_grad(loss_of)(values, x, y)
            optimizer.apply(gradients, model.trainable_variables)
        return loss

    return train


def trained(strategy, make=lambda: keras.optimizers.Adam(0.05)):
    model = regression(make())
    iterator = iter(InfeedQueue(ELEMENTS, mode=InfeedMode.WHOLE))
    train = training(model, model.optimizer, 2)
    losses = [strategy.reduce("mean", strategy.run(train, (iterator,))) for _ in range(3)]
    return values_of(model), bits_of(model), [float(loss) for loss in losses]


def test_an_optimizer_applies_the_mean_with_the_same_bits_on_any_number_of_instances(in_scopes):
    alone, *both = in_scopes(1, trained), *in_scopes(2, trained)
    assert [one[1:] for one in both] == [alone[0][1:]] * 2
    stock = regression(keras.optimizers.Adam(0.05))
    stock.fit(X[:48], TARGETS[:48], batch_size=4 * ROWS, epochs=1, shuffle=False, verbose=0)
    assert largest_difference(alone[0][0], values_of(stock)) < 1e-6


def test_the_optimizer_state_continues_between_runs(alone):
    def program(strategy):
        model = one_weight()
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)

        def push():
            optimizer.apply([jnp.ones((1, 1))], model.trainable_variables)

        for _ in range(2):
            strategy.run(push)
        return float(model.get_weights()[0][0, 0]), int(optimizer.iterations.value)

    assert alone(program, 2) == (1 - 1 - 1.5, 2)


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)


@pytest.mark.parametrize("wrap", [lambda inner: inner, scaled])
def test_an_optimizer_without_state_applies_the_mean(alone, wrap):
    """Adam's first step has the length of its rate: replicas with gradients of opposite signs move by the mean."""

    def program(strategy):
        weight = keras.Variable(np.zeros(1, np.float32))
        optimizer = wrap(keras.optimizers.Adam(0.125))
        optimizer.build([weight])

        def moved(gradient):
            state = [variable.value for variable in optimizer.variables]
            return optimizer.stateless_apply(state, [gradient], [weight.value])[0][0]

        gradients = strategy.per_replica(lambda replica: np.array([[-1.0, 3.0][replica]], np.float32))
        return [float(one[0]) for one in strategy.run(moved, (gradients,)).values]

    assert alone(program, 2) == [pytest.approx(-0.125, rel=1e-5)] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moving_means_are_averaged_over_replicas(in_scopes, dtype):
    def program(strategy):
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0, dtype=dtype)])
        own = strategy.per_replica(lambda replica: np.full((4, 1), replica, np.float32))
        strategy.run(lambda x: model(x, training=True), (own,))
        return [float(value[0]) for value in model.get_weights()[2:]]

    assert in_scopes(1, program) + in_scopes(2, program) == [[1.5, 0.0]] * 3


@pytest.mark.parametrize(
    ("kind", "expected"), [(keras.metrics.Sum, [36.8, 24]), (keras.metrics.Mean, [36.8, 24, 24, 16])]
)
def test_metrics_add_over_replicas_with_the_same_bits_on_any_number_of_instances(in_scopes, kind, expected):
    """Equal updates of all replicas count as often as there are replicas."""

    def program(strategy):
        metric, equal = kind(), kind()
        values = strategy.per_replica(lambda replica: np.float32([replica, 2 * replica, 0.1]))

        def update(values):
            metric.update_state(values)
            equal.update_state([1.0, 2.0])

        for _ in range(2):
            strategy.run(update, (values,))
        read = strategy.run(lambda: 1 * metric.variables[0].value)
        found = [np.asarray(variable.value).tolist() for one in (metric, equal) for variable in one.variables]
        return found, {float(value) for value in read.values} == {found[0]}

    alone, *others = [*in_scopes(1, program), *in_scopes(2, program), *in_scopes(4, program)]
    assert others == [alone] * 6
    assert alone == (pytest.approx(expected), True)


def test_a_metric_that_is_reset_in_a_function_has_the_sum_since_then(alone):
    def program(strategy):
        metric = keras.metrics.Sum()

        def update():
            metric.reset_state()
            metric.update_state([1.0])

        for _ in range(2):
            strategy.run(update)
        return float(metric.result())

    assert alone(program) == 4.0


def test_a_variable_that_is_summed_but_of_no_metric_is_refused(alone):
    def program(strategy):
        counter = keras.Variable(0.0, aggregation="sum", name="counter")
        with pytest.raises(StrategyError, match="'counter' has aggregation='sum'"):
            strategy.run(lambda: counter.assign_add(1.0))
        return float(counter.value)

    assert alone(program) == 0.0


def test_replicas_drop_different_units_and_instances_begin_equal(in_scopes):
    def program(strategy):
        kernel = keras.initializers.Constant(1.0 + strategy.instance_index)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1, kernel_initializer=kernel)]
        )
        found = strategy.run(lambda x: model(x, training=True), (np.ones((1, 64), np.float32),))
        return strategy.gather(found, 0).ravel().tolist(), strategies.fingerprint(values_of(model))

    alone, *both = in_scopes(1, program), *in_scopes(2, program)
    assert both == alone * 2
    assert len(set(alone[0][0])) > 1


def test_values_of_a_program_do_not_stay_in_the_variables(alone):
    def program(strategy):
        model = one_weight()

        def fails(x):
            model.layers[0].kernel.assign(x)
            raise ValueError("after an assignment")

        with pytest.raises(ValueError, match="after an assignment"):
            strategy.run(fails, (np.float32([[7]]),))
        return model.get_weights()[0].tolist()

    assert alone(program, 1) == [[1.0]]


def test_a_model_read_by_a_trainer_must_not_change(alone):
    import optax

    def program(strategy):
        model = one_weight()
        trainer = strategies.Trainer(strategy, lambda v, x, key: ((model(x) - v) ** 2).mean(), optax.sgd(0.1))
        state, batch = trainer.init(np.zeros(1, np.float32)), np.ones((1, 1), np.float32)
        state, _ = trainer.step(state, batch)
        model.set_weights([np.float32([[2]])])
        with pytest.raises(RuntimeError, match="reads model, variable .*kernel, which .* has changed"):
            trainer.step(state, batch)

    alone(program, 1)


def test_the_first_run_builds_equal_models_on_all_instances(in_scopes):
    def program(strategy):
        model = keras.Sequential([keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform())])
        found = [strategy.gather(strategy.run(model, (np.ones((1, 2), np.float32),)), 0) for _ in range(2)]
        assert found[0].tolist() == found[1].tolist()
        np.testing.assert_allclose(found[0], np.ones((2, 2)) @ model.get_weights()[0], rtol=1e-6)
        return found[0].tolist()

    one, other = in_scopes(2, program, 2)
    assert one == other


def test_assigning_a_variable_in_a_loop_of_jax_is_refused(alone):
    def program(strategy):
        model = one_weight()
        optimizer = keras.optimizers.SGD(1.0)

        def body(count):
            optimizer.apply([jnp.ones((1, 1))], model.trainable_variables)
            return count + 1

        with pytest.raises(RuntimeError, match="was assigned inside a loop or branch of JAX"):
            strategy.run(lambda: loops.repeat(3, body, [0.0]))
        return model.get_weights()[0].tolist(), int(optimizer.iterations.value)

    assert alone(program, 1) == ([[1.0]], 0)


@pytest.mark.parametrize("make", [one_weight, keras.optimizers.SGD], ids=["model", "optimizer"])
def test_an_object_of_keras_among_the_arguments_is_refused_with_a_way_out(make):
    with pytest.raises(TypeError, match="leave it out of the arguments, and use it in the function by its name"):
        strategies.IPUStrategy(1).run(lambda x, thing: x, args=[np.float32(1), make()])


def test_the_layer_that_marks_values_has_the_name_of_the_original():
    assert importlib.import_module("popdist.compat.ipu.keras.layers").RecomputationCheckpoint()(np.ones(2)).shape == (
        2,
    )
