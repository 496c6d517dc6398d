"""Arguments that a Trainer cannot use: one sentence refuses them with a way out, and the Trainer stays usable."""

import re
import types
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import Trainer

POINTS = np.ones((8, 3), np.float32)
BATCH = {"x": POINTS, "y": np.ones(8, np.float32)}
REBIND = re.escape("rebind it: state, metrics = trainer.step(state, batch)")


def error_of(variables, batch, key):
    return jnp.mean((batch["x"] @ variables["w"] - batch["y"]) ** 2)


def made(strategy, loss_fn=error_of, optimizer=None):
    trainer = Trainer(strategy, loss_fn, optimizer or optax.sgd(0.1, momentum=0.9))
    return trainer, trainer.init({"w": jnp.ones(3)})


def refused(strategy, loss_fn, error, words):
    trainer, state = made(strategy, loss_fn)
    with pytest.raises(error, match=words) as caught:
        trainer.step(state, BATCH)
    assert trainer.init({"w": jnp.ones(3)}).step == 0
    return caught.value


class TestAUsedUpState:
    @pytest.fixture
    def used_up(self, strategy):
        """Provide a trainer, a used-up state of step 2, and the state after it."""
        trainer, state = made(strategy)
        for _ in range(3):
            before, (state, _) = state, trainer.step(state, BATCH)
        jax.block_until_ready(state.variables)
        for leaf in jax.tree.leaves(before.variables):
            leaf.delete()  # the update deletes it once XLA is done with it
        return trainer, before, state

    def test_a_used_up_state_is_refused_and_training_can_continue(self, used_up):
        trainer, before, state = used_up
        with pytest.raises(ValueError, match=f"this state was used up by step 2; {REBIND}"):
            trainer.step(before, BATCH)
        assert trainer.step(state, BATCH)[0].step == 4

    @pytest.mark.parametrize("count", [1, 2])
    def test_run_refuses_a_used_up_state(self, used_up, count):
        trainer, before, _ = used_up
        with pytest.raises(ValueError, match="this state was used up by step 2"):
            trainer.run(before, [BATCH] * count, steps_per_execution=count)

    def test_fused_steps_refuse_a_used_up_state(self):
        trainer, state = made(strategies.IPUStrategy(1))
        batches = [{"x": POINTS[:1], "y": BATCH["y"][:1]}] * 4
        after, _ = trainer.run(state, batches, steps_per_execution=2)
        for leaf in jax.tree.leaves(state.variables):
            leaf.delete()
        with pytest.raises(ValueError, match="this state was used up by step 0"):
            trainer.run(state, batches, steps_per_execution=2)
        assert trainer.run(after, batches, steps_per_execution=2)[0].step == 8

    def test_variables_of_a_used_up_state_are_refused(self, used_up):
        trainer, before, _ = used_up
        with pytest.raises(ValueError, match="a step has used up these variables; give init a copy"):
            trainer.init(before.variables)

    def test_a_value_that_is_no_state_is_refused(self, strategy):
        trainer, state = made(strategy)
        with pytest.raises(TypeError, match="the state is of type tuple; .*: state, metrics = trainer"):
            trainer.step(trainer.step(state, BATCH), BATCH)
        with pytest.raises(TypeError, match="the state is of type dict"):
            trainer.step({"w": jnp.ones(3)}, BATCH)


class TestMetrics:
    @pytest.mark.parametrize(
        ("metric", "words"),
        [
            (
                jnp.ones(3),
                r"'m' is of shape \[3\], but metrics are scalars, .*; take jnp.mean of it, and send whole",
            ),
            ({"a": 1.0}, "metric 'm' is a dict, but metrics are scalars; give each of its values a name of its own"),
            ([1.0, 2.0], "metric 'm' is a list, but metrics are scalars"),
            ("good", r"the loss function returns .*'good'.*; it must return the loss, or the loss and a dictionary"),
        ],
    )
    def test_metrics_that_are_no_scalars_are_refused(self, strategy, metric, words):
        refused(strategy, lambda *given: (error_of(*given), {"m": metric}), TypeError, words)

    def test_metrics_in_another_mapping_are_refused(self, strategy):
        trainer, state = made(strategy, lambda *given: (error_of(*given), types.MappingProxyType({"m": 2.0})))
        with pytest.raises(TypeError, match="a dictionary of metrics"):  # JAX does not know the type inside
            trainer.step(state, BATCH)


