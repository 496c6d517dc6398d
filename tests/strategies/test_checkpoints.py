"""Checkpoints: a resumed training has the bits of one that never stopped; damaged checkpoints are skipped."""

import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import also, first_of

import strategies
from strategies import CheckpointError, Checkpoints, Trainer, TrainState
from strategies.checkpoints import checkpoint_folder

orbax = pytest.importorskip("orbax.checkpoint")

ROWS = np.random.default_rng(0).standard_normal((90, 3)).astype(np.float32)
LAST = 13  # in the second epoch of 11 steps
LARGE = 300_000


def noisy_error(variables, batch, key):
    """Compute a loss that depends on the variables, the batch, and the key of replica and step."""
    error = (batch @ variables["w"]).sum() + variables["b"].mean() - jax.random.normal(key)
    return error**2, {"error": error}


class Training:
    """A training on the instances of a strategy, from the first step."""

    def __init__(self, strategy, large=False, trainer_seed=3, dataset_seed=4, optimizer=None, units=2):
        self.dataset = strategy.distribute_dataset(ROWS, batch_size=2, seed=dataset_seed)
        self.trainer = Trainer(strategy, noisy_error, optimizer or optax.adam(0.1), seed=trainer_seed)
        bias = jnp.zeros(LARGE if large else 1)
        self.state = self.trainer.init({"w": jnp.ones((3, units)), "b": bias})

    def run(self, until, after_step=lambda state: None):
        self.dataset.restore(self.dataset.position())
        for epoch in range(self.dataset.position().epoch, 100):
            for batch in self.dataset.epoch(epoch):
                self.state, self.metrics = self.trainer.step(self.state, batch)
                after_step(self.state)
                if self.state.step == until:
                    return self.fingerprint()
        raise AssertionError

    def fingerprint(self):
        return strategies.fingerprint((self.state.variables, self.state.optimizer_state))

    def checkpoints(self, folder, **options):
        return Checkpoints(folder, self.trainer, self.dataset, **options)


def saved(folder, strategy, steps, **options):
    """Train to a step, with a checkpoint after each of the given steps."""
    training = Training(strategy, **options)
    with training.checkpoints(folder, keep=100) as checkpoints:
        training.run(max(steps), lambda state: checkpoints.save(state) if state.step in steps else None)
    return training


def resumed(folder, strategy, until=LAST, **options):
    """Return the step of the newest checkpoint, and the fingerprint of a training resumed from it."""
    training = Training(strategy, **options)
    with training.checkpoints(folder) as checkpoints:
        training.state = checkpoints.restore(training.state)
        return training.state.step, training.run(until)


def patiently(checkpoints):
    """Return a function that saves after each step and waits for the writer."""

    def after_step(state):
        checkpoints.after_step(state)
        checkpoints.wait()

    return after_step


def restored(folder, strategy, **options):
    """Return the step of the newest checkpoint."""
    training = Training(strategy, **options)
    with training.checkpoints(folder) as checkpoints:
        return checkpoints.restore(training.state).step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step_names(*steps):
    return [f"step_{step:08d}" for step in steps]


