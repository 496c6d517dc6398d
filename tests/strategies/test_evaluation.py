"""Evaluation and prediction over every row once, with the same bits on any number of instances."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy
from feed_data import Unsized
from tiers import first_of, only

import collectives
import strategies
from collectives.backends.thread import run_on_threads
from collectives.instruments import Instruments
from popdist import Instance
from strategies import DisagreementError, Masked, Mean, Outcome, PerReplica, Trainer

REPLICAS = 4
LENGTHS = (1, 2, 5, 63)
VARIABLES = {"w": np.float32([1, -2, 3])}
DRAWN = {"w": np.float32([0.3, -1.7, 0.9])}


def rows_of(length, integers=True):
    """Return rows of small integers, whose sums of squares are exact in float32, or of any numbers."""
    random = np.random.default_rng(length)
    x = random.integers(-3, 4, (length, 3)) if integers else random.standard_normal((length, 3))
    y = random.integers(-3, 4, length) if integers else random.standard_normal(length)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


class Records:
    """A source with random access to rows."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows["y"])

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        return {name: leaf[index] for name, leaf in self.rows.items()}


class Shards(Records):
    """A source whose shard i of n has rows i, i + n, ...; the length is unknown until the end."""

    __len__ = None

    def shard(self, n, i):
        return Unsized([Records(self.rows)[row] for row in range(i, len(self.rows["y"]), n)])


def listed(rows):
    records = Records(rows)
    return [records[row] for row in range(len(records))]


KINDS = {
    "arrays": lambda rows: rows,
    "records": Records,
    "list": listed,
    "stream": lambda rows: Unsized(listed(rows)),
}
"""Sources with a fixed order of rows."""


def cut(rows, start, stop):
    return jax.tree.map(lambda leaf: leaf[start:stop], rows)


def loss_fn(variables, batch, key):
    error = batch["x"] @ variables["w"] - batch["y"]
    return jnp.mean(error**2), {"positive": (error > 0).mean()}


def outputs_fn(variables, batch, key):
    loss, metrics = loss_fn(variables, batch, key)
    score = batch["x"] @ variables["w"]
    return Outcome(loss, metrics, outputs={"score": score, "is_large": score > 1})


def expected_of(rows, variables=VARIABLES):
    error = rows["x"].astype(np.float64) @ variables["w"] - rows["y"]
    return {"loss": (error**2).mean(), "positive": (error > 0).mean()}


def trainer_of(strategy, function=loss_fn, variables=VARIABLES, **options):
    trainer = Trainer(strategy, function, optax.sgd(0.1), **options)
    return trainer, trainer.init(variables)


def distributed(strategy, source, batch_size=3, **options):
    return strategy.distribute_dataset(source, batch_size, **{"shuffle": False, "remainder": "pad"} | options)


def evaluated(strategy, source, function=loss_fn, variables=VARIABLES, **options):
    trainer, state = trainer_of(strategy, function, variables)
    return trainer.evaluate(state, distributed(strategy, source), **options)


def predicted(strategy, source, function=outputs_fn, variables=VARIABLES, **options):
    trainer, state = trainer_of(strategy, function, variables)
    return list(trainer.predict(state, distributed(strategy, source), **options))


def joined(batches):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def bits_of(evaluation):
    return {
        name: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(one)] for name, one in evaluation.merged.items()
    }


