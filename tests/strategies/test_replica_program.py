"""Program of one replica in a step, without a trainer: gradients, tail, and description."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies
from strategies.jax.gradients.computation import Trainable
from strategies.jax.gradients.model_state import LOSS_SCALE, NOTICE, STEP, ModelStateRule, control_words
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes, cast, float_dtype
from strategies.jax.options import StepOptions

REPLICAS = 4
VARIABLES = {"b": np.float32(0.5), "w": np.float32([1, -2, 4])}
BATCH = {"id": np.int32([3, 1, 2, 5, 4, 0]), "x": np.arange(18, dtype=np.float32).reshape(6, 3)}


LOSS = 2 * 0.5 + 7.5 - 2 * 8.5 + 4 * 9.5


def linear(variables, batch, key):
    """Compute a loss that is LOSS; its gradients are 2 and the means of the columns of x: 7.5, 8.5 and 9.5."""
    return batch["x"].mean(0) @ variables["w"] + 2 * variables["b"]


def shapes_of(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def program_of(strategy, loss_fn=linear, variables=VARIABLES, batch=BATCH, **options):
    shapes = ReplicaShapes(shapes_of(variables), shapes_of(batch))
    trainable, rule = Trainable.of(variables, None), ModelStateRule.of(None, None)
    return ReplicaProgram(strategy.replicas, loss_fn, shapes, trainable, rule, None, StepOptions(**options))


def run(program, replica=0, step=0, notice=False, scale=1.0, variables=VARIABLES, batch=BATCH):
    """Return the tail, and the rest of the replica's results."""
    words = control_words(step, notice, scale)
    tail, *rest = jax.jit(program)(variables, batch, np.int32(replica), words)
    return np.asarray(tail), rest


