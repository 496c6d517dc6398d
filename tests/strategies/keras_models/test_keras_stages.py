"""Pipelines of Keras models: scopes, assignments and marks have the bits of the same stages in sequence."""

from contextlib import nullcontext

import jax
import keras
import numpy as np
import pytest
from keras import layers
from small_models import LABELS, TARGETS, AddsLoss, X, bits_of, classifier, dense, largest_difference, values_of

import strategies
from strategies import fingerprint, recomputing
from strategies.keras import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    PipelineStage,
    SequentialLayerPipelineStageAssignment,
)
from strategies.pipelines.pipelining import RecomputationMode


def sequential():
    return classifier(optimizer="sgd")


def pipelined(model, count=4, **options):
    model.set_pipelining_options(count, gradient_accumulation_reduction_method="mean", **options)
    return model


def fit(model, wanted=LABELS, count=4):
    history = model.fit(X[:48], wanted[:48], global_batch_size=4 * count, epochs=2, shuffle=False, verbose=0).history
    return bits_of(model), history


@pytest.mark.complete
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "Sequential", "device_mapping": [0, 0]}, {"recompute": True}], ids=str
)
def test_a_sequential_model_in_stages_has_the_bits_of_any_schedule(in_scopes, options):
    def program(strategy):
        model = pipelined(sequential(), **options)
        model.set_pipeline_stage_assignment([0, 0, 1, 1])
        evaluated = model.evaluate(X, LABELS, verbose=0)
        return *fit(model), evaluated, float(np.abs(model.layers[1].moving_mean).max()) > 0

    results = in_scopes(2, program, ipus_per_replica=2)
    [expected] = in_scopes(1, stages_in_turn, ipus_per_replica=1)
    assert results == [(*expected, results[0][2], True)] * 2


def stages_in_turn(strategy):
    model = pipelined(sequential(), device_mapping=[0, 0], schedule="Sequential")
    model.set_pipeline_stage_assignment([0, 0, 1, 1])
    return fit(model)


def two_heads(staged=True):
    given = keras.Input((6,))
    scope = PipelineStage if staged else nullcontext
    with scope(0):
        first = dense(5, 1, activation="relu")
        hidden = first(given)
    with scope(1):
        one, other = dense(1, 2, name="one")(hidden), dense(1, 3, name="other")(hidden)
    model = keras.Model(given, {"one": one, "other": other})
    model.compile("sgd", "mse")
    return model


def test_scopes_cut_a_functional_model_that_learns_as_in_stock_keras(alone):
    wanted = {"one": TARGETS[:48], "other": 2 * TARGETS[:48]}
    stock = two_heads(staged=False)
    stock.fit(X[:48], wanted, batch_size=16, epochs=2, shuffle=False, verbose=0)

    def program(strategy):
        model = pipelined(two_heads())
        history = model.fit(X[:48], wanted, batch_size=1, epochs=2, shuffle=False, verbose=0).history
        return values_of(model), history, [one.pipeline_stage for one in model.get_pipeline_stage_assignment()]

    values, history, stages = alone(program, ipus_per_replica=2)
    assert largest_difference(values, values_of(stock)) < 1e-6
    assert set(history) == {"loss", "one_loss", "other_loss"}
    assert history["loss"][1] < history["loss"][0]
    assert stages == [0, 1, 1]


class Marked(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = dense(4, 1, activation="relu"), dense(1, 2)

    def call(self, values):
        with strategies.pipeline_stage(0):
            hidden = self.first(values)
        with strategies.pipeline_stage(1):
            return self.last(hidden)


def penalised_layers():
    """Make layers with a penalty on the weights of each stage, and two on the outputs of the first stage."""
    first = dense(4, 1, kernel_regularizer="l2", activity_regularizer="l1")
    return first, AddsLoss(), dense(1, 2, kernel_regularizer="l1")


def penalised(kind):
    first, added, last = penalised_layers()
    if kind == "subclass":
        return MarkedParts([first, added], [last])
    model = keras.Sequential([keras.Input((6,)), first, added, last])
    model.set_pipeline_stage_assignment([0, 0, 1])
    return model


class MarkedParts(keras.Model):
    def __init__(self, *parts):
        super().__init__()
        self.parts = [keras.Sequential(layers) for layers in parts]

    def call(self, values):
        for stage, part in enumerate(self.parts):
            with strategies.pipeline_stage(stage):
                values = part(values)
        return values


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["subclass", "sequential"])
def test_penalties_belong_to_the_stages_of_their_weights(in_scopes, kind):
    """Two devices have the bits of one, and learn as stock Keras does."""
    given, wanted, settings = X[:48], TARGETS[:48], {"epochs": 2, "shuffle": False, "verbose": 0}

    def program(strategy, devices):
        model = penalised(kind)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        pipelined(model, device_mapping=devices)
        history = model.fit(given, wanted, batch_size=3, **settings).history
        return bits_of(model), history, values_of(model)

    stock = keras.Sequential([keras.Input((6,)), *penalised_layers()])
    stock.compile(keras.optimizers.SGD(0.05), "mse")
    expected = stock.fit(given, wanted, batch_size=48, **settings).history
    [alone] = in_scopes(1, lambda strategy: program(strategy, [0, 0]))
    for bits, history, values in in_scopes(2, lambda strategy: program(strategy, [0, 1]), ipus_per_replica=2):
        assert (bits, history) == alone[:2]
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert largest_difference(values, values_of(stock)) < 1e-6


