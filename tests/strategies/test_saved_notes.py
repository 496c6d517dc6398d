"""Notes in checkpoints: extra values, the best checkpoints, variables without a Trainer, and own loops."""

import json
import logging
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import Best, CheckpointError, Checkpoints, OwnLoop, Trainer, TrainState
from strategies.checkpoints import checkpoint_folder

pytest.importorskip("orbax.checkpoint")

BATCH = np.ones((8, 3), np.float32)


def error_of(variables, batch, key):
    return jnp.mean((batch @ variables["w"]) ** 2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step_names(*steps):
    return [f"step_{step:08d}" for step in steps]


def known(folder, step):
    return json.loads((folder / f"step_{step:08d}" / "training.json").read_text())


@pytest.fixture
def training(strategy):
    """Provide a trainer and its first state."""
    trainer = Trainer(strategy, error_of, optax.sgd(0.1))
    return trainer, trainer.init({"w": jnp.ones(3)})


def save_with(training, folder, metrics, **options):
    """Save each step with its metrics, and return the names of the remaining checkpoints."""
    trainer, state = training
    with Checkpoints(folder, trainer, **options) as checkpoints:
        for each in metrics:
            state, _ = trainer.step(state, BATCH)
            checkpoints.save(state, metrics=each)
    return names(folder)


class TestExtra:
    def test_extra_values_are_saved_and_restored_on_all_instances(self, tmp_path, on_instances):
        def saved(strategy, values):
            trainer = Trainer(strategy, error_of, optax.sgd(0.1))
            with Checkpoints(tmp_path, trainer) as checkpoints:
                state = checkpoints.restore(trainer.init({"w": jnp.ones(3)}))
                found = checkpoints.extra
                state, _ = trainer.step(state, BATCH[:4])
                checkpoints.save(state, extra=values and {**values, "instance": strategy.instance_index})
            return found

        assert on_instances(2, 4, lambda strategy: saved(strategy, {"best": 0.5})) == [{}, {}]
        assert on_instances(2, 4, lambda strategy: saved(strategy, None)) == [{"best": 0.5, "instance": 0}] * 2
        assert on_instances(2, 4, lambda strategy: saved(strategy, {})) == [{"best": 0.5, "instance": 0}] * 2

    def test_extra_values_stay_until_other_values_are_given(self, tmp_path, training):
        trainer, state = training
        with Checkpoints(tmp_path, trainer, every=1) as checkpoints:
            for extra in (None, {"best": 1}, None, {"best": 2, "stopped": True}):
                state, _ = trainer.step(state, BATCH)
                checkpoints.after_step(state, extra=extra)
                checkpoints.wait()
            checkpoints.extra["best"] = 3
            state, _ = trainer.step(state, BATCH)
            checkpoints.save(state)
        found = [known(tmp_path, step)["extra"] for step in (3, 4, 5)]
        assert found == [{"best": 1}, {"best": 2, "stopped": True}, {"best": 3, "stopped": True}]

    def test_extra_values_are_saved_on_a_termination_signal(self, tmp_path, training):
        trainer, state = training
        with Checkpoints(tmp_path, trainer, every=100) as checkpoints:
            os.kill(os.getpid(), signal.SIGTERM)
            state, metrics = trainer.step(state, BATCH)
            with pytest.raises(SystemExit):
                checkpoints.after_step(state, extra={"stopped": True}, metrics=metrics)
        assert known(tmp_path, 1)["extra"] == {"stopped": True}
        assert known(tmp_path, 1)["metrics"] == {"loss": 9.0}

    def test_extra_values_that_cannot_be_saved_are_refused_and_training_continues(self, tmp_path, training):
        trainer, state = training
        with Checkpoints(tmp_path, trainer) as checkpoints:
            with pytest.raises(TypeError, match=r"extra\['w'\] cannot be saved"):
                checkpoints.save(state, extra={"w": np.ones(3)})
            checkpoints.save(trainer.step(state, BATCH)[0])
        assert names(tmp_path) == step_names(1)

    def test_older_checkpoints_have_no_extra_values(self):
        text = json.dumps({"step": 1, "replicas": 2, "seed": 0, "position": None, "packing": []})
        assert checkpoint_folder.SavedTraining.from_json(text).extra == {}


class TestASavedStep:
    def test_a_saved_step_is_saved_again_with_later_notes(self, tmp_path, training):
        trainer, state = training
        with Checkpoints(tmp_path, trainer, every=1) as checkpoints:
            state, _ = trainer.step(state, BATCH)
            checkpoints.after_step(state, extra={"best": 0})
            checkpoints.save(state, metrics={"accuracy": 0.5})
            checkpoints.save(state, extra={"best": 1})
        assert names(tmp_path) == step_names(1)
        assert (known(tmp_path, 1)["metrics"], known(tmp_path, 1)["extra"]) == ({"accuracy": 0.5}, {"best": 1})

    def test_a_saved_step_stays_intact_if_saving_again_fails(self, tmp_path, training, monkeypatch, caplog):
        trainer, state = training
        with Checkpoints(tmp_path, trainer) as checkpoints:
            checkpoints.save(state)
            checkpoints.wait()
            monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2))
            checkpoints.save(state, metrics={"accuracy": 0.5})
        assert "2 are free; training goes on, and step 0 is kept" in caplog.text
        assert names(tmp_path) == step_names(0)

    def test_a_step_is_found_if_the_writer_ended_during_the_rename(self, tmp_path, training):
        trainer, state = training
        save_with(training, tmp_path, [{}])
        (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.replaced")
        with Checkpoints(tmp_path, trainer) as checkpoints:
            assert checkpoints.restore(trainer.init({"w": jnp.ones(3)})).step == 1
        assert names(tmp_path) == step_names(1)

    def test_a_sharded_state_is_gathered_again(self, tmp_path, on_instances):
        def program(strategy):
            options = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}
            trainer = Trainer(strategy, error_of, optax.sgd(0.1, momentum=0.9), **options)
            with Checkpoints(tmp_path, trainer) as checkpoints:
                state, _ = trainer.step(trainer.init({"w": jnp.ones(3)}), BATCH[:4])
                checkpoints.save(state)
                checkpoints.save(state)
                checkpoints.save(state, metrics={"accuracy": 0.5})

        on_instances(2, 4, program)
        assert known(tmp_path, 1)["metrics"] == {"accuracy": 0.5}


