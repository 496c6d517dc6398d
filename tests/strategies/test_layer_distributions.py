"""Distributions of arrays, sums of squares of shards, and the cost of looking at nothing."""

import functools
import gc
import logging
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from kept_rows import KeptRows
from profiling import call_profiled
from tiers import first_of

import strategies
from popdist.records.distribution_settings import DistributionSettings
from strategies.core import metrics as metrics_module
from strategies.core.metrics import Layers, layer_names, layer_statistics, squares_of_rows, squares_of_shards
from strategies.core.options import SKIP
from strategies.jax.engine import JaxEngine, device_norms
from strategies.jax.replicas.variables import shards_of
from strategies.loss_scaling import LossScaling
from strategies.sinks import sinks as delivery_module
from strategies.sinks.sink import BINS, Distribution

RANDOM = np.random.default_rng(5).standard_normal(1000).astype(np.float32)


class TestOneArray:
    def test_numbers_are_those_of_numpy(self):
        found = Distribution.of(RANDOM.reshape(10, 100))
        counts, edges = np.histogram(RANDOM.astype(np.float64), BINS)
        assert np.array_equal(found.counts, counts)
        assert np.array_equal(found.edges, edges)
        assert found.size == 1000
        assert found.numbers["p25"] == float(np.quantile(RANDOM.astype(np.float64), 0.25))
        assert (found.numbers["min"], found.numbers["max"]) == (float(RANDOM.min()), float(RANDOM.max()))
        assert found.total == pytest.approx(RANDOM.sum(dtype=np.float64))
        assert found.squares == pytest.approx(np.square(RANDOM, dtype=np.float64).sum())

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
    def test_any_floating_point_dtype_has_one(self, dtype):
        array = RANDOM.astype(dtype)
        found = Distribution.of(array)
        assert found.size == 1000
        assert found.numbers["max"] == float(array.max())

    def test_the_numbers_that_float16_cannot_hold_are_counted(self):
        with np.errstate(over="ignore"):
            kinds = np.array([0, 2.0**-25, 2.0**-24, -(2.0**-30), 65519, 65520, -1e9, 1], np.float32)
            rounded = kinds.astype(np.float16)
        found = Distribution.of(kinds).numbers
        assert found["float16_zero"] == np.mean((rounded == 0) & (kinds != 0)) == 2 / 8
        assert found["float16_inf"] == np.mean(np.isinf(rounded)) == 2 / 8

    def test_numbers_that_are_not_finite_are_counted_apart(self):
        found = Distribution.of(np.array([1, np.nan, 3, -np.inf, np.inf], np.float32))
        assert found.size == 2
        assert (found.numbers["not_finite"], found.numbers["min"], found.numbers["max"]) == (3, 1, 3)

    @pytest.mark.parametrize("array", [np.full(4, np.nan, np.float32), np.zeros(0, np.float32)], ids=["nan", "empty"])
    def test_an_array_without_finite_numbers_has_no_quantiles(self, array):
        found = Distribution.of(array)
        assert found.size == 0
        assert np.isnan([found.least, found.most, *found.quantiles.values()]).all()
        assert np.isfinite(found.edges).all(), "sinks draw them"

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros(7, np.float32),
            np.full(3, 1e-45, np.float32),
            np.array([1e-45, 2.8e-45], np.float32),
            np.array([-1.7e308, 0, 1.7e308]),
            np.array([5e-324, 1e-323]),
            np.nextafter(np.float64(1), [0, 2]),
        ],
        ids=["zeros", "equal", "subnormal", "huge", "least", "near"],
    )
    def test_every_finite_number_is_in_a_bin(self, array):
        found = Distribution.of(array)
        assert found.size == array.size
        assert np.isfinite(found.edges).all()
        assert (np.diff(found.edges) > 0).all(), "Weights & Biases and TensorBoard need increasing edges"
        assert (found.least, found.most) == (array.min(), array.max())