class TestEveryRowCountsOnce:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_source_and_length_counts_each_row_once(self, strategy, kind, length):
        rows = rows_of(length)
        found = evaluated(strategy, KINDS[kind](rows))
        assert dict(found) == expected_of(rows)
        assert found.rows == length
        assert list(found) == ["loss", "positive"]

    def test_records_of_grain_count_once(self, strategy):
        grain = pytest.importorskip("grain")
        rows = rows_of(5)
        assert dict(evaluated(strategy, grain.MapDataset.source(Records(rows)))) == expected_of(rows)

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_short_last_batch_counts_each_row_once(self, strategy, length):
        rows = rows_of(length)
        trainer, state = trainer_of(strategy)
        batches = [cut(rows, start, start + 12) for start in range(0, length, 12)]
        assert dict(trainer.evaluate(state, batches)) == expected_of(rows)

    def test_batches_of_an_epoch_read_by_hand_count_each_row_once(self, strategy):
        rows = rows_of(5)
        trainer, state = trainer_of(strategy)
        assert dict(trainer.evaluate(state, distributed(strategy, rows).epoch(0))) == expected_of(rows)

    def test_a_data_set_without_a_remainder_needs_no_padding(self, strategy):
        rows = rows_of(24)
        trainer, state = trainer_of(strategy)
        assert dict(trainer.evaluate(state, strategy.distribute_dataset(rows, 3))) == expected_of(rows)

    def test_evaluation_reads_the_rest_of_an_epoch_and_then_the_next_one(self, strategy):
        rows = rows_of(30)
        trainer, state = trainer_of(strategy)
        dataset = distributed(strategy, rows)
        begun = dataset.epoch(0)
        next(begun)
        begun.close()
        rest = cut(rows, 12, 30)
        assert dict(trainer.evaluate(state, dataset)) == expected_of(rest)
        assert (dataset.position().epoch, dataset.position().step) == (1, 0)
        assert dict(trainer.evaluate(state, dataset)) == expected_of(rows)

    def test_padding_elements_never_affect_the_result(self, strategy):
        """The repeated element is NaN."""
        rows = {"x": np.float32([[np.nan, 0, 0]]), "y": np.float32([1])}
        source = PerReplica([Unsized(listed(one)) for one in (rows_of(4), rows_of(3), rows_of(2), rows_of(1))])
        found = evaluated(strategy, source)
        together = joined([rows_of(length) for length in (4, 3, 2, 1)])
        assert dict(found) == expected_of(together)
        assert np.isnan(evaluated(strategy, rows)["loss"])  # a NaN that counts shows

    def test_sums_are_as_good_as_float64(self, strategy):
        """Float32 would lose the fours beside 2**28."""
        x = np.ones((4001, 3), np.float32)
        rows = {"x": x, "y": np.zeros(4001, np.float32)}
        rows["x"][0] *= 8192
        total = evaluated(strategy, rows).merged["loss"].total
        assert total == (2.0 * 8192) ** 2 + 4 * 4000


class TestTheBits:
    ROWS = rows_of(63, integers=False)

    @staticmethod
    def found(strategy, source, to_all=True):
        evaluation = evaluated(strategy, source, variables=DRAWN)
        by_batch = evaluated(strategy, source, variables=DRAWN, metrics_fn=metrics_fn)
        outputs = predicted(strategy, source, variables=DRAWN, to_all=to_all)
        return bits_of(evaluation), bits_of(by_batch), [jax.tree.map(np.ndarray.tobytes, batch) for batch in outputs]

    @pytest.mark.parametrize(
        "kind",
        only(["stream"], KINDS),
    )
    def test_bits_are_the_same_on_any_number_of_instances(self, strategy, on_instances, kind):
        alone = self.found(strategy, KINDS[kind](self.ROWS))
        for instances in (2, 4):
            everywhere = on_instances(instances, REPLICAS, lambda one: self.found(one, KINDS[kind](self.ROWS)))
            assert everywhere == [alone] * instances

    def test_bits_are_the_same_for_shards_that_end_early_on_one_instance(self, strategy, on_instances):
        rows = rows_of(31, integers=False)
        alone = self.found(strategy, Shards(rows))
        assert on_instances(4, REPLICAS, lambda one: self.found(one, Shards(rows))) == [alone] * 4

    @pytest.mark.parametrize("length", LENGTHS)
    def test_bits_are_the_same_for_given_batches(self, strategy, on_instances, length):
        """Each instance has its part of every batch; the last part may be empty."""
        rows = rows_of(length, integers=False)

        def found(strategy):
            trainer, state = trainer_of(strategy, outputs_fn, DRAWN)
            local = 3 * len(strategy.local_replicas)
            begin = 3 * strategy.local_replicas[0]
            starts = range(begin, max(length, begin + 1), 12)
            parts = [cut(rows, start, start + local) for start in starts]
            parts = [part for part in parts if len(part["y"])] or [jax.tree.map(lambda leaf: leaf[:1] * 0, rows)]
            if not len(rows["y"]) > begin:
                parts = [Masked(parts[0], np.zeros(1, bool))]
            outputs = list(trainer.predict(state, parts))
            evaluation = trainer.evaluate(state, parts)
            return bits_of(evaluation), [jax.tree.map(np.ndarray.tobytes, batch) for batch in outputs]

        assert on_instances(2, REPLICAS, found) == [found(strategy)] * 2

    def test_bits_do_not_depend_on_concurrent_batches(self, strategy):
        """Three batches run concurrently, and sums follow the order of the data."""
        trainer, state = trainer_of(strategy, variables=DRAWN)
        once, again = (trainer.evaluate(state, distributed(strategy, self.ROWS, 1)) for _ in range(2))
        assert bits_of(once) == bits_of(again)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Largest:
    """The largest score of the rows, with the number of merged parts."""

    score: jax.Array
    parts: jax.Array

    def merge(self, other):
        return Largest(np.maximum(self.score, other.score), self.parts + other.parts)