def test_evaluation_and_prediction_in_stages_match_the_model_without_stages(in_scopes):
    """They run unpipelined on the first device of each replica, with the same bits."""

    def program(strategy, stages):
        model = sequential()
        if stages:
            pipelined(model).set_pipeline_stage_assignment(stages)
        return model.evaluate(X, LABELS, verbose=0), strategies.fingerprint(model.predict(X, verbose=0))

    [whole] = in_scopes(1, lambda strategy: program(strategy, None))
    assert in_scopes(2, lambda strategy: program(strategy, [0, 0, 1, 1]), ipus_per_replica=2) == [whole] * 2


def test_a_subclass_marks_its_stages_in_call(alone):
    """The mapping fixes the number of stages; assignments are for models whose calls are known."""

    def program(strategy, devices):
        model = Marked()
        model.compile("sgd", "mse")
        if devices:
            pipelined(model, device_mapping=devices)
        else:
            model.set_gradient_accumulation_options(4, "mean")
        return fit(model, TARGETS)[0]

    apart = alone(lambda strategy: program(strategy, [0, 1]), ipus_per_replica=2)
    assert apart == alone(lambda strategy: program(strategy, [0, 0]))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda model: model.set_pipeline_stage_assignment([0, 1]),
            RuntimeError,
            "'marked'.*with strategies.pipeline_",
        ),
        (lambda model: model.get_pipeline_stage_assignment(), RuntimeError, "'marked'.*with strategies.pipeline_stage"),
        (lambda model: fit(pipelined(model), TARGETS), ValueError, "give device_mapping to set_pipelining_options"),
        (
            lambda model: fit(pipelined(model, 6, device_mapping=[0, 0, 0]), TARGETS, 6),
            ValueError,
            "stage 2 is marked nowhere .*, but device_mapping has 3 stages",
        ),
    ],
)
def test_a_subclass_without_complete_stage_marks_is_refused(alone, use, error, message):
    def program(strategy):
        model = Marked()
        model.compile("sgd", "mse")
        use(model)

    with pytest.raises(error, match=message):
        alone(program)


def shared():
    """Make a model with a layer that is called twice: five calls of four layers."""
    given = keras.Input((6,))
    twice = dense(6, 1, name="twice")
    hidden = twice(layers.Activation("tanh", name="first")(twice(given)))
    model = keras.Model(given, dense(1, 2, name="last")(layers.Activation("relu", name="second")(hidden)))
    model.compile("sgd", "mse")
    return model


