"""Compiling for fewer instances before one is lost; `tests/jobs/test_survival.py` loses them."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.compile_ahead import THREAD
from strategies.devices import ReplicaDevices, choose_devices
from strategies.gradients import GradientPrograms
from strategies.replica_program import control_words

LIMIT_S = 60
ROWS = 3  # of a replica


class Surviving(strategies.Strategy):
    """Goes on without instances that are lost, if one believes it."""

    can_carry_on = True


def loss_fn(variables, batch, key):
    return jnp.mean((batch["x"] @ variables["w"] - batch["y"]) ** 2), {"rows": batch["y"].size}


def first_variables():
    return {"w": np.linspace(-1, 1, 5, dtype=np.float32)}


def batch_for(replicas):
    x = np.random.default_rng(0).standard_normal((replicas * ROWS, 5)).astype(np.float32)
    return {"x": x, "y": np.arange(replicas * ROWS)}  # int64, which becomes int32


def wait_for_the_background():
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(LIMIT_S)


@pytest.fixture
def compiled():
    """What JAX traces and compiles in this thread; a list that grows."""
    found, me = [], threading.current_thread()

    def note(event, _, **details):
        if event.startswith("/jax/core/compile/") and threading.current_thread() is me:
            found.append((event, details))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def plan_for(place):
    """A trainer, its first state, and a plan for batches on some devices."""
    trainer = strategies.Trainer(strategies.IPUStrategy(num_replicas=2), loss_fn, optax.adam(0.1))
    state = trainer.init(first_variables())
    batch = batch_for(len(place.replicas))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    variables = jax.tree.map(place.shared_shape, state.variables)
    others = jax.live_arrays()  # held, so that none of another test goes between two counts
    plan = trainer._compile_for(place, variables, shapes)
    assert len(jax.live_arrays()) == len(others)  # it has no buffers yet
    return plan, state, batch


def gradients_of(programs, place, state, batch):
    """As `Trainer` has them computed."""
    indices = np.array(place.replicas, np.int32)
    waves = zip(place.cut_into_waves(batch), place.cut_into_waves(indices), strict=True)
    for wave, (part, numbers) in enumerate(waves):
        programs.dispatch((place.share(state.variables), part, numbers, control_words(0, False, 1.0), []), wave)
    return programs.leaves()


@pytest.mark.parametrize(("replicas", "devices"), [(3, 3), (3, 1), (6, 2), (1, 1)])
def test_the_first_call_of_a_plan_compiles_nothing(compiled, replicas, devices):
    place = ReplicaDevices(choose_devices(range(devices)).devices, range(replicas))
    plan, state, batch = plan_for(place)
    assert compiled
    programs, placed = GradientPrograms(plan.gradients, np.empty), place.place(batch)
    compiled.clear()
    found = gradients_of(programs, place, state, placed)
    assert compiled == []
    for replica, [gradient] in enumerate(found):
        rows = slice(replica * ROWS, (replica + 1) * ROWS)
        error = batch["x"][rows] @ first_variables()["w"] - batch["y"][rows]
        np.testing.assert_allclose(gradient, 2 / ROWS * error @ batch["x"][rows], rtol=1e-5)


def test_under_other_settings_it_is_compiled_again(compiled):
    """Those of a context hold in their thread only; what was compiled without them may have other bits."""
    place = choose_devices(range(2))
    plan, state, batch = plan_for(place)
    programs, placed = GradientPrograms(plan.gradients, np.empty), place.place(batch)
    compiled.clear()
    with jax.default_matmul_precision("highest"):
        gradients_of(programs, place, state, placed)
    assert compiled


def steps(strategy, loss=loss_fn, **options):
    """Two steps of an instance that compiles ahead."""
    own = Surviving(strategy.instance, strategy.communicator)
    trainer = strategies.Trainer(own, loss, optax.adam(0.1), compile_ahead=True, **options)
    state = trainer.init(first_variables())
    for _ in range(2):
        state, _ = trainer.step(state, batch_for(2))
    wait_for_the_background()
    return strategies.fingerprint(state.variables)


def said(caplog, on_instances, *arguments, instances=2, **options):
    with caplog.at_level(logging.INFO):
        found = on_instances(instances, 2 * instances, lambda strategy: steps(strategy, *arguments, **options))
    assert len(set(found)) == 1
    return [record.getMessage() for record in caplog.records if "compiled ahead" in record.getMessage()]


def test_each_of_two_compiles_for_being_alone(caplog, on_instances):
    lines = said(caplog, on_instances)
    assert len(lines) == 2
    assert all(line.startswith("compiled ahead, for 4 local replicas, in ") for line in lines)


def test_no_more_than_two_sizes_and_not_the_present_one(caplog, on_instances):
    """Of 8 replicas on 4 instances three get 3, 3 and 2."""
    lines = said(caplog, on_instances, instances=4)
    assert len(lines) == 3
    assert all(line.startswith("compiled ahead, for 3 local replicas, in ") for line in lines)


def test_the_last_one_has_nobody_to_lose(caplog, on_instances):
    assert said(caplog, on_instances, instances=1) == []


def with_collective(variables, batch, key):
    loss, _ = loss_fn(variables, batch, key)
    return strategies.get_replica_context().all_reduce("mean", loss)


@pytest.mark.parametrize(
    ("loss", "options", "reason"),
    [
        (loss_fn, {"replicated_optimizer_state_sharding": True}, "no other has (sharded optimizer state)"),
        (loss_fn, {"gradient_transfer_dtype": "int8"}, "no other has (residuals of int8 gradients)"),
        (with_collective, {}, "the loss function has collectives or feeds"),
    ],
)
def test_what_cannot_survive_is_not_compiled_and_the_log_says_why(caplog, on_instances, loss, options, reason):
    """In one instance: two in this process would wait for each other's collectives on the same devices."""
    [line] = said(caplog, on_instances, loss, instances=1, **options)
    assert line.startswith("nothing is compiled ahead: ")
    assert reason in line


def test_nor_is_anything_in_a_job_that_ends_with_an_instance(caplog, strategy):
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.1), compile_ahead=True)
    with caplog.at_level(logging.INFO):
        trainer.step(trainer.init(first_variables()), batch_for(4))
    assert "nothing is compiled ahead: the job does not go on when an instance is lost; start it with" in caplog.text


def test_a_loss_function_that_fails_in_the_background_harms_nobody(caplog, on_instances):
    def fails_there(variables, batch, key):
        if threading.current_thread().name == THREAD:
            raise RuntimeError("not in this thread")
        return loss_fn(variables, batch, key)

    assert said(caplog, on_instances, fails_there) == []
    assert caplog.text.count("RuntimeError: not in this thread") == 2
    assert "failed; it is made when it is needed" in caplog.text