class TestSquares:
    @pytest.mark.parametrize("size", [1, 3, 10, 1000, 100_003])
    @pytest.mark.parametrize("replicas", [1, 2, 3, 7])
    def test_a_shard_has_the_same_bits_alone_and_beside_others(self, size, replicas, monkeypatch):
        monkeypatch.setattr(metrics_module, "_CHUNK", 4096)
        flat = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        whole = squares_of_shards(flat, replicas)
        part = -(-size // replicas)
        padded = np.pad(flat, (0, replicas * part - size)).reshape(replicas, part)
        for count in range(1, replicas + 1):
            parts = [squares_of_rows(padded[first : first + count]) for first in range(0, replicas, count)]
            assert np.concatenate(parts).tobytes() == whole.tobytes()
        unaligned = np.frombuffer(b"...." + flat.tobytes(), np.float32, offset=4)
        assert squares_of_shards(unaligned, replicas).tobytes() == whole.tobytes()
        assert whole.sum() == pytest.approx(np.square(flat, dtype=np.float64).sum())

    def test_an_empty_array_has_zeros(self):
        assert squares_of_shards(np.zeros(0, np.float32), 3).tolist() == [0, 0, 0]

    def test_a_device_finds_the_norms_of_the_host(self):
        """Norms there are float32, also of arrays whose squares are beyond its range."""
        arrays = [RANDOM, RANDOM * 1e25, RANDOM * 1e-30, np.zeros(3, np.float32), RANDOM.astype(jnp.bfloat16)]
        found = device_norms()([*map(jnp.asarray, arrays)])
        wanted = [float(np.sqrt(squares_of_shards(array, 1).sum())) for array in arrays]
        assert np.asarray(found).tolist() == pytest.approx(wanted, rel=1e-5)
        broken = device_norms()([jnp.array([1, jnp.inf]), jnp.array([jnp.nan, 1])])
        assert not np.isfinite(np.asarray(broken)).any()


def test_parts_of_gradients_on_a_device_have_the_norms_of_the_whole(on_instances):
    """PyTorch on GPUs has them, if the host divides gradients for the shards of the optimizer state."""

    def norms(strategy):
        replicas, [own] = strategy.replicas, strategy.local_replicas
        part = jnp.asarray(RANDOM.reshape(2, -1)[own])
        layers = Layers(
            ("a", "b"),
            [jnp.asarray(RANDOM), jnp.ones(3)],
            [part, jnp.ones(3)],
            shards=shards_of(replicas, min_elements=10),
            device_norms=device_norms(),
        )
        return layer_statistics(DistributionSettings(1, 0), 0, lambda: layers, replicas).read(0)

    whole = float(np.linalg.norm(RANDOM.astype(np.float64)))
    for found in on_instances(2, 2, norms):
        assert found["gradient_norm/a"] == pytest.approx(whole, rel=1e-6)
        assert [found["gradient_norm/b"], found["weight_norm/b"]] == pytest.approx([np.sqrt(3)] * 2)


def test_names_of_layers_are_what_every_sink_accepts():
    assert layer_names(["/a//b", "./c/../d", "x" * 300, "x" * 300]) == ("a/b", "c/d", "x" * 200, f"{'x' * 200}_2")
    assert layer_names(["dense/kernel", "", "a:b", "a_b", "a_b"]) == (
        "dense/kernel",
        "variables",
        "a_b",
        "a_b_2",
        "a_b_3",
    )


ROWS = {"x": np.arange(96, dtype=np.float32).reshape(32, 3) / 64}


def loss_fn(variables, batch, key):
    return jnp.mean(jnp.tanh(batch["x"] @ variables["w"]) + variables["b"])


def trained(strategy, loss=loss_fn, sinks=None, **options):
    """Return the rows of a training, and its last state."""
    kept, given = KeptRows(), {"norms_every": 1, "histograms_every": 2} if sinks is None else sinks
    dataset = strategy.distribute_dataset(ROWS, batch_size=2, seed=1)
    trainer = strategies.Trainer(strategy, loss, optax.sgd(0.1), **options)
    state = trainer.init({"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)})
    with strategies.metrics.open(kept, strategy=strategy, **given):
        state, _ = trainer.run(state, dataset)
    return kept.rows, state


class TestTrainings:
    def test_looking_changes_no_bits(self):
        found = {
            strategies.fingerprint(trained(strategies.IPUStrategy(replicas), sinks=sinks)[1].variables)
            for sinks in (None, {})
            for replicas in [4]
        }
        assert len(found) == 1

    def test_looking_at_the_only_replica_changes_no_bits(self):
        rows, state = trained(strategies.IPUStrategy(1))
        unseen, plain = trained(strategies.IPUStrategy(1), sinks={})
        assert all("gradient_norm/w" in row.values for row in rows)
        assert not any("gradient_norm" in row.values for row in unseen)
        assert strategies.fingerprint(state.variables) == strategies.fingerprint(plain.variables)

    def test_rows_of_a_step_have_norms_and_distributions_beside_the_loss(self):
        rows, _ = trained(strategies.IPUStrategy(4))
        kinds = ["gradient_norm", "gradient_norm/b", "gradient_norm/w", "weight_norm", "weight_norm/b", "weight_norm/w"]
        assert [list(row.values) for row in rows] == [["loss", *kinds]] * 4
        names = {"weights/b", "gradients/b", "weights/w", "gradients/w"}
        assert [set(row.distributions) for row in rows] == [names, set(), names, set()]

    @pytest.mark.parametrize(
        "options", first_of([{"loss_scaling": LossScaling(2.0**12)}, {}, {"compute_dtype": "bfloat16"}]), ids=str
    )
    def test_weighted_and_scaled_losses_show_the_gradients_of_the_update(self, options):
        def weighted(variables, batch, key):
            weight = 1 + jnp.mean(batch["x"], dtype=jnp.float32)
            return strategies.Outcome(loss_fn(variables, batch, key), weight=weight)

        for loss in (loss_fn, weighted):
            rows, state = trained(strategies.IPUStrategy(2), loss, **options)
            norms = [row.values["weight_norm/b"] for row in rows]
            gradients = [row.values["gradient_norm/b"] for row in rows]
            # The gradient of b is the same for both elements, so the norm of b grows by 0.1 times its norm.
            moved = np.diff([*norms, float(np.linalg.norm(state.variables["b"]))])
            assert moved.tolist() == pytest.approx([0.1 * each for each in gradients], rel=1e-2)
            assert rows[0].distributions["gradients/b"].most == pytest.approx(gradients[0] / np.sqrt(2), rel=1e-2)

    def test_a_step_that_is_not_applied_shows_its_gradients(self):
        def broken(variables, batch, key):
            return loss_fn(variables, batch, key) * jnp.where(jnp.min(batch["x"]) < 0.1, jnp.inf, 1.0)

        rows, _ = trained(strategies.IPUStrategy(2), broken, loss_scaling=LossScaling(2.0**4))
        found = [np.isfinite(row.values["gradient_norm/b"]) for row in rows]
        assert sorted(set(found)) == [False, True]
        first = found.index(False)
        assert rows[first].values["skipped_steps"] == 1

    def test_a_step_without_weight_shows_no_gradients(self):
        def unweighted(variables, batch, key):
            return strategies.Outcome(loss_fn(variables, batch, key), weight=jnp.float32(0))

        rows, _ = trained(strategies.IPUStrategy(2), unweighted, zero_weight=SKIP)
        assert np.isnan([row.values["gradient_norm"] for row in rows]).tolist() == [True] * 8
        assert [row.values["weight_norm/b"] for row in rows] == [0] * 8

    def test_a_metric_of_the_loss_function_goes_before_a_norm_of_that_name(self):
        rows, _ = trained(
            strategies.IPUStrategy(2), lambda v, b, k: (loss_fn(v, b, k), {"gradient_norm": jnp.float32(7)})
        )
        assert {row.values["gradient_norm"] for row in rows} == {7.0}

    def test_variables_get_the_names_that_the_program_gives_last(self):
        strategy, kept = strategies.IPUStrategy(2), KeptRows()
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)})
        batch = {"x": jnp.ones((4, 3))}
        with strategies.metrics.open(kept, strategy=strategy, norms_every=1):
            for names in (None, ["bias", "kernel"]):
                trainer.variable_names = names
                state, _ = trainer.step(state, batch)
            trainer.variable_names = ["kernel"]
            with pytest.raises(ValueError, match="has 1 names, but 2 variables are trained: b, w; give each"):
                trainer.step(state, batch)
        found = [[name for name in row.values if name.startswith("weight_norm/")] for row in kept.rows]
        assert found == [["weight_norm/b", "weight_norm/w"], ["weight_norm/bias", "weight_norm/kernel"]]

    def test_distributions_that_are_left_out_take_no_memory(self, monkeypatch):
        monkeypatch.setattr(delivery_module, "EVERY_S", 600.0)  # nothing is written before the end
        monkeypatch.setattr(delivery_module, "MOST_DISTRIBUTIONS", 4)
        strategy = strategies.IPUStrategy(2)
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)})

        def alive():
            return sum(type(each) is Distribution for each in gc.get_objects())

        with strategies.metrics.open(KeptRows(), strategy=strategy, norms_every=1, histograms_every=1):
            before = alive()
            for _ in range(5):
                state, _ = trainer.step(state, {"x": jnp.ones((4, 3))})
            assert alive() - before == 4 + 4, "those of the first row, and of the last look"