def test_each_call_of_a_functional_model_has_an_assignment(alone):
    def program(strategy):
        model = shared()
        listed = model.get_pipeline_stage_assignment()
        found = [(one.layer.name, one.node_index, one.pipeline_stage) for one in listed]
        given = [
            FunctionalLayerPipelineStageAssignment(one.layer, one.node_index, stage)
            for one, stage in zip(listed, [0, 0, 0, 1, 1], strict=True)
        ]
        model.set_pipeline_stage_assignment(given)
        lines = []
        model.print_pipeline_stage_assignment_summary(print_fn=lines.append)
        bits = fit(pipelined(model), TARGETS)[0]
        model.reset_pipeline_stage_assignment()
        return found, model.get_pipeline_stage_assignment() == listed, lines[3], bits

    found, is_reset, line, bits = alone(program, ipus_per_replica=2)
    assert [name for name, _, _ in found] == ["twice", "first", "twice", "second", "last"]
    assert [index for _, index, _ in found] == [0, 0, 1, 0, 0]
    assert is_reset
    assert line == "Layer: second, node index: 0, pipeline stage: 1"
    assert bits == alone(program, ipus_per_replica=1)[3]


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        ([0, 0, 0], ValueError, r"\(3\) does not match the number of calls of layers of the model \(5\)"),
        ([0, 0, 0, 2, 2], RuntimeError, r"strictly increasing from 0, but stages \[1\] have"),
        ([1, 1, 1, 1, 1], RuntimeError, r"stages \[0\] have"),
        ([0, 1, 0, 1, 1], RuntimeError, "'twice' in pipeline stage 0 has a dependency from a pipeline stage"),
        ([0, 0, 0, 1, -1], ValueError, "it must be at least 0"),
        ([0, 0, 0, 1, 1.5], ValueError, "must be instances of FunctionalLayerPipelineStageAssignment"),
        ("stages", TypeError, "it must be a list"),
    ],
)
def test_impossible_stages_are_refused(alone, stages, error, message):
    with pytest.raises(error, match=message):
        alone(lambda strategy: shared().set_pipeline_stage_assignment(stages))


def test_assignments_of_other_calls_are_refused(alone):
    def program(strategy):
        model, other = shared(), shared()
        given = [FunctionalLayerPipelineStageAssignment(a.layer, a.node_index, 0) for a in assigned(model)]
        swapped = [given[1], given[0], *given[2:]]
        with pytest.raises(ValueError, match="assignment 0 is for 'first', but call 0 is of 'twice'"):
            model.set_pipeline_stage_assignment(swapped)
        with pytest.raises(ValueError, match="assignment 0 is for"):
            other.set_pipeline_stage_assignment(given)
        with pytest.raises(ValueError, match="does not have a pipeline stage"):
            model.set_pipeline_stage_assignment(assigned(model))
        with pytest.raises(ValueError, match="must be instances of"):
            model.set_pipeline_stage_assignment([SequentialLayerPipelineStageAssignment(given[0].layer, 0), *given[1:]])

    alone(program)


def assigned(model):
    return model.get_pipeline_stage_assignment()


@pytest.mark.parametrize("stages", [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 2, 2]])
def test_stages_of_a_sequential_model_follow_each_other(alone, stages):
    with pytest.raises((ValueError, RuntimeError), match="stages of a sequential model are|strictly increasing"):
        alone(lambda strategy: sequential().set_pipeline_stage_assignment(stages))


@pytest.mark.complete
def test_a_model_whose_layers_changed_needs_new_assignments(alone):
    def program(strategy):
        model = keras.Sequential([keras.Input((6,)), dense(4, 1), dense(1, 2)])
        pipelined(model).set_pipeline_stage_assignment([0, 1])
        model.add(dense(1, 3))
        model.compile("sgd", "mse")
        found = [one.pipeline_stage for one in assigned(model)]
        with pytest.raises(RuntimeError, match="assigned to 2 calls of layers, but model .* now has 3; assign them"):
            fit(model, TARGETS)
        model.set_pipeline_stage_assignment([0, 1, 1])
        fit(model, TARGETS)
        model.pop()
        model.compile("sgd", "mse")
        with pytest.raises(RuntimeError, match="has 2 now"):
            fit(model, TARGETS)
        model.reset_pipeline_stage_assignment()
        model.set_pipeline_stage_assignment([0, 1])
        return found, bool(fit(model, TARGETS))

    assert alone(program) == ([None] * 3, True)


def test_partial_and_nested_scopes_are_refused(alone):
    def program(strategy):
        given = keras.Input((6,))
        with PipelineStage(0):
            hidden = dense(4, 1)(given)
            with (
                pytest.raises(RuntimeError, match=r"PipelineStage\(1\) is inside PipelineStage\(0\)"),
                PipelineStage(1),
            ):
                pass
        model = pipelined(keras.Model(given, dense(1, 2, name="left_out")(hidden)))
        model.compile("sgd", "mse")
        with pytest.raises(RuntimeError, match="'left_out' has not been assigned"):
            fit(model, TARGETS)

    alone(program)