class TestTheBest:
    VALUES = (0.5, 0.9, 0.1, 0.9, 0.3, 0.2)

    def metrics(self):
        return [{"accuracy": value} for value in self.VALUES]

    @pytest.mark.parametrize(
        ("best", "kept"),
        [
            (None, [5, 6]),
            (Best("accuracy"), [2, 5, 6]),
            (Best("accuracy", "min"), [3, 5, 6]),
            (Best("accuracy", count=3), [1, 2, 4, 5, 6]),
            (Best("other"), [5, 6]),
        ],
    )
    def test_the_best_checkpoint_is_kept_besides_the_newest(self, tmp_path, training, best, kept):
        assert save_with(training, tmp_path, self.metrics(), keep=2, keep_best=best) == step_names(*kept)

    def test_a_resumed_training_finds_the_best_checkpoint(self, tmp_path, training):
        save_with(training, tmp_path, self.metrics(), keep=1, keep_best=Best("accuracy"))
        trainer, _ = training
        with Checkpoints(tmp_path, trainer, keep=1, keep_best=Best("accuracy")) as checkpoints:
            state = checkpoints.restore(trainer.init({"w": jnp.ones(3)}))
            state, _ = trainer.step(state, BATCH)
            checkpoints.save(state)
        assert names(tmp_path) == step_names(2, 7)

    def test_metrics_returned_by_step_select_the_best(self, tmp_path, training):
        trainer, state = training
        with Checkpoints(tmp_path, trainer, every=1, keep=1, keep_best=Best("loss", "min")) as checkpoints:
            for factor in (1, 0, 2):
                state, metrics = trainer.step(state, factor * BATCH)
                checkpoints.after_step(state, metrics=metrics)
                checkpoints.wait()
        assert names(tmp_path) == step_names(2, 3)