class TestFloatDtype:
    @pytest.mark.parametrize("given", ["bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
    def test_a_dtype_is_accepted_in_every_form(self, given):
        assert float_dtype("compute_dtype", given) == np.dtype(jnp.bfloat16)

    def test_a_missing_dtype_stays_none(self):
        assert float_dtype("compute_dtype", None) is None

    @pytest.mark.parametrize("given", ["int8", bool, "complex64", "float99", [3], 16])
    def test_an_invalid_dtype_is_refused_with_the_argument_and_a_way_out(self, given):
        with pytest.raises(ValueError, match="of_this is .*; use None, 'bfloat16', 'float16' or another") as caught:
            float_dtype("of_this", given)
        assert repr(given) in str(caught.value)

    def test_a_dtype_that_jax_would_replace_is_refused(self):
        with pytest.raises(ValueError, match="is 'float64'"):
            float_dtype("compute_dtype", "float64")


def test_control_words_are_the_step_the_notice_and_the_bits_of_the_scale():
    words = control_words(7, True, 1.5)
    assert (words.dtype, words.shape) == (np.int32, (4,))
    assert (words[STEP], words[NOTICE]) == (7, 1)
    assert words[LOSS_SCALE : LOSS_SCALE + 1].view(np.float32) == 1.5
    assert control_words(7, False, 1.5)[NOTICE] == 0


class TestPrecision:
    TREE = {"x": jnp.ones(2), "half": jnp.ones(2, jnp.float16), "id": jnp.arange(3), "is": jnp.array([True])}

    def test_only_floating_point_values_are_cast(self):
        tree = cast(self.TREE | {"key": jax.random.key(0)}, np.dtype(jnp.bfloat16))
        found = {name: str(leaf.dtype) for name, leaf in tree.items()}
        assert found == {"x": "bfloat16", "half": "bfloat16", "id": "int32", "is": "bool", "key": "key<fry>"}

    def test_values_are_not_cast_by_default(self):
        assert cast(self.TREE, None) is self.TREE

    def test_the_loss_function_computes_in_the_dtype_and_gradients_keep_that_of_variables(self, strategy):
        seen = set()

        def loss(variables, batch, key):
            seen.add((str(variables["w"].dtype), str(batch["x"].dtype), str(batch["id"].dtype)))
            return linear(variables, batch, key)

        program = program_of(strategy, loss, compute_dtype="float16")
        tail, gradients = run(program)
        assert seen == {("float16", "float16", "int32")}
        assert [leaf.dtype for leaf in (tail, *gradients)] == [np.float32] * 3


class TestTheTail:
    """The tail: loss and metrics, the notice, and flags of non-finite gradients."""

    @staticmethod
    def loss(variables, batch, key):
        return linear(variables, batch, key), {"rows": batch["id"].size, "largest": batch["id"].max()}

    def test_the_tail_has_each_metric_at_the_place_of_its_name(self, strategy):
        program = program_of(strategy, self.loss)
        tail, _ = run(program)
        assert program.names[0] == "loss"
        wanted = {"loss": LOSS, "rows": 6, "largest": 5}
        assert dict(zip(program.names, tail.tolist(), strict=False)) == wanted

    @pytest.mark.parametrize(("scales", "checks"), [(False, False), (False, True), (True, False)])
    def test_the_tail_has_the_declared_length(self, strategy, scales, checks):
        program = program_of(strategy, self.loss, loss_scaling=1.0 if scales else None, check_numerics=checks)
        assert program.places.flags == (2 * REPLICAS if checks else 0)
        assert (program.places.notice, program.places.finite) == (3, 4)
        tail, _ = run(program)
        assert tail.shape == (program.places.size,) == (4 + scales + program.places.flags,)

    @pytest.mark.parametrize("notice", [False, True])
    @pytest.mark.parametrize("options", [{"loss_scaling": 1.0}, {"check_numerics": True}])
    def test_the_tail_has_the_notice_at_its_place(self, strategy, notice, options):
        program = program_of(strategy, self.loss, **options)
        tail, _ = run(program, notice=notice)
        assert tail[program.places.notice] == notice
        assert not tail[program.places.notice + 1 :].any()

    def test_the_tail_flags_each_non_finite_gradient_of_each_replica(self, strategy):
        """Each variable has a row of flags, in tree order, and each replica a column."""
        program = program_of(
            strategy, lambda v, batch, key: linear(v, batch, key) + v["b"] * jnp.inf, check_numerics=True
        )
        for replica in range(REPLICAS):
            tail, _ = run(program, replica)
            flags = tail[-program.places.flags :].reshape(2, REPLICAS)
            assert np.argwhere(flags).tolist() == [[0, replica]]


class TestMetricNames:
    """Names of metrics; `test_trainer.py` has the errors of `Trainer`."""

    @pytest.mark.parametrize("metrics", [{}, {"accuracy": jnp.float32(0.5)}])
    def test_names_are_the_loss_and_the_metrics(self, strategy, metrics):
        program = program_of(strategy, lambda v, batch, key: (linear(v, batch, key), metrics))
        assert program.names == ("loss", *metrics)
        assert run(program)[0].tolist() == [LOSS, *metrics.values(), 0]

    @pytest.mark.parametrize(
        ("metrics", "words"),
        [
            (
                {"each": jnp.zeros(2)},
                r"metric 'each' is of shape \[2\], but metrics are scalars, .*; take jnp.mean of it",
            ),
            ({"loss": jnp.zeros(())}, "a metric is called 'loss', which is the name of the loss itself; use"),
        ],
    )
    def test_names_are_checked_before_anything_runs(self, strategy, metrics, words):
        with pytest.raises(TypeError, match=words):
            program_of(strategy, lambda v, batch, key: (linear(v, batch, key), metrics))


class TestMicroBatches:
    def test_the_loss_function_sees_micro_batches(self, strategy):
        seen = []

        def loss(variables, batch, key):
            seen.append((batch["x"].shape, batch["id"].shape))
            return linear(variables, batch, key)

        tail, gradients = run(program_of(strategy, loss, gradient_accumulation_count=3))
        assert set(seen) == {((2, 3), (2,))}
        assert tail[0] == LOSS  # the mean of all micro-batches
        np.testing.assert_allclose(gradients[1], [7.5, 8.5, 9.5], rtol=1e-6)

    def test_rows_that_micro_batches_cannot_share_are_refused(self, strategy):
        words = "with 4 micro-batches, but each replica has 6 rows of the batch, which is not a multiple"
        with pytest.raises(ValueError, match=words):
            program_of(strategy, gradient_accumulation_count=4)

    def test_batches_without_rows_are_refused(self, strategy):
        with pytest.raises(ValueError, match=r"a batch of shape \[0, 3\] has no rows; each replica needs at least one"):
            program_of(strategy, batch={"x": np.zeros((0, 3), np.float32)}, gradient_accumulation_count=2)


class TestTheLossScale:
    SCALED: ClassVar = {"loss_scaling": 1.0}

    def test_the_scale_multiplies_the_gradients_and_not_the_loss(self, strategy):
        program = program_of(strategy, **self.SCALED)
        tail, gradients = run(program, scale=8.0)
        assert tail.tolist() == [LOSS, 0, 0]
        assert [np.asarray(leaf).tolist() for leaf in gradients] == [16, [60, 68, 76]]

    def test_the_scale_is_ignored_if_the_loss_is_not_scaled(self, strategy):
        _, gradients = run(program_of(strategy), scale=8.0)
        assert gradients[0] == 2

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_scaling_adds_a_flag_for_non_finite_gradients(self, strategy, bad):
        program = program_of(strategy, **self.SCALED)
        for place, wanted in ((None, 0), (0, 1), (17, 1)):
            x = BATCH["x"].copy()
            if place is not None:
                x.flat[place] = bad
            tail, _ = run(program, batch=BATCH | {"x": x})
            assert tail[program.places.finite] == wanted

    @pytest.mark.parametrize(("transfer", "wanted"), [(None, 0), ("bfloat16", 0), ("float16", 1)])
    def test_an_overflow_in_the_transfer_dtype_is_flagged(self, strategy, transfer, wanted):
        program = program_of(strategy, gradient_transfer_dtype=transfer, **self.SCALED)
        tail, _ = run(program, scale=2.0**15)
        assert tail[program.places.finite] == wanted


class TestTransferredGradients:
    @pytest.mark.parametrize(
        ("transfer", "dtypes"), [(None, ["float32", "float16"]), ("bfloat16", ["bfloat16", "float16"])]
    )
    def test_gradients_have_the_declared_dtypes(self, strategy, transfer, dtypes):
        variables = VARIABLES | {"w": VARIABLES["w"].astype(np.float16)}
        program = program_of(strategy, variables=variables, gradient_transfer_dtype=transfer)
        assert [str(result.dtype) for result in program.results] == dtypes
        _, gradients = run(program, variables=variables)
        assert [shapes_of(leaf) for leaf in gradients] == program.results


class TestTheKey:
    @staticmethod
    def loss(variables, batch, key):
        return linear(variables, batch, key), {"draw": jax.random.uniform(key)}

    @pytest.mark.parametrize(("seed", "step", "replica"), [(0, 0, 0), (0, 5, 2), (0, 2, 5), (9, 5, 2)])
    def test_the_key_is_folded_from_seed_step_and_replica(self, strategy, seed, step, replica):
        tail, _ = run(program_of(strategy, self.loss, seed=seed), replica, step)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), replica)
        assert tail[1] == jax.random.uniform(key)

    def test_the_key_does_not_depend_on_the_notice_or_the_scale(self, strategy):
        program = program_of(strategy, self.loss, **TestTheLossScale.SCALED)
        (one, _), (other, _) = run(program), run(program, notice=True, scale=16.0)
        assert one[1] == other[1]