def largest_file(checkpoint):
    return max(
        (path for path in (checkpoint / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


@pytest.fixture(scope="module")
def never_stopped():
    return Training(strategies.IPUStrategy(4)).run(LAST)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    saved(folder, strategies.IPUStrategy(4), (5, 8))
    return folder


@pytest.fixture
def two_checkpoints(tmp_path, saved_once):
    """Provide a folder with checkpoints of steps 5 and 8."""
    return shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True)


class TestResuming:
    @pytest.mark.parametrize(
        ("instances", "step"),
        [(2, 10), *(also(*case) for case in ((1, 1), (1, 11), (2, 12), (4, 11)))],
    )
    def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(
        self, tmp_path, strategy, on_instances, never_stopped, instances, step
    ):
        saved(tmp_path, strategy, {step})
        assert on_instances(instances, 4, lambda s: resumed(tmp_path, s)) == [(step, never_stopped)] * instances

    @pytest.mark.parametrize("instances", first_of([2, 1]))
    def test_a_resumed_training_with_host_variables_has_the_bits_of_one_that_never_stopped(
        self, tmp_path, on_instances, never_stopped, instances
    ):
        on_instances(2, 4, lambda s: saved(tmp_path, s, {6}) and None, variables_on_host=True)
        found = on_instances(instances, 4, lambda s: resumed(tmp_path, s), variables_on_host=True)
        assert found == [(6, never_stopped)] * instances

    def test_resuming_works_with_fewer_devices_than_replicas(self, tmp_path):
        """The replicas outnumber the devices."""
        saved(tmp_path, strategies.IPUStrategy(16), {2})
        wanted = Training(strategies.IPUStrategy(16)).run(5)
        assert resumed(tmp_path, strategies.IPUStrategy(16), until=5) == (2, wanted)

    def test_training_begins_anew_without_a_checkpoint(self, tmp_path, strategy, never_stopped):
        assert resumed(tmp_path / "none", strategy) == (0, never_stopped)

    def test_only_instance_0_needs_the_folder(self, tmp_path, on_instances, never_stopped):
        def program(strategy):
            own = tmp_path / f"of instance {strategy.instance_index}"
            saved(own, strategy, {4})
            return resumed(own, strategy)

        assert on_instances(2, 4, program) == [(4, never_stopped)] * 2
        assert names(tmp_path) == ["of instance 0"]

    def test_a_resumed_training_saves_on(self, two_checkpoints, strategy):
        training = Training(strategy)
        with training.checkpoints(two_checkpoints, every=3, keep=2) as checkpoints:
            training.state = checkpoints.restore(training.state)
            training.run(LAST, patiently(checkpoints))
        assert names(two_checkpoints) == step_names(9, 12)

    def test_variables_alone_need_no_data_set(self, two_checkpoints, strategy):
        training = Training(strategy)
        with Checkpoints(two_checkpoints, training.trainer) as checkpoints:
            assert checkpoints.restore(training.state).step == 8

    def test_every_array_of_the_state_is_saved(self, tmp_path, strategy, bits):
        """Arrays of every dtype and size count, random keys too: a loss scale, for example, needs nothing new."""
        values = {
            "loss scale": jnp.float32(1024),
            "key": jax.random.key(7, impl="rbg"),
            "half": jnp.arange(3, dtype=jnp.bfloat16),
            "count": jnp.int8(-3),
            "flags": jnp.array([True, False]),
            "nothing": jnp.zeros((0, 4)),
            "a/b.c['d']": jnp.arange(6.0).reshape(2, 3),
        }
        trainer = Training(strategy).trainer
        with Checkpoints(tmp_path, trainer) as checkpoints:
            checkpoints.save(TrainState({"w": jnp.ones(2)}, values, 7))
        empty = jax.tree.map(lambda leaf: leaf if leaf is values["key"] else jnp.zeros_like(leaf), values)
        empty["key"] = jax.random.key(0, impl="rbg")
        with Checkpoints(tmp_path, trainer) as checkpoints:
            found = checkpoints.restore(TrainState({"w": jnp.zeros(2)}, empty, 0))
        assert found.step == 7
        assert jax.random.key_impl(found.optimizer_state["key"]) == jax.random.key_impl(values["key"])
        for wanted, restored in ((values, found.optimizer_state),):
            for tree in (wanted, restored):
                tree["key"] = jax.random.key_data(tree["key"])
            assert jax.tree.map(bits, restored) == jax.tree.map(bits, wanted)


@pytest.mark.complete
def test_large_arrays_are_cut_into_pieces_and_put_together(tmp_path, strategy, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "PIECE_BYTES", 100_000)
    saved(tmp_path, strategy, {2}, large=True)
    [pieces] = [orbax.PyTreeCheckpointer().restore(path / "state")["float32"] for path in tmp_path.iterdir()]
    assert len(pieces) == 37
    assert resumed(tmp_path, strategy, until=3, large=True) == (2, Training(strategy, large=True).run(3))


class TestSaving:
    def test_the_newest_checkpoints_are_kept(self, tmp_path, strategy):
        training = Training(strategy)
        with training.checkpoints(tmp_path, every=2, keep=3) as checkpoints:
            training.run(LAST, patiently(checkpoints))
        assert names(tmp_path) == step_names(8, 10, 12)

    def test_training_does_not_wait_for_the_disk(self, tmp_path, strategy):
        """A checkpoint due at step 4, while that of step 2 is being written, is made after the next step."""
        training, disk = Training(strategy), threading.Event()
        with training.checkpoints(tmp_path, every=2) as checkpoints:
            checkpoints._thread.submit(disk.wait, 60)
            training.run(5, checkpoints.after_step)
            disk.set()
            checkpoints.wait()
            training.run(7, patiently(checkpoints))
        assert names(tmp_path) == step_names(2, 6)

    def test_the_state_is_copied_before_the_next_step_takes_its_memory(self, tmp_path, strategy):
        """The writer of a large state is still busy at the time of the next step."""
        training = Training(strategy, large=True)
        with training.checkpoints(tmp_path) as checkpoints:
            wanted = training.run(2)
            checkpoints.save(training.state)
            training.run(4)
        again = Training(strategy, large=True)
        with again.checkpoints(tmp_path) as checkpoints:
            again.state = checkpoints.restore(again.state)
        assert (again.state.step, again.fingerprint()) == (2, wanted)

    def test_the_next_step_takes_the_memory_of_a_copied_state(self, tmp_path, strategy):
        """The memory is free, though the writer has not begun."""
        training, disk = Training(strategy), threading.Event()
        training.run(1)
        state = jax.block_until_ready(jax.tree.map(jnp.array, training.state))  # no device has read it
        with training.checkpoints(tmp_path) as checkpoints:
            checkpoints._thread.submit(disk.wait, 60)
            checkpoints.save(state)
            given_up = jax.tree.leaves((state.variables, state.optimizer_state))
            jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)(given_up)
            assert all(leaf.is_deleted() for leaf in given_up)
            disk.set()

    def test_a_step_is_saved_once(self, two_checkpoints, strategy, caplog):
        training = Training(strategy)
        before = [path.stat().st_mtime_ns for path in two_checkpoints.iterdir()]
        with training.checkpoints(two_checkpoints) as checkpoints:
            state = checkpoints.restore(training.state)
            checkpoints.save(state)
        assert [path.stat().st_mtime_ns for path in two_checkpoints.iterdir()] == before
        assert not caplog.records

    def test_a_folder_with_checkpoints_of_another_training_is_refused(self, two_checkpoints, strategy):
        training = Training(strategy)
        with training.checkpoints(two_checkpoints) as checkpoints, pytest.raises(CheckpointError, match="up to step 8"):
            checkpoints.save(training.state)
        assert names(two_checkpoints) == step_names(5, 8)

    def test_orbax_and_sha256sum_read_a_checkpoint(self, two_checkpoints):
        newest = two_checkpoints / "step_00000008"
        [piece] = orbax.PyTreeCheckpointer().restore(newest / "state")["float32"].values()
        known = json.loads((newest / "training.json").read_text())
        names_and_layouts = {name: (dtype, shape) for name, dtype, shape in known["packing"]}
        assert names_and_layouts[".variables['w']"] == ("float32", [3, 2])
        assert piece.size == sum(math.prod(shape) for dtype, shape in names_and_layouts.values() if dtype == "float32")
        assert known["replicas"] == 4
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=newest, check=True)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"every": 0}, ValueError, "every is 0; it must be at least 1"),
            ({"keep": 0}, ValueError, "keep is 0; it must be at least 1"),
            ({"every": 1.5}, TypeError, "every is 1.5; an integer of at least 1 is needed"),
            ({"keep": None}, TypeError, "keep is None; an integer"),
            ({"grace_s": -1}, ValueError, "grace_s is -1; it must be a number of seconds"),
            ({"grace_s": math.nan}, ValueError, "grace_s is nan; it must be a number of seconds"),
        ],
    )
    def test_invalid_options_are_refused(self, tmp_path, strategy, options, error, words):
        with pytest.raises(error, match=words):
            Training(strategy).checkpoints(tmp_path, **options)

    def test_missing_orbax_is_an_error_that_names_the_install_command(self, tmp_path, strategy, monkeypatch):
        monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
        with pytest.raises(CheckpointError, match=r"pip install orbax-checkpoint"):
            Training(strategy).checkpoints(tmp_path)