def metrics_fn(variables, batch, mask, key):
    error = batch["x"] @ variables["w"] - batch["y"]
    largest = Largest(jnp.where(mask, jnp.abs(error), -1).max(), jnp.int32(1))
    return {"loss": Mean.of(error**2, mask), "largest": largest}


class TestMetricsOfBatches:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_metrics_are_merged_from_sums_and_counts(self, strategy, length):
        rows = rows_of(length)
        assert evaluated(strategy, rows, metrics_fn=metrics_fn)["loss"] == expected_of(rows)["loss"]

    def test_metrics_can_be_any_object_that_merges(self, strategy):
        rows = rows_of(63)
        largest = evaluated(strategy, rows, metrics_fn=metrics_fn)["largest"]
        assert largest.score == np.abs(rows["x"] @ VARIABLES["w"] - rows["y"]).max()
        assert largest.parts == 4 * 6  # for each replica and each of six batches

    def test_metrics_can_have_weights(self, strategy):
        rows = rows_of(5)
        weights = np.float32([1, 0, 2, 0.5, 4])

        def weighted(variables, batch, mask, key):
            return {"y": Mean.of(batch["y"], batch["weight"] * mask)}

        found = evaluated(strategy, {**rows, "weight": weights}, metrics_fn=weighted)
        assert found["y"] == (rows["y"] * weights).sum() / weights.sum()

    def test_metrics_can_contain_collectives(self, strategy, on_instances):
        def shared(variables, batch, mask, key):
            rows = strategies.get_replica_context().all_reduce("sum", mask.sum())
            return {"rows of all": Mean(rows.astype(jnp.float32), jnp.float32(1))}

        def total(strategy):
            return evaluated(strategy, rows_of(63), metrics_fn=shared).merged["rows of all"].total

        assert total(strategy) == 4 * 63
        assert on_instances(2, REPLICAS, total) == [4 * 63] * 2

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (lambda batch: batch["y"].mean(), "metrics_fn returns a .*; it must return a dictionary"),
            (lambda batch: {"y": batch["y"].mean()}, "metric 'y' of metrics_fn is a .*return a strategies.Mean"),
        ],
    )
    def test_metrics_that_cannot_be_merged_are_refused(self, strategy, returned, message):
        with pytest.raises(TypeError, match=message):
            evaluated(strategy, rows_of(5), metrics_fn=lambda variables, batch, mask, key: returned(batch))

    def test_metrics_come_from_a_function_of_four_arguments(self, strategy):
        with pytest.raises(TypeError, match=r"metrics_fn takes \(variables, batch, key\), but is called with"):
            evaluated(strategy, rows_of(5), metrics_fn=lambda variables, batch, key: {})
        with pytest.raises(TypeError, match="metrics_fn is a str; use a function"):
            evaluated(strategy, rows_of(5), metrics_fn="loss")

    def test_fn_and_metrics_fn_exclude_each_other(self, strategy):
        with pytest.raises(ValueError, match="evaluate got both fn and metrics_fn"):
            evaluated(strategy, rows_of(5), fn=loss_fn, metrics_fn=metrics_fn)