class TestVariables:
    def trees(self):
        return {
            "dense": [{"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, {"w": jnp.full(4, 0.5, jnp.bfloat16)}],
            "it's": {3: jnp.float32(7)},
        }

    @pytest.fixture
    def saved(self, tmp_path, strategy):
        """Provide a folder with a checkpoint of these variables."""
        trainer = Trainer(strategy, lambda variables, batch, key: jnp.float32(0), optax.sgd(0.1, momentum=0.9))
        state = trainer.init(self.trees())
        with Checkpoints(tmp_path, trainer) as checkpoints:
            checkpoints.save(state)
        return tmp_path

    def test_variables_are_read_without_a_trainer(self, saved, bits):
        found = strategies.load_variables(saved)
        assert jax.tree.map(bits, found) == jax.tree.map(bits, self.trees())
        assert {type(leaf) for leaf in jax.tree.leaves(found)} == {np.ndarray}

    def test_variables_of_one_checkpoint_are_read(self, saved, bits):
        one = strategies.load_variables(saved / "step_00000000")
        assert jax.tree.map(bits, one) == jax.tree.map(bits, strategies.load_variables(str(saved), step=0))

    def test_variables_come_in_the_structure_of_given_ones(self, saved):
        shapes = jax.eval_shape(self.trees)
        found = strategies.load_variables(saved, shapes)
        assert jax.tree.structure(found) == jax.tree.structure(shapes)
        np.testing.assert_array_equal(found["dense"][0]["w"], np.ones((2, 3)))

    @pytest.mark.parametrize(
        ("like", "words"),
        [
            ({"w": np.ones(3)}, r"has float32\[\] as variable .*it's.*, but like has nothing"),
            ({"w": 0}, "use the same model"),
        ],
    )
    def test_variables_of_another_structure_are_refused(self, saved, like, words):
        with pytest.raises(CheckpointError, match=words):
            strategies.load_variables(saved, jax.tree.map(np.asarray, like))

    def test_variables_of_the_best_checkpoint_are_read(self, tmp_path, training):
        metrics = [{"accuracy": value} for value in (0.5, 0.9, 0.1)]
        save_with(training, tmp_path, metrics, keep_best=Best("accuracy"))
        best = strategies.load_variables(tmp_path, best=Best("accuracy"))
        np.testing.assert_array_equal(best["w"], strategies.load_variables(tmp_path, step=2)["w"])
        assert not np.array_equal(best["w"], strategies.load_variables(tmp_path)["w"])

    def test_reading_changes_nothing(self, saved, caplog):
        """A training may be writing to the folder."""
        (saved / "step_00000009.incomplete").mkdir()
        (saved / "step_00000007").mkdir()
        before = names(saved)
        with caplog.at_level(logging.WARNING):
            strategies.load_variables(saved)
        assert "step_00000007 is damaged" in caplog.text
        assert names(saved) == before

    def test_missing_or_damaged_checkpoints_are_refused(self, saved, tmp_path):
        for path, options, words in (
            (saved / "none", {}, "there is no intact checkpoint in .*none; give the folder"),
            (saved, {"step": 5}, "step_00000005 does not exist; there are checkpoints of steps 0"),
            (saved, {"best": Best("accuracy")}, "no intact checkpoint that was saved with the metric 'accuracy'"),
        ):
            with pytest.raises(CheckpointError, match=words):
                strategies.load_variables(path, **options)
        (saved / "step_00000000" / "training.json").write_text("{}")
        with pytest.raises(
            CheckpointError, match="is damaged .training.json has changed since it was written.; use another"
        ):
            strategies.load_variables(saved, step=0)
        with pytest.raises(ValueError, match="give one of them"):
            strategies.load_variables(saved, step=0, best=Best("a"))

    def test_variables_that_are_one_array_come_as_one_array(self, tmp_path, strategy):
        trainer = Trainer(strategy, lambda variables, batch, key: jnp.float32(0), optax.sgd(0.1))
        with Checkpoints(tmp_path, trainer) as checkpoints:
            checkpoints.save(trainer.init(jnp.arange(3.0)))
        assert strategies.load_variables(tmp_path).tolist() == [0, 1, 2]


class TestALoopOfOnesOwn:
    @staticmethod
    def run(strategy, folder, until, told=None):
        """Add up the replicas' indices, times the number of the step."""
        loop = OwnLoop(strategy, seed=5)
        with Checkpoints(folder, loop, every=2) as checkpoints:
            state = checkpoints.restore(TrainState({"total": np.zeros(2, np.float32)}, (), step=0))
            while state.step < until:
                if told == (state.step, strategy.instance_index):
                    loop.notice.give(signal.SIGTERM)
                indices = strategy.per_replica(lambda replica, step=state.step: np.float32(replica * step))
                total = state.variables["total"] + strategy.reduce("sum", indices)
                state = TrainState({"total": total}, (), state.step + 1)
                checkpoints.after_step(state, extra={"total": total[0]})
            checkpoints.save(state)
        return state.step, np.asarray(state.variables["total"]).tolist(), checkpoints.extra["total"]

    @pytest.mark.parametrize("instances", [1, 2])
    def test_a_loop_is_saved_and_continues(self, tmp_path, on_instances, instances):
        on_instances(instances, 4, lambda strategy: self.run(strategy, tmp_path, 3))
        found = on_instances(2, 4, lambda strategy: self.run(strategy, tmp_path, 5))
        assert found == [(5, [60.0, 60.0], 60.0)] * 2

    @pytest.mark.parametrize("told", [0, 1])
    def test_instances_of_a_loop_leave_together(self, tmp_path, on_instances, told):
        def program(strategy):
            with pytest.raises(SystemExit) as left:
                self.run(strategy, tmp_path, 100, (5, told))
            return left.value.code

        assert on_instances(2, 4, program) == [143, 143]
        assert names(tmp_path)[-1] == "step_00000006"

    def test_the_seed_of_a_loop_is_compared(self, tmp_path, strategy):
        self.run(strategy, tmp_path, 2)
        with Checkpoints(tmp_path, OwnLoop(strategy, seed=6)) as checkpoints:  # noqa: SIM117
            with pytest.raises(CheckpointError, match="the trainer's seed 5, but this training has 6"):
                checkpoints.restore(TrainState({"total": np.zeros(2, np.float32)}, (), step=0))


def test_a_state_that_was_used_up_cannot_be_saved(tmp_path, training):
    trainer, state = training
    for leaf in jax.tree.leaves(state.variables):
        leaf.delete()
    with Checkpoints(tmp_path, trainer) as checkpoints, pytest.raises(ValueError, match="was used up by step 0"):
        checkpoints.save(state)