def test_a_pipeline_accumulates_gradients(alone):
    def program(strategy):
        model = sequential()
        model.set_pipeline_stage_assignment([0, 0, 1, 1])
        with pytest.raises(ValueError, match="gradient_accumulation_steps_per_replica is not set"):
            fit(model)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=16)
        model.set_pipelining_options(7)
        with pytest.raises(RuntimeError, match=r"The pipelined model has been configured .* 7 steps"):
            fit(model, count=7)

    alone(program)


def test_stages_that_share_a_layer_are_on_one_device(alone):
    def program(strategy):
        model = pipelined(shared())
        model.set_pipeline_stage_assignment([0, 0, 1, 1, 1])
        fit(model, TARGETS)

    with pytest.raises(ValueError, match=r"stages \[0, 1\] use variable .*must be on one device"):
        alone(program, ipus_per_replica=2)


def test_layers_of_nested_models_have_stages_of_their_own(alone):
    def program(strategy):
        inner = keras.Sequential([keras.Input((6,)), dense(5, 1, activation="relu"), dense(4, 2)], name="inner")
        given = keras.Input((6,))
        model = keras.Model(given, dense(1, 3)(inner(given)))
        model.compile("sgd", "mse")
        [nested, last] = model.get_pipeline_stage_assignment()
        of_inner = [SequentialLayerPipelineStageAssignment(layer, stage) for stage, layer in enumerate(inner.layers)]
        model.set_pipeline_stage_assignment(
            [
                FunctionalNestedModelPipelineStageAssignment(inner, nested.node_index, of_inner),
                FunctionalLayerPipelineStageAssignment(last.layer, last.node_index, 2),
            ]
        )
        shown = str(model.get_pipeline_stage_assignment()[0])
        return fit(pipelined(model, 6), TARGETS, 6)[0], shown

    apart, shown = alone(program, ipus_per_replica=3)
    assert apart == alone(program)[0]
    assert "pipeline stage: 0; Layer:" in shown


@pytest.mark.complete
def test_stages_survive_files(alone, tmp_path):
    def program(strategy):
        model = pipelined(sequential(), device_mapping=[0, 1])
        model.set_pipeline_stage_assignment([0, 0, 1, 1])
        model.save(tmp_path / "staged.keras")
        loaded = keras.models.load_model(tmp_path / "staged.keras")
        return [one.pipeline_stage for one in loaded.get_pipeline_stage_assignment()], fit(loaded) == fit(model)

    assert alone(program, ipus_per_replica=2) == ([0, 0, 1, 1], True)


def test_assignments_can_be_changed_in_place_and_set_again(alone):
    def program(strategy):
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, name="first")(inputs)))
        assignments, stage_id = model.get_pipeline_stage_assignment(), 0
        for assignment in assignments:
            assignment.pipeline_stage = stage_id
            if assignment.layer.name.startswith("first"):
                stage_id = 1
        model.set_pipeline_stage_assignment(assignments)
        return [assignment.pipeline_stage for assignment in model.get_pipeline_stage_assignment()]

    assert alone(program) == [0, 1]


def test_recomputation_checkpoints_mark_blocks_and_change_no_bit(alone, tmp_path):
    layer = strategies.keras.RecomputationCheckpoint

    def marked(kind):
        layers = [keras.Input((6,)), dense(4, 1, activation="tanh"), kind(), dense(4, 2), kind(), dense(1, 3)]
        return keras.Sequential(layers)

    def fitted(kind, **pipelining):
        model = marked(kind)
        model.set_pipeline_stage_assignment([0, 0, 0, 1, 1])
        model.set_pipelining_options(4, **pipelining)
        model.compile("adam", "mse")
        model.fit(X[:32], X[:32, :1], batch_size=2, shuffle=False, verbose=0)
        return bits_of(model), model

    def program(strategy):
        bits, model = fitted(
            layer, recompute=True, recomputation_mode=RecomputationMode.RecomputeAndBackpropagateInterleaved
        )
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        kinds = {type(each).__name__ for each in loaded.layers}
        return bits, fitted(layer)[0], fitted(keras.layers.Identity)[0], kinds

    recomputed, kept, without, kinds = alone(program, replicas=2)
    assert recomputed == kept == without
    assert kinds == {"Dense", "RecomputationCheckpoint"}
    model = marked(layer)
    values = [variable.value for variable in model.variables]

    def loss(variables, batch, key):
        return (model.stateless_call(variables, [], batch)[0] ** 2).mean()

    kept, again = (jax.grad(recomputing(loss, how))(values, X, None) for how in ("none", "blocks"))
    assert fingerprint(kept) == fingerprint(again)