@partial(jax.tree_util.register_dataclass, data_fields=["weights", "activation"], meta_fields=[])
@dataclass
class Module:
    """A model in the style of Equinox, whose functions are leaves."""

    weights: object
    activation: object


class TestVariables:
    @pytest.mark.parametrize(
        ("variables", "error", "words"),
        [
            (
                Module(jnp.ones(3), jax.nn.relu),
                TypeError,
                r"variable \.activation is of type custom_jvp, which is not an array",
            ),
            (Module(jnp.ones(3), "relu"), TypeError, r"variable \.activation is of type str, which is not an array"),
            (Module(jnp.ones(3), "float32"), TypeError, "of type str"),  # the name of a dtype
            (Module(jnp.ones(3), np.float32), TypeError, "of type type"),
            (object(), TypeError, "the pytree of variables is of type object, which is not an array"),
            ({"w": [1.0, object()]}, TypeError, r"variable \['w'\]\[1\] is of type object"),
            (Module(jnp.ones(3), 3), TypeError, r"variable \.activation is of dtype int32, but only floating-point"),
            (
                Module(jnp.ones(3), jax.random.key(0)),
                TypeError,
                r"\.activation is of dtype key<fry>, but only floating",
            ),
            (None, ValueError, "None has no variable"),
            ({}, ValueError, r"{} has no variable"),
        ],
    )
    def test_variables_that_are_no_arrays_are_refused(self, strategy, variables, error, words):
        with pytest.raises(error, match=f"{words}.*eqx.partition"):
            made(strategy)[0].init(variables)

    def test_the_arrays_of_a_model_can_be_trained(self, strategy):
        def loss_fn(variables, batch, key):
            return (variables.weights * batch["x"]).sum()

        trainer, _ = made(strategy, loss_fn)
        state, _ = trainer.step(trainer.init(Module(jnp.ones(3), None)), BATCH)
        assert state.variables.weights.shape == (3,)

    def test_numbers_are_variables(self, strategy):
        assert made(strategy)[0].init({"a": 1.0, "b": np.float32(2)}).variables["a"].shape == ()


class TestTheLossFunction:
    @pytest.mark.parametrize(
        ("loss_fn", "words"),
        [
            (
                lambda v, b: 0.0,
                r"takes \(v, b\), but is called with \(variables, batch, key\); let it take these",
            ),
            (lambda v, b, key, own, more: 0.0, r"takes \(v, b, key, own, more\), but is called with"),
            (lambda v, b, *, key: 0.0, r"takes \(v, b, \*, key\), but is called"),
            (3, "the loss function is a int; use a function of"),
        ],
    )
    def test_a_loss_function_with_other_arguments_is_refused(self, strategy, loss_fn, words):
        with pytest.raises(TypeError, match=words):
            Trainer(strategy, loss_fn, optax.sgd(0.1))

    @pytest.mark.parametrize(
        "loss_fn",
        [lambda *given: 0.0, lambda v, b, key, more=1: 0.0, partial(lambda s, v, b, k: 0.0, 2), error_of],
    )
    def test_a_loss_function_can_have_defaults_and_bound_arguments(self, strategy, loss_fn):
        Trainer(strategy, loss_fn, optax.sgd(0.1))

    def test_a_missing_key_in_the_loss_function_lists_the_available_keys(self, strategy):
        words = (
            "the loss function asks for 'label', which does not exist: the batch has 'x', 'y'; the variables have 'w'"
        )
        error = refused(strategy, lambda variables, batch, key: batch["label"].sum(), ValueError, words)
        assert isinstance(error.__cause__, KeyError)

    def test_other_errors_of_the_loss_function_stay_unchanged(self, strategy):
        """`x` exists, but not in the dictionary that the loss function reads."""
        refused(strategy, lambda variables, batch, key: {}["x"], KeyError, "x")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (0.1, "the optimizer is 0.1; use a gradient transformation of optax, such as optax.adam"),
        ("adam", "the optimizer is 'adam'"),
        (optax.adam, "the optimizer is the function adam"),
    ],
)
def test_the_optimizer_is_of_optax(strategy, optimizer, words):
    with pytest.raises(TypeError, match=words):
        Trainer(strategy, error_of, optimizer)