class TestSettings:
    def test_closed_sinks_end_the_looks(self):
        strategy = strategies.IPUStrategy(2)
        trained(strategy)
        assert strategy.replicas.distributions is None

    def test_looks_end_with_the_last_sinks_that_ask_for_them(self):
        strategy = strategies.IPUStrategy(2)
        first, second = (strategies.metrics.open(KeptRows(), strategy=strategy, norms_every=2) for _ in range(2))
        first.close()
        assert strategy.replicas.distributions == DistributionSettings(2, 0)
        second.close()
        assert strategy.replicas.distributions is None

    def test_two_settings_of_a_strategy_are_refused(self):
        strategy = strategies.IPUStrategy(2)
        with (
            strategies.metrics.open(KeptRows(), strategy=strategy, norms_every=2),
            pytest.raises(ValueError, match="takes norms every 2 .* cannot take norms every 1"),
        ):
            strategies.metrics.open(KeptRows(), strategy=strategy, norms_every=1)
        assert strategy.replicas.sinks == []

    def test_looks_without_a_strategy_are_refused(self):
        with pytest.raises(ValueError, match="those of a strategy's trainers, and none is given; give a strategy"):
            strategies.metrics.open(KeptRows(), norms_every=1)

    def test_the_environment_asks_for_looks(self, monkeypatch):
        monkeypatch.setenv("POPDIST_NORMS_EVERY", "3")
        assert strategies.IPUStrategy(1).replicas.distributions == DistributionSettings(3, 0)