class TestTheFunction:
    def test_another_function_can_replace_the_loss_function(self, strategy):
        found = evaluated(strategy, rows_of(5), fn=lambda variables, batch, key: batch["y"].sum())
        assert dict(found) == {"loss": rows_of(5)["y"].mean()}

    def test_the_function_sees_one_row_at_a_time(self, strategy):
        found = evaluated(strategy, rows_of(5), fn=lambda variables, batch, key: jnp.float32(len(batch["y"])))
        assert found["loss"] == 1

    def test_the_function_gets_the_key_of_the_seed_alone(self, strategy):
        def drawn(variables, batch, key):
            return jax.random.uniform(key), {"squared": jax.random.uniform(key) ** 2}

        trainer, state = trainer_of(strategy, seed=7)
        found = trainer.evaluate(state, distributed(strategy, rows_of(63)), drawn)
        wanted = np.float64(jax.random.uniform(jax.random.key(7)))
        assert abs(found["loss"] - wanted) < 1e-12
        assert abs(found["squared"] - wanted**2) < 1e-7

    def test_the_function_computes_in_the_dtype_of_the_trainer(self, strategy):
        def is_bfloat16(variables, batch, key):
            both = variables["w"].dtype == batch["x"].dtype == jnp.bfloat16
            return jnp.float32(both)

        trainer, state = trainer_of(strategy, is_bfloat16, compute_dtype="bfloat16")
        assert trainer.evaluate(state, distributed(strategy, rows_of(5)))["loss"] == 1

    def test_the_function_can_cast_its_batches(self, strategy):
        """Training and evaluation share this cast of images that are bytes."""
        cast = strategies.casting(lambda v, batch, key: batch.mean(), strategies.Cast(jnp.float32, scale=0.5))
        assert evaluated(strategy, np.arange(5, dtype=np.uint8), cast)["loss"] == 1.0

    def test_the_function_is_compiled_once_for_a_shape(self, strategy):
        traced = []

        def counting(variables, batch, key):
            traced.append(1)
            return batch["y"].mean()

        trainer, state = trainer_of(strategy)
        dataset = distributed(strategy, rows_of(63))
        trainer.evaluate(state, dataset, counting)
        once = len(traced)
        trainer.evaluate(state, dataset, counting)
        assert len(traced) == once

    @pytest.mark.parametrize(
        ("function", "error", "message"),
        [
            (lambda v, batch, key: batch["x"].mean(0), TypeError, r"the loss of a batch of one row is of shape \[3\]"),
            (lambda v, batch, key: (1.0, {"x": batch["x"]}), TypeError, r"metric 'x' is of shape \[1, 3\]"),
            (lambda v, batch, key: (1.0, {"loss": 1.0}), TypeError, "a metric is called 'loss'"),
            (lambda v, batch, key: batch["z"].mean(), ValueError, "asks for 'z', .* the batch has 'x', 'y'"),
            (lambda v, batch: 1.0, TypeError, r"the loss function takes \(v, batch\)"),
        ],
    )
    def test_unsuitable_functions_are_refused(self, strategy, function, error, message):
        with pytest.raises(error, match=message):
            evaluated(strategy, rows_of(5), fn=function)

    def test_a_function_with_collectives_needs_whole_batches(self, strategy):
        def meeting(variables, batch, key):
            return strategies.get_replica_context().all_reduce("mean", batch["y"].mean())

        with pytest.raises(ValueError, match="has collectives, and evaluate calls it for each row alone; .*metrics_fn"):
            evaluated(strategy, rows_of(5), fn=meeting)

    def test_a_function_with_feeds_is_refused(self, strategy):
        outfeed = strategies.OutfeedQueue()

        def feeding(variables, batch, key):
            outfeed.enqueue(variables["w"])
            return batch["y"].mean()

        with pytest.raises(ValueError, match="has feeds, which only training has"):
            evaluated(strategy, rows_of(5), fn=feeding)

    def test_an_error_of_the_function_is_raised(self, strategy):
        def fail(values):
            raise OSError("no such file")

        def failing(variables, batch, key):
            return jax.pure_callback(
                fail, jax.ShapeDtypeStruct((), jnp.float32), batch["y"][0], vmap_method="sequential"
            )

        with pytest.raises(jax.errors.JaxRuntimeError, match="no such file"):
            evaluated(strategy, rows_of(63), fn=failing)
        assert evaluated(strategy, rows_of(5))["loss"] == expected_of(rows_of(5))["loss"]