@contextmanager
def full_disk():
    """Limit files of this process to 64 KiB, so that further writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestFailedWrites:
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its threads behind
    def test_a_failed_write_is_one_warning_and_training_continues(self, tmp_path, strategy, caplog):
        training = Training(strategy, large=True)
        with training.checkpoints(tmp_path) as checkpoints:
            training.run(2)
            checkpoints.save(training.state)
            training.run(4)
            checkpoints.wait()
            with full_disk():
                checkpoints.save(training.state)
                checkpoints.wait()
            [record] = caplog.records
            assert record.levelno == logging.WARNING
            assert record.message == (
                f"checkpoint {tmp_path}/step_00000004 could not be written: File too large; training goes on, and "
                "step 2 is kept"
            )
            assert names(tmp_path) == step_names(2)
            checkpoints.save(training.state)  # there is room again
            training.run(6)
        assert names(tmp_path) == step_names(2, 4)
        assert training.fingerprint() == Training(strategy, large=True).run(6)

    def test_a_nearly_full_disk_is_not_filled(self, tmp_path, strategy, caplog, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20))
        training = Training(strategy)
        with training.checkpoints(tmp_path) as checkpoints:
            checkpoints.save(training.state)
        assert "No space left on device, 88 bytes are needed and 20 are free; training goes on" in caplog.text
        assert names(tmp_path) == []

    def test_training_continues_if_the_folder_cannot_be_made(self, tmp_path, strategy, caplog):
        (tmp_path / "file").write_text("")
        training = Training(strategy)
        with training.checkpoints(tmp_path / "file" / "folder", every=1) as checkpoints:
            training.run(1, checkpoints.after_step)
        assert "Not a directory; training goes on, and no checkpoint exists" in caplog.text


class TestDamage:
    def truncate(self, checkpoint):
        path = largest_file(checkpoint)
        os.truncate(path, path.stat().st_size - 1)

    def flip(self, checkpoint):
        path = largest_file(checkpoint)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def lose(self, checkpoint):
        largest_file(checkpoint).unlink()

    def lose_sums(self, checkpoint):
        (checkpoint / "SHA256SUMS").unlink()

    def cut_sums(self, checkpoint):
        os.truncate(checkpoint / "SHA256SUMS", 100)

    def garble_sums(self, checkpoint):
        (checkpoint / "SHA256SUMS").write_bytes(b"\xff\x00" * 100)

    def put_a_pipe(self, checkpoint):
        (checkpoint / "training.json").unlink()
        os.mkfifo(checkpoint / "training.json")

    def name_what_cannot_be(self, checkpoint):
        (checkpoint / "SHA256SUMS").write_bytes((checkpoint / "SHA256SUMS").read_bytes() + b"0" * 64 + b"  a\0b\n")

    def empty(self, checkpoint):
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()

    @pytest.mark.parametrize(
        "damage", [truncate, flip, lose, lose_sums, cut_sums, garble_sums, put_a_pipe, name_what_cannot_be, empty]
    )
    def test_the_checkpoint_before_is_used_with_one_warning(self, two_checkpoints, strategy, caplog, damage):
        damage(self, two_checkpoints / "step_00000008")
        assert restored(two_checkpoints, strategy) == 5
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "step_00000008 is damaged (" in record.message
        assert record.message.endswith("; using step 5")
        assert names(two_checkpoints) == [*step_names(5), "step_00000008.damaged"]

    def test_a_step_can_be_saved_again_after_its_checkpoint_was_damaged(self, two_checkpoints, strategy):
        for _ in range(2):
            self.flip(two_checkpoints / "step_00000008")
            training = Training(strategy)
            with training.checkpoints(two_checkpoints, every=8) as checkpoints:
                training.state = checkpoints.restore(training.state)
                training.run(8, checkpoints.after_step)
        assert names(two_checkpoints) == [*step_names(5, 8), "step_00000008.damaged"]
        assert restored(two_checkpoints, strategy) == 8

    def test_an_unfinished_checkpoint_is_removed_and_the_one_before_is_used(
        self, two_checkpoints, strategy, never_stopped, caplog
    ):
        whole = two_checkpoints / "step_00000008"
        whole.rename(whole.with_name(whole.name + ".incomplete"))
        assert resumed(two_checkpoints, strategy) == (5, never_stopped)
        [record] = caplog.records
        assert "step_00000008.incomplete is incomplete, because its writer died" in record.message
        assert names(two_checkpoints) == step_names(5)

    def test_an_unfinished_one_alone_is_no_checkpoint(self, tmp_path, strategy, never_stopped, caplog):
        (tmp_path / "step_00000008.incomplete" / "state").mkdir(parents=True)
        assert resumed(tmp_path, strategy) == (0, never_stopped)
        assert "no earlier checkpoint exists" in caplog.text

    def test_damage_to_all_checkpoints_is_an_error_on_all_instances_and_nothing_is_touched(
        self, two_checkpoints, strategy, on_instances
    ):
        for step in (5, 8):
            self.flip(two_checkpoints / f"step_{step:08d}")

        def program(strategy):
            with pytest.raises(
                CheckpointError, match=r"no checkpoint in .* is intact \(step_00000008: .*step_00000005"
            ):
                restored(two_checkpoints, strategy)

        on_instances(2, 4, program)
        assert names(two_checkpoints) == step_names(5, 8)


class TestAnotherTraining:
    @pytest.mark.parametrize(
        ("replicas", "options", "error", "words"),
        [
            (8, {}, CheckpointError, "saved with 4 replicas, but this training has 8; .*: use 4 replicas"),
            (4, {"trainer_seed": 5}, CheckpointError, "the trainer's seed 3, but this training has 5"),
            (4, {"dataset_seed": 5}, ValueError, "saved with seed 4, but this data set has seed 5"),
            (
                4,
                {"units": 5},
                CheckpointError,
                r"has float32\[3, 2\] as .*\['w'\], but this training has float32\[3, 5\]; use the same model",
            ),
            (
                4,
                {"optimizer": optax.sgd(0.1)},
                CheckpointError,
                r"has int32\[\] as \.optimizer_state\[0\]\.count, but this training has nothing",
            ),
        ],
    )
    def test_a_checkpoint_of_another_training_is_refused_on_all_instances(
        self, two_checkpoints, on_instances, replicas, options, error, words
    ):
        def program(strategy):
            with pytest.raises(error, match=words):
                restored(two_checkpoints, strategy, **options)

        on_instances(2, replicas, program)


class TestLeaving:
    @pytest.mark.parametrize("told", first_of([1, 0]))
    def test_all_instances_leave_after_the_same_step_and_it_is_saved(self, tmp_path, on_instances, told):
        def program(strategy):
            training = Training(strategy)

            def after_step(state):
                if state.step == 6 and strategy.instance_index == told:
                    training.trainer.notice.give(signal.SIGTERM)
                checkpoints.after_step(state)

            with training.checkpoints(tmp_path, every=100) as checkpoints, pytest.raises(SystemExit) as left:
                training.run(LAST, after_step)
            return left.value.code, training.state.step, training.fingerprint()

        alone = Training(strategies.IPUStrategy(4)).run(7)
        assert on_instances(2, 4, program) == [(143, 7, alone)] * 2
        assert names(tmp_path) == step_names(7)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    def test_a_signal_ends_the_process_at_the_end_of_a_step(self, tmp_path, strategy, number):
        before = signal.getsignal(number)
        training = Training(strategy)
        with training.checkpoints(tmp_path, every=100) as checkpoints:
            training.run(3, checkpoints.after_step)
            os.kill(os.getpid(), number)
            with pytest.raises(SystemExit) as left:
                training.run(LAST, checkpoints.after_step)
        assert left.value.code == 128 + number
        assert signal.getsignal(number) is before
        assert names(tmp_path) == step_names(4)

    def test_a_second_ctrl_c_interrupts_at_once(self, tmp_path, strategy, capfd):
        training = Training(strategy)
        with training.checkpoints(tmp_path, every=100) as checkpoints:
            training.run(3, checkpoints.after_step)
            os.kill(os.getpid(), signal.SIGINT)
            assert capfd.readouterr().err.endswith("press Ctrl-C again to end at once, without saving\n")
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert names(tmp_path) == []

    def test_a_programs_own_handler_of_ctrl_c_stays(self, tmp_path, strategy):
        taken = []
        before = signal.signal(signal.SIGINT, lambda number, frame: taken.append(number))
        try:
            with Training(strategy).checkpoints(tmp_path):
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
        assert taken == [signal.SIGINT]

    def test_an_error_in_the_program_leaves_the_saved_checkpoints(self, tmp_path, strategy):
        training = Training(strategy)

        def fail():
            with training.checkpoints(tmp_path) as checkpoints:
                training.run(1)
                checkpoints.save(training.state)
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fail()
        assert names(tmp_path) == step_names(1)