class TestCost:
    """A step that looks at nothing calls no function of looking."""

    CODE = str(Path(strategies.__file__).parent / "jax/updates/optimizers.py")
    FUNCTIONS = (layer_statistics, layer_names, squares_of_shards, squares_of_rows)
    LOOKING = {each.__code__ for each in (*FUNCTIONS, JaxEngine.layers, JaxEngine._divisor)}

    def calls(self, strategy, sink):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(optax.linear_schedule(0.1, 0.0, 9)))
        state = trainer.init({"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)})
        batch = {"x": jnp.ones((2 * len(strategy.local_replicas), 3))}
        opened = [strategies.metrics.open(KeptRows(), strategy=strategy, **sink)] if sink is not None else []
        for _ in range(3):
            state, _ = trainer.step(state, batch)
        found = []

        def see(frame, event, _):
            if event == "call" and (frame.f_code.co_filename == self.CODE or frame.f_code in self.LOOKING):
                found.append(frame.f_code.co_qualname)

        call_profiled(functools.partial(trainer.step, state, batch), see)
        for each in opened:
            each.close()
        return set(found)

    def test_steps_between_looks_stay_one_program(self, caplog):
        strategy, kept = strategies.IPUStrategy(1), KeptRows()
        dataset = strategy.distribute_dataset(ROWS, batch_size=4, seed=1)
        trainer = strategies.Trainer(strategy, lambda v, batch, key: jnp.mean(batch["x"] @ v) ** 2, optax.sgd(0.1))
        state = trainer.init(np.ones(3, np.float32))
        with (
            caplog.at_level(logging.INFO, "strategies.jax"),
            strategies.metrics.open(kept, strategy=strategy, norms_every=4),
        ):
            trainer.run(state, dataset, steps_per_execution=2)
        assert "steps are made in one program from step 2 on" in caplog.text
        assert ["gradient_norm" in row.values for row in kept.rows] == [True, False, False, False] * 2

    @pytest.mark.parametrize("replicas", first_of([2, 1]))
    def test_nothing_is_called_without_sinks(self, replicas):
        assert self.calls(strategies.IPUStrategy(replicas), None) == set()

    def test_only_learning_rates_are_read_for_sinks_alone(self):
        found = self.calls(strategies.IPUStrategy(2), {})
        assert found == {"LearningRates.of", "_in_reach", "LearningRates.of.<locals>.<listcomp>"} & found
        assert "LearningRates.of" in found

    def test_norms_are_looked_at_if_asked_for(self):
        assert "squares_of_rows" in self.calls(strategies.IPUStrategy(2), {"norms_every": 1})