class TestTheState:
    def test_the_state_stays_unchanged(self, strategy, bits):
        trainer, state = trainer_of(strategy, outputs_fn)
        dataset = distributed(strategy, rows_of(63))
        trainer.evaluate(state, dataset)
        list(trainer.predict(state, dataset))
        after, _ = trainer.step(state, cut(rows_of(63), 0, 12))
        assert after.step == 1

    def test_evaluating_during_training_changes_no_bit(self, strategy, bits):
        """The evaluation runs between executions of `run`."""
        training = strategy.distribute_dataset(rows_of(48, integers=False), 3)
        validation = distributed(strategy, rows_of(5))
        found = []
        trainer, state = trainer_of(strategy)
        state, _ = trainer.run(state, training, 2, lambda state, _: found.append(trainer.evaluate(state, validation)))
        wanted, state_of_wanted = trainer_of(strategy)
        wanted_state, _ = wanted.run(state_of_wanted, strategy.distribute_dataset(rows_of(48, integers=False), 3))
        assert bits(state.variables["w"]) == bits(wanted_state.variables["w"])
        assert len(found) == 2
        assert found[0]["loss"] != found[1]["loss"]

    def test_a_used_up_state_is_refused(self, strategy):
        trainer, state = trainer_of(strategy, outputs_fn)
        dataset = distributed(strategy, rows_of(63))
        predictions = trainer.predict(state, dataset)
        next(predictions)
        trainer.step(state, cut(rows_of(63), 0, 12))
        with pytest.raises(ValueError, match="this state was used up by step 0"):
            list(predictions)
        with pytest.raises(ValueError, match="this state was used up by step 0"):
            trainer.evaluate(state, dataset)

    def test_variables_in_place_of_a_state_are_refused(self, strategy):
        trainer, state = trainer_of(strategy)
        with pytest.raises(TypeError, match="the state is of type dict"):
            trainer.evaluate(state.variables, distributed(strategy, rows_of(5)))

    def test_a_sharded_state_is_evaluated(self, on_instances):
        rows = rows_of(63)

        def program(strategy):
            trainer, state = trainer_of(strategy, replicated_optimizer_state_sharding=True)
            return dict(trainer.evaluate(state, distributed(strategy, rows)))

        assert on_instances(2, REPLICAS, program) == [expected_of(rows)] * 2