class TestIndependence:
    """Independence of the replicas and instances for which a program was traced."""

    @staticmethod
    def traced(program):
        words = control_words(0, False, 1.0)
        jax.eval_shape(program, shapes_of(VARIABLES), shapes_of(BATCH), np.int32(0), words)
        return program.is_independent

    def test_a_loss_function_that_only_reads_its_replica_is_independent(self, strategy):
        def loss(variables, batch, key):
            own = strategies.get_replica_context().replica_id_in_sync_group
            return linear(variables, batch, key) * own

        assert self.traced(program_of(strategy, loss))

    def test_a_loss_function_with_a_collective_is_not_independent(self, strategy):
        def loss(variables, batch, key):
            return strategies.get_replica_context().all_reduce("mean", linear(variables, batch, key))

        program = program_of(strategy, loss)
        assert not self.traced(program)
        assert not self.traced(program)

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_loss_function_with_a_feed_is_not_independent(self, strategy, count):
        outfeed, infeed = strategies.OutfeedQueue(), strategies.InfeedQueue(np.zeros(3, np.float32))

        def enqueuing(variables, batch, key):
            outfeed.enqueue(batch["x"])
            return linear(variables, batch, key)

        def dequeuing(variables, batch, key):
            return linear(variables, batch, key) * infeed.dequeue()

        for loss in (enqueuing, dequeuing):
            assert not self.traced(program_of(strategy, loss, gradient_accumulation_count=count))
        infeed.delete()
