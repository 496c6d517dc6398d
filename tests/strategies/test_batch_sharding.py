"""Arguments of `strategy.run` on each replica: its rows of a batch, or the whole value."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from surviving_instances import run_instances

import strategies
from strategies import Masked
from strategies.jax.replicas.sharding import mirrored, replication_of

R = 4
SIZE = 3
ROWS = {
    "x": np.arange(2 * R * SIZE * 2, dtype=np.float32).reshape(-1, 2),
    "y": np.arange(2 * R * SIZE, dtype=np.int32),
}


def distribute(strategy, source=ROWS, **options):
    return strategy.distribute_dataset(source, batch_size=SIZE, shuffle=False, **options)


def first_batch(strategy, **options):
    return next(distribute(strategy, **options).epoch(0))


def rows_of(results):
    return [np.asarray(result).tolist() for result in results]


def expected(step=0):
    """Return the numbers of the rows of each replica."""
    return np.arange(step * R * SIZE, (step + 1) * R * SIZE).reshape(R, SIZE).tolist()


class TestBatches:
    """Batches of a distributed data set: each replica gets its rows, wherever the batch is nested."""

    @pytest.mark.parametrize("instances", [1, 2, 4])
    def test_batches_are_dealt_out_on_any_number_of_instances(self, on_instances, instances):
        def on_one(strategy):
            counted, steps = 0, []
            for batch in distribute(strategy).epoch(0):
                results = strategy.run(lambda batch: (batch["y"], jnp.int32(len(batch["x"]))), args=(batch,))
                counted += int(strategy.reduce("sum", strategies.PerReplica([rows for _, rows in results])))
                steps.append(rows_of(rows for rows, _ in results))
            return counted, steps

        found = on_instances(instances, R, on_one)
        assert [counted for counted, _ in found] == [len(ROWS["y"])] * instances
        for step in range(2):
            assert sum((steps[step] for _, steps in found), []) == expected(step)

    @pytest.mark.parametrize(
        ("give", "take"),
        [
            (lambda batch: ((batch, 1.0),), lambda pair: pair[0]["y"]),
            (lambda batch: (batch["y"],), lambda y: y),
            (lambda batch: ([{"inner": batch["y"]}, np.float32(2)],), lambda tree: tree[0]["inner"]),
            (lambda batch: (np.ones(5, np.float32), {**batch, "weights": np.float32(7)}), lambda _, batch: batch["y"]),
        ],
        ids=["with another value", "one array", "in another tree", "beside a shared array"],
    )
    def test_parts_of_batches_are_dealt_out_in_any_structure(self, strategy, give, take):
        assert rows_of(strategy.run(take, args=give(first_batch(strategy)))) == expected()

    def test_batches_are_dealt_out_as_keyword_arguments(self, strategy):
        results = strategy.run(
            lambda *, batch, scale: batch["y"] * scale, kwargs={"batch": first_batch(strategy), "scale": np.int32(1)}
        )
        assert rows_of(results) == expected()

    def test_batches_are_dealt_out_beside_values_per_replica(self, strategy):
        batch = first_batch(strategy)
        results = strategy.run(lambda tree: tree[0]["y"] - tree[1], args=((batch, strategy.per_replica(np.int32)),))
        assert rows_of(results) == (np.array(expected()) - np.arange(R)[:, None]).tolist()

    def test_padded_batches_come_with_masks_of_each_replica(self, strategy):
        source = {name: rows[: R * SIZE - 4] for name, rows in ROWS.items()}
        batch = first_batch(strategy, source=source, remainder="pad")
        results = strategy.run(lambda batch: batch, args=(batch,))
        assert all(isinstance(result, Masked) for result in results)
        assert rows_of(result.mask for result in results) == [[True] * 3, [True] * 3, [True, True, False], [False] * 3]
        assert np.asarray(results[1].values["y"]).tolist() == [3, 4, 5]

    def test_batches_have_the_micro_batches_of_each_replica(self, strategy):
        batch = first_batch(strategy, gradient_accumulation_count=2)
        results = strategy.run(lambda y: y, args=(batch["y"],))
        assert rows_of(results) == np.arange(2 * R * SIZE).reshape(R, 2 * SIZE).tolist()

    def test_batches_of_more_replicas_than_devices_are_dealt_out(self):
        strategy = strategies.IPUStrategy(12)
        dataset = strategy.distribute_dataset(np.arange(24, dtype=np.int32), batch_size=2, shuffle=False)
        results = strategy.run(lambda x: x, args=(next(dataset.epoch(0)),))
        assert rows_of(results) == [[2 * r, 2 * r + 1] for r in range(12)]

    def test_batches_stay_unchanged_outside_of_run(self, strategy):
        batch = first_batch(strategy)
        assert type(batch) is dict
        assert isinstance(batch["x"], jax.Array)
        assert (batch["x"] * 2).shape == (R * SIZE, 2)

    @pytest.mark.parametrize("instances", [1, 2])
    def test_batches_are_reduced_replica_by_replica(self, on_instances, instances):
        found = on_instances(instances, R, lambda strategy: strategy.reduce("sum", first_batch(strategy)["y"]).tolist())
        assert found == [np.sum(expected(), axis=0).tolist()] * instances

    def test_batches_are_assigned_to_per_replica_values_of_a_variable(self, strategy):
        variable = strategy.variable(np.zeros(SIZE, np.int32), "on_read", "sum")
        variable.assign(first_batch(strategy)["y"])
        assert rows_of(variable.values) == expected()


class TestOtherArrays:
    """Arrays as long as a batch, which may or may not be computed from one."""

    def test_arrays_as_long_as_a_batch_are_refused_with_two_ways_out(self, strategy):
        batch = first_batch(strategy)
        twice = batch["x"] * 2
        message = r"shape \[12, 2\] is as long as a batch for the 4 replicas .*strategy.dealt.*strategy.shared"
        for value in (twice, np.asarray(twice), {"x": twice, "y": batch["y"]}):
            with pytest.raises(ValueError, match=message):
                strategy.run(lambda x: x, args=(value,))
            with pytest.raises(ValueError, match=message):
                strategy.run(lambda x: x, kwargs={"x": value})
            with pytest.raises(ValueError, match=message):
                strategy.reduce("sum", value)
        assert [part.shape for part in strategy.run(lambda x: x, args=(strategy.dealt(twice),))] == [(SIZE, 2)] * R
        assert [part.shape for part in strategy.run(lambda x: x, args=(strategy.shared(twice),))] == [(12, 2)] * R

    def test_arrays_as_long_as_a_batch_are_refused_after_the_data_set_is_gone(self, strategy):
        twice = first_batch(strategy)["y"] * 2
        gc.collect()
        with pytest.raises(ValueError, match="as long as a batch"):
            strategy.run(lambda x: x, args=(twice,))

    @pytest.mark.parametrize("length", [0, 1, SIZE, R * SIZE - 1, 2 * R * SIZE])
    def test_arrays_of_other_lengths_go_whole_to_every_replica(self, strategy, length):
        first_batch(strategy)
        results = strategy.run(lambda x, n: x * n, args=(np.ones(length, np.float32), 2.0))
        assert [result.shape for result in results] == [(length,)] * R

    def test_one_replica_per_instance_gets_arrays_whole(self, on_instances):
        def on_one(strategy):
            own = first_batch(strategy)["y"] + 1
            return rows_of(strategy.run(lambda y: y - 1, args=(own,)))

        assert sum(on_instances(R, R, on_one), []) == expected()

    @pytest.mark.parametrize("on_host", [False, True])
    def test_arrays_of_mirrored_variables_go_whole_to_every_replica(self, on_instances, on_host):
        def on_one(strategy):
            variable = strategy.variable(np.ones(R * SIZE, np.float32))
            first_batch(strategy)
            for _ in range(2):
                results = strategy.run(lambda w: w, args=(variable.value,))
                variable.assign(np.asarray(variable.value) * 2)
            return [result.tolist() for result in results]

        assert on_instances(1, R, on_one, variables_on_host=on_host) == [[[2.0] * 12] * R]

    @pytest.mark.complete
    def test_arrays_of_a_trainers_state_are_known_while_the_state_lives(self, strategy):
        def loss_fn(variables, batch, key):
            return jnp.mean((batch["x"] @ jnp.ones(2) - variables["w"][batch["y"] % 12]) ** 2)

        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init({"w": np.zeros(R * SIZE, np.float32)})
        for step in range(2):
            assert len(strategy.run(lambda w: w, args=(state.variables["w"],))[0]) == R * SIZE
            state, _ = trainer.step(state, first_batch(strategy))
            assert state.step == step + 1
        left = state.variables["w"]
        del state
        gc.collect()
        with pytest.raises(ValueError, match="as long as a batch"):
            strategy.run(lambda w: w, args=(left,))

    def test_shared_and_dealt_work_inside_trees(self, strategy):
        batch = first_batch(strategy)
        tree = {"w": strategy.shared({"w": np.arange(12, dtype=np.int32)}), "y": strategy.dealt(batch["y"] + 0)}
        for rows, (whole, own) in zip(
            expected(), strategy.run(lambda t: (t["w"]["w"], t["y"]), args=(tree,)), strict=True
        ):
            assert (whole.tolist(), own.tolist()) == (list(range(12)), rows)

    def test_arrays_that_cannot_be_divided_are_not_dealt(self, strategy):
        with pytest.raises(ValueError, match=r"shape \[6\] for 4 local replicas; its first axis must be a multiple"):
            strategy.dealt(np.zeros(6))


class TestBatchesOfOthers:
    """Batches used on replicas other than those of their data set."""

    def test_batches_of_another_strategy_are_refused(self, strategy):
        theirs = first_batch(strategies.IPUStrategy(2))
        message = "the batch is dealt out among 2 replicas, but is used on 4 replicas; use batches"
        for use in (
            lambda: strategy.run(lambda b: b["x"], args=(theirs,)),
            lambda: strategy.reduce("sum", theirs),
            lambda: strategy.dealt(theirs),
            lambda: train(strategy, [theirs]),
        ):
            with pytest.raises(ValueError, match=message):
                use()

    def test_batches_of_a_strategy_with_the_same_replicas_are_accepted(self, strategy):
        theirs = first_batch(strategies.IPUStrategy(R))
        assert rows_of(strategy.run(lambda b: b["y"], args=(theirs,))) == expected()

    def test_batches_from_before_a_loss_are_refused(self):
        """Survivors drive twice the replicas, so earlier batches have half of the rows."""

        def on_one(strategy):
            kept, own = first_batch(strategy), strategy.per_replica(float)
            trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
            state = trainer.init({"w": jnp.zeros(2)})
            for batch in distribute(strategy).epoch(0):
                state, _ = trainer.step(state, batch)
            with pytest.raises(ValueError, match=r"among replicas \d to \d of 4, but is used on 4 replicas"):
                trainer.step(state, kept)
            with pytest.raises(ValueError, match=r"among replicas \d to \d of 4, but is used on 4 replicas"):
                strategy.run(lambda b: b["x"], args=(kept,))
            with pytest.raises(ValueError, match="a PerReplica has 2 values, but this instance has 4"):
                strategy.run(lambda x: x, args=(own,))
            return rows_of(strategy.run(lambda y: y, args=(first_batch(strategy)["y"],)))

        assert run_instances(2, R, on_one, ["kill:instance=1,step=1"]) == [expected(), None]

    def test_values_of_other_replicas_are_refused(self, on_instances, strategy):
        theirs = on_instances(2, 8, lambda own: own.per_replica(float))[1]
        assert list(theirs) == [4, 5, 6, 7]
        with pytest.raises(ValueError, match=r"to the replicas \[4, 5, 6, 7\], but this instance has \[0, 1, 2, 3\]"):
            strategy.run(lambda x: x, args=(theirs,))


def test_values_of_several_replicas_are_no_array_to_broadcast(strategy):
    values = strategy.per_replica(lambda r: np.full(2, r, np.float32))
    for call in (strategy.broadcast, strategy.variable):
        with pytest.raises(TypeError, match="a PerReplica has a value for each local replica, but broadcast sends one"):
            call({"w": values})
    assert strategy.broadcast({"w": values[1]})["w"].tolist() == [1, 1]


class TestReplicationOfArrays:
    def test_replication_does_not_keep_arrays_alive(self, strategy):
        batch = first_batch(strategy)
        assert replication_of(batch["x"]).local == range(R)
        gone = weakref.ref(batch["x"])
        del batch
        gc.collect()
        assert gone() is None

    def test_replication_of_most_arrays_is_unknown(self):
        known = mirrored({"w": np.ones(3)})
        assert replication_of(known["w"]) is None
        assert replication_of(7) is None


def loss_fn(variables, batch, key):
    return jnp.mean((batch["x"] @ variables["w"] - batch["y"]) ** 2), {}


def train(strategy, batches):
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    state = trainer.init({"w": jnp.zeros(2)})
    for batch in batches:
        state, _ = trainer.step(state, batch)
    return state