class TestPredictions:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_predictions_come_in_the_order_of_the_data(self, strategy, kind, length):
        rows = rows_of(length)
        batches = predicted(strategy, KINDS[kind](rows))
        assert [len(batch["score"]) for batch in batches] == [12] * (length // 12) + [length % 12]
        found = joined(batches)
        assert found["score"].tolist() == (rows["x"] @ VARIABLES["w"]).tolist()
        assert found["is_large"].dtype == bool
        assert found["is_large"].tolist() == (found["score"] > 1).tolist()

    def test_predictions_are_the_results_of_the_function(self, strategy):
        rows = rows_of(5)
        [found] = predicted(strategy, rows, loss_fn, fn=lambda variables, batch, key: batch["x"].astype(jnp.bfloat16))
        assert found.dtype == jnp.bfloat16
        assert found.astype(np.float32).tolist() == rows["x"].tolist()

    def test_predictions_run_three_batches_ahead(self, strategy):
        """Replicas need not wait, and outputs need not fit into memory."""
        taken = []

        def elements():
            for row in listed(rows_of(63)) * 10:
                taken.append(1)
                yield row

        class Endless:
            __iter__ = staticmethod(elements)

        trainer, state = trainer_of(strategy, outputs_fn)
        predictions = trainer.predict(state, distributed(strategy, Endless(), prefetch=0))
        next(predictions)
        assert len(taken) == 3 * 12
        next(predictions)
        assert len(taken) == 4 * 12
        predictions.close()

    def test_predictions_left_early_keep_the_position_of_the_data_set(self, strategy):
        rows = rows_of(63)
        trainer, state = trainer_of(strategy, outputs_fn)
        dataset = distributed(strategy, rows)
        predictions = trainer.predict(state, dataset)
        first = [next(predictions), next(predictions)]
        predictions.close()
        assert (dataset.position().epoch, dataset.position().step) == (0, 2)
        rest = list(trainer.predict(state, dataset))
        assert joined(first + rest)["score"].tolist() == (rows["x"] @ VARIABLES["w"]).tolist()

    def test_predictions_can_go_to_instance_0_alone(self, on_instances):
        rows = rows_of(63)
        first, *others = on_instances(3, 3, lambda one: predicted(one, rows, to_all=False))
        assert joined(first)["score"].tolist() == (rows["x"] @ VARIABLES["w"]).tolist()
        assert others == [[None] * len(first)] * 2

    def test_predictions_of_a_shuffled_data_set_are_refused(self, strategy):
        trainer, state = trainer_of(strategy, outputs_fn)
        with pytest.raises(ValueError, match="the data set is shuffled, .*shuffle=False"):
            trainer.predict(state, distributed(strategy, rows_of(5), shuffle=True))

    @pytest.mark.parametrize(
        ("function", "error", "message"),
        [
            (lambda v, batch, key: None, ValueError, "fn returns no outputs to predict"),
            (lambda v, batch, key: Outcome(1.0), ValueError, "fn returns no outputs to predict"),
            (lambda v, batch, key: {"w": v["w"]}, ValueError, r"outputs\['w'\] is of shape \[3\] for 2 rows"),
            (lambda v, batch, key: batch["y"].sum(), ValueError, r"outputs is of shape \[\] for 2 rows"),
            (lambda v, batch, key: jax.random.split(key, 2), TypeError, "outputs is a random key"),
        ],
    )
    def test_outputs_that_are_not_per_row_are_refused(self, strategy, function, error, message):
        trainer, state = trainer_of(strategy)
        with pytest.raises(error, match=message):
            list(trainer.predict(state, distributed(strategy, rows_of(5), 2), function))

    def test_predictions_by_a_loss_function_need_an_outcome(self, strategy):
        with pytest.raises(ValueError, match=r"the loss function returns no outputs .* strategies.Outcome"):
            predicted(strategy, rows_of(5), loss_fn)


class TestRefusedDataSets:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"remainder": "drop"}, "drops 3 rows that do not fill a batch of 12, .*remainder='pad'"),
            ({"gradient_accumulation_count": 2}, "batches of 2 micro-batches, which are for training only"),
        ],
    )
    def test_data_sets_that_drop_rows(self, strategy, options, message):
        trainer, state = trainer_of(strategy)
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(state, distributed(strategy, rows_of(63), **options))

    def test_data_sets_that_may_drop_rows_unnoticed(self, strategy):
        trainer, state = trainer_of(strategy)
        with pytest.raises(ValueError, match="drops rows that do not fill a batch of 12"):
            trainer.evaluate(state, distributed(strategy, Unsized(listed(rows_of(24))), remainder="drop"))

    @pytest.mark.parametrize("data", [rows_of(5), rows_of(5)["x"], (rows_of(5)["x"],), "rows"])
    def test_values_that_are_no_batches(self, strategy, data):
        trainer, state = trainer_of(strategy)
        with pytest.raises(
            TypeError, match=r"which does not consist of batches; give the result of strategy.distribute_dataset"
        ):
            trainer.evaluate(state, data)

    def test_empty_data_sets(self, strategy):
        trainer, state = trainer_of(strategy)
        with pytest.raises(TypeError, match="is a int, not an iterable of batches"):
            trainer.evaluate(state, 3)
        with pytest.raises(ValueError, match="there is no row to evaluate"):
            trainer.evaluate(state, [])

    @pytest.mark.parametrize(
        ("batches", "message"),
        [
            (
                [rows_of(8), rows_of(12)],
                "batch 1 has 3 rows for each replica, but the first batch has 2; .*begin with the",
            ),
            ([rows_of(8), {"x": rows_of(8)["x"]}], "batch 1 has rows of other structure"),
            ([rows_of(8), rows_of(8) | {"y": np.ones((8, 2), np.float32)}], "batch 1 has rows of other structure"),
            ([{**rows_of(8), "scale": np.float32(2)}], r"in batch 0 .*batch\['scale'\] is of shape \[\]"),
            ([{**rows_of(8), "table": np.ones(3)}], r"in batch 0 .*batch\['table'\] is of shape \[3\]"),
            ([cut(rows_of(8), 0, 0)], "first batch of instances \\[0\\] has no row"),
            ([{}], "batch 0 has no arrays"),
        ],
    )
    def test_data_sets_with_different_batches(self, strategy, batches, message):
        trainer, state = trainer_of(strategy)
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(state, batches)

    def test_data_sets_of_another_strategy(self, strategy):
        trainer, state = trainer_of(strategy)
        with pytest.raises(ValueError, match="the batch is dealt out among"):
            trainer.evaluate(state, distributed(strategies.IPUStrategy(2), rows_of(5)))

    def test_data_sets_without_rows_on_one_instance(self, on_instances):
        def program(strategy):
            trainer, state = trainer_of(strategy)
            with pytest.raises(ValueError, match=r"first batch of instances \[1\] has no row"):
                trainer.evaluate(state, [rows_of(4)] if strategy.is_chief else [])

        on_instances(2, 2, program)

    def test_data_sets_without_elements_for_padding(self, on_instances):
        def program(strategy):
            source = PerReplica([Unsized(listed(rows_of(4)) if strategy.is_chief else [])])
            with pytest.raises(ValueError, match="instance 1 of 2 can read nothing at step 0 of epoch 0"):
                evaluated(strategy, source)

        on_instances(2, 2, program)


