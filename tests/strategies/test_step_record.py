"""Records of a Trainer for `poprun verify`."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from popdist.records.recording import FOLDER_VARIABLE, STEPS_VARIABLE, Recording
from poprun.verify.comparison import first_difference, first_inside
from poprun.verify.records import BATCH, GRADIENTS, METRICS, START, UPDATE, Record, read_record, record_files
from strategies.defaults import Defaults
from strategies.jax.options import StepOptions
from strategies.jax.step_record import StepRecorder, digest, recorder_for, what_decides_bits

DATA = {
    "x": np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32),
    "y": np.arange(64, dtype=np.int32) % 3,
}
VARIABLES = {"b": jnp.zeros(3), "w": jnp.full((6, 3), 0.1)}


def loss_fn(variables, batch, key):
    logits = batch["x"] @ variables["w"] + variables["b"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"right": (logits.argmax(-1) == batch["y"]).mean()}


def train(strategy, folder=None, steps=3, between=lambda state: state, **options):
    """Train some steps with a record in the given folder, or in the folder of the environment."""
    wanted = {name: options.pop(name) for name in ("steps_wanted", "values_at", "leave_at") if name in options}
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), **options)
    if folder is not None:
        limit = wanted.pop("steps_wanted", None)
        trainer._loop._watcher = StepRecorder(
            strategy.replicas, StepOptions(**options), Recording(folder, limit, **wanted)
        )
    state = trainer.init(VARIABLES)
    batches = strategy.distribute_dataset(DATA, batch_size=4, seed=1).epoch(0)
    for _, batch in zip(range(steps), batches, strict=False):
        state, _ = trainer.step(between(state), batch)
    return state


def recorded(strategy, folder, **options) -> Record:
    train(strategy, folder, **options)
    return read_record(folder)


def test_nothing_is_recorded_by_default(strategy, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert recorder_for(strategy.replicas, StepOptions()) is None


def test_a_trainer_records_into_the_folder_of_the_environment(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "new" / "folder"))
    state = train(strategy)
    record = read_record(tmp_path / "new" / "folder")
    assert list(record.steps) == [(0, 0), (0, 1), (0, 2)]
    assert record.last_fingerprint == strategies.fingerprint(state.variables)
    [process] = record.processes
    assert (process.instances, process.replicas, process.strategy) == (1, 4, "LocalStrategy")
    assert process.facts["jax"] == jax.__version__
    assert process.facts["PJRT_NPROC"]
    parts = record.steps[0, 1].parts
    assert list(parts[GRADIENTS]) == list(parts[UPDATE]) == list(parts[START]) == ["['b']", "['w']"]
    assert len(parts[BATCH]) == 2 * 4
    assert list(parts[METRICS]) == ["loss", "right"]


def test_steps_on_a_device_have_the_same_record_which_names_the_exchange(tmp_path):
    on_host, on_device = (
        recorded(strategies.IPUStrategy(4, defaults=Defaults(exchange=word)), tmp_path / word)
        for word in ("auto", "compiled")
    )
    assert "exchange" not in on_host.processes[0].facts
    assert on_device.processes[0].facts["exchange"] == "local"
    assert first_difference(on_host, on_device) is None
    assert on_device.last_fingerprint == on_host.last_fingerprint


def test_the_program_ends_after_the_last_step_that_is_wanted(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(STEPS_VARIABLE, "2")
    with pytest.raises(SystemExit) as ended:
        train(strategy)
    assert ended.value.code == 0
    assert list(read_record(tmp_path).steps) == [(0, 0), (0, 1)]


@pytest.mark.complete
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 4},
    ],
    ids=str,
)
def test_every_spread_records_the_same(tmp_path, on_instances, options):
    for count in (1, 2, 4):
        on_instances(count, 4, lambda each, n=count: train(each, tmp_path / f"{n}-{each.instance_index}", **options))
    one = read_record(tmp_path / "1-0")
    for count in (2, 4):
        for index in range(count):
            of_instance = read_record(tmp_path / f"{count}-{index}")
            for place, step in of_instance.steps.items():
                whole = one.steps[place].parts
                for part in (START, GRADIENTS, METRICS, UPDATE):
                    assert step.parts[part].keys() == whole[part].keys()
                    assert [list(each) for each in step.parts[part].values()] == [
                        list(each) for each in whole[part].values()
                    ]
                local = [f"of replica {replica}" for replica in range(index * 4 // count, (index + 1) * 4 // count)]
                assert sorted(step.parts[BATCH]) == sorted(f"['{name}'] {each}" for name in "xy" for each in local)
                assert all(list(found) == list(whole[BATCH][name]) for name, found in step.parts[BATCH].items())


def test_steps_of_one_execution_are_recorded_one_by_one_and_have_the_same_bits(tmp_path, monkeypatch):
    def end():
        strategy = strategies.IPUStrategy(1)
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
        dataset = strategy.distribute_dataset(DATA, batch_size=8, seed=1)
        state, _ = trainer.run(trainer.init(VARIABLES), dataset, steps_per_execution=4)
        return strategies.fingerprint(state)

    unseen = end()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert end() == unseen
    assert len(read_record(tmp_path).steps) == len(DATA["x"]) // 8


class TestDifferences:
    def test_a_changed_batch_is_found(self, strategy, tmp_path):
        one = recorded(strategy, tmp_path / "1")
        DATA["x"][5, 3] += 1
        try:
            other = recorded(strategy, tmp_path / "2")
        finally:
            DATA["x"][5, 3] -= 1
        found = first_difference(one, other)
        assert found is not None
        assert (found.part, len(found.names)) == (BATCH, 1)

    def test_changed_variables_are_found(self, strategy, tmp_path):
        one = recorded(strategy, tmp_path / "1")

        def between(state):
            changed = {**state.variables, "b": state.variables["b"] + 1e-6}
            return replace(state, variables=changed) if state.step == 2 else state

        found = first_difference(one, recorded(strategy, tmp_path / "2", between=between))
        assert found is not None
        assert (found.place, found.part, found.names) == ((0, 2), START, ("['b']",))

    def test_a_changed_optimizer_state_is_found(self, strategy, tmp_path):
        one = recorded(strategy, tmp_path / "1")

        def between(state):
            changed = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), state.optimizer_state)
            return replace(state, optimizer_state=changed) if state.step == 1 else state

        found = first_difference(one, recorded(strategy, tmp_path / "2", between=between))
        assert found is not None
        assert (found.place, found.part) == ((0, 1), UPDATE)


def test_trainings_are_numbered(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for _ in range(2):
        train(strategy, steps=2)
    record = read_record(tmp_path)
    assert list(record.steps) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert record.steps[0, 1].parts == record.steps[1, 1].parts
    assert len(record_files(tmp_path)) == 1
    assert first_inside(record) is None


def test_a_restarted_trainer_has_another_training(strategy, tmp_path):
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    trainer._loop._watcher = StepRecorder(strategy.replicas, StepOptions(), Recording(tmp_path))
    for _ in range(2):
        state = trainer.init(VARIABLES)
        for _, batch in zip(range(2), strategy.distribute_dataset(DATA, batch_size=4).epoch(0), strict=False):
            state, _ = trainer.step(state, batch)
    assert [step for _, step in read_record(tmp_path).steps] == [0, 1, 0, 1]


def test_records_are_for_this_user_alone(strategy, tmp_path):
    train(strategy, tmp_path / "new", values_at=(0, 1))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_values_of_one_step_are_kept(strategy, tmp_path):
    record = recorded(strategy, tmp_path, values_at=(0, 1))
    assert {part for part, _ in record.values} == {BATCH, START, GRADIENTS, UPDATE}
    dtype, data = record.values[UPDATE, 0].read("['w']")
    values = np.frombuffer(data, dtype).reshape(6, 3)
    [found] = record.steps[0, 1].parts[UPDATE]["['w']"]
    assert digest(values) == found
    dtype, data = record.values[BATCH, 0].read("['y'] of replica 3")
    assert (dtype, len(data)) == ("int32", 4 * 4)


def test_a_program_gets_a_termination_signal_after_the_given_step(strategy, tmp_path):
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(len(read_record(tmp_path).steps)))
    try:
        train(strategy, tmp_path, leave_at=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [2]


def test_checkpoints_of_a_verified_program_go_elsewhere(strategy, tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "record"))
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1))
    with strategies.Checkpoints(tmp_path / "mine", trainer) as checkpoints:
        checkpoints.save(checkpoints.restore(trainer.init(VARIABLES)))
    assert not (tmp_path / "mine").exists()
    [folder] = (tmp_path / "record" / "checkpoints").iterdir()
    assert [each.name for each in folder.iterdir()] == ["step_00000000"]
    assert read_record(tmp_path / "record").checkpoints == (str(tmp_path / "mine"),)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (0,)])
def test_a_digest_changes_with_every_bit(dtype, shape):
    array = np.asarray(jnp.ones(shape, dtype))
    whole = digest(jnp.asarray(array))
    assert whole == digest(array)
    assert whole != digest(array.reshape((1, *shape)))
    octets = array.reshape(-1).view(np.uint8)
    for position in range(octets.size):
        for bit in range(8 if dtype != "bool" else 1):
            changed = octets.copy()
            changed[position] ^= 1 << bit
            assert digest(changed.view(array.dtype).reshape(shape)) != whole


def test_elements_that_change_places_change_a_digest():
    assert digest(np.array([1.0, 2.0])) != digest(np.array([2.0, 1.0]))
    assert digest(np.zeros(2, np.int32)) != digest(np.zeros(2, np.float32))
    assert digest(jax.random.key(0)) != digest(jax.random.key(1))


def test_the_factors_that_decide_bits_are_plain_json(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    found = json.loads(json.dumps(what_decides_bits()))
    assert {"python", "jax", "jaxlib", "numpy", "optax"} <= found["versions"].keys()
    assert found["cpu"]["model"]
    assert "JAX_ENABLE_COMPILATION_CACHE" not in found["settings"]