class TestInstances:
    def test_instances_agree_on_the_evaluated_function(self, on_instances):
        def program(strategy):
            own = 1.0 + strategy.instance_index
            with pytest.raises(DisagreementError, match="computes the evaluation differently from instance 0"):
                evaluated(strategy, rows_of(5), fn=lambda variables, batch, key: batch["y"].sum() * own)

        on_instances(2, REPLICAS, program)

    @pytest.mark.parametrize(("lengths", "remainder"), [((5, 6), "pad"), ((12, 24), "drop")])
    def test_instances_agree_on_the_data_set(self, on_instances, lengths, remainder):
        def program(strategy):
            trainer, state = trainer_of(strategy)
            dataset = distributed(strategy, rows_of(lengths[strategy.instance_index]), remainder=remainder)
            with pytest.raises(DisagreementError, match="data set length"):
                trainer.evaluate(state, dataset)

        on_instances(2, REPLICAS, program)

    def test_instances_can_have_different_numbers_of_batches(self, on_instances):
        """In training, the result of `distribute_datasets_from_function` ends with the first instance."""
        rows = rows_of(12)

        def program(strategy):
            mine = (0, 8) if strategy.is_chief else (8, 12)
            part = cut(rows, *mine)
            batches = strategy.distribute_datasets_from_function(
                lambda context: [cut(part, at, at + 4) for at in range(0, len(part["y"]), 4)]
            )
            trainer, state = trainer_of(strategy)
            return dict(trainer.evaluate(state, batches))

        assert on_instances(2, REPLICAS, program) == [expected_of(rows)] * 2

    def test_instances_record_the_batch_they_evaluate(self):
        """The progress record names the calls, so that a hanging job can be diagnosed."""
        notes = Notes()

        def program(communicator):
            strategy = ConnectedStrategy(Instance(communicator.rank, 2, 2, communicator.rank * 2, 4, 0), communicator)
            evaluated(strategy, rows_of(13))

        run_on_threads(2, program, collectives.Settings(progress=Instruments(notes)))
        wanted = [f"all_gather 'evaluation at step 0, batch {number}'" for number in (0, 1)]
        assert [label for label in notes.labels if "evaluation" in label] == [
            label for label in [*wanted, "barrier 'end of evaluation at step 0'"] for _ in range(2)
        ]


class Notes:
    """An observer that keeps the names of collectives."""

    def __init__(self):
        self.labels = []

    def operation_begins(self, number, call):
        self.labels.append(call.title)


@pytest.mark.parametrize("replicas", first_of([4, 1]))
def test_evaluating_between_executions_of_run_changes_no_step_and_no_result(replicas):
    """One replica makes its steps in one program."""
    rows = rows_of(24, integers=False)

    def trained(in_executions, evaluates):
        strategy = strategies.IPUStrategy(replicas)
        trainer, state = trainer_of(strategy, outputs_fn, DRAWN)
        found = []

        def look(state, _):
            if evaluates:
                found.append(bits_of(trainer.evaluate(state, distributed(strategy, rows, 2))))
                outputs = list(trainer.predict(state, distributed(strategy, rows, 2)))
                found.append(joined(outputs)["score"].tobytes())

        batches = [cut(rows, start, start + 4) for _ in range(2) for start in range(0, 24, 4)]
        if in_executions:
            state, _ = trainer.run(state, batches, 3, look)
        else:
            for number, batch in enumerate(batches, 1):
                state, metrics = trainer.step(state, batch)
                if number % 3 == 0:
                    look(state, metrics)
        return strategies.fingerprint(state.variables), found

    bits, found = trained(in_executions=True, evaluates=True)
    assert (bits, found) == trained(in_executions=False, evaluates=True)
    assert len(found) == 8
    assert bits == trained(in_executions=True, evaluates=False)[0]
