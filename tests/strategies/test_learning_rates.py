"""Learning rates that optax injects, in sinks, without being asked for."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kept_rows import KeptRows
from tiers import first_of, only

import strategies
from strategies.jax.updates.optimizers import MapGradientOptimizer
from strategies.loss_scaling import LossScaling

STEPS = 6
ROWS = {"x": np.arange(36, dtype=np.float32).reshape(12, 3) / 64}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, STEPS)
RATES = [float(np.float32(SCHEDULE(step))) for step in range(STEPS)]
INJECTED = optax.inject_hyperparams(optax.adam)
INJECTED_SCHEDULE = INJECTED(learning_rate=SCHEDULE)


def loss_fn(variables, batch, key):
    return jnp.mean(batch["x"] @ variables["a"]) + variables["b"] ** 2


def rows_of(optimizer, strategy=None, steps_per_execution=1, loss=loss_fn, **options):
    """Return the learning rates of each row of a training."""
    strategy = strategy or strategies.IPUStrategy(2)
    kept, size = KeptRows(), len(ROWS["x"]) // STEPS // strategy.num_replicas_in_sync
    dataset = strategy.distribute_dataset(ROWS, batch_size=size, shuffle=False)
    trainer = strategies.Trainer(strategy, loss, optimizer, **options)
    state = trainer.init({"a": np.ones(3, np.float32), "b": np.float32(1)})
    with strategies.metrics.open(kept, strategy=strategy):
        trainer.run(state, dataset, steps_per_execution)
    return [{name: rate for name, rate in row.items() if name.startswith("learning_rate")} for row in kept.values]


KNOWN = {
    "injected": INJECTED_SCHEDULE,
    "chain": optax.chain(optax.clip_by_global_norm(1.0), INJECTED_SCHEDULE),
    "when finite": optax.apply_if_finite(INJECTED_SCHEDULE, 3),
    "mapped": MapGradientOptimizer(INJECTED_SCHEDULE, lambda gradient, variable: gradient),
}


@pytest.mark.parametrize("optimizer", only(("chain", "injected"), KNOWN))
def test_the_rate_that_a_step_has_used_is_in_its_row(optimizer):
    found = rows_of(KNOWN[optimizer])
    assert found == [{"learning_rate": pytest.approx(rate, rel=1e-6)} for rate in RATES]


@pytest.mark.parametrize("instances", first_of([2, 1]))
def test_rates_do_not_depend_on_instances_or_the_place_of_the_state(instances, on_instances):
    def function(strategy):
        return rows_of(
            INJECTED_SCHEDULE, strategy, replicated_optimizer_state_sharding=True, min_elements_for_sharding=1
        )

    first, *others = on_instances(instances, 2, function)
    assert first == [{"learning_rate": pytest.approx(rate, rel=1e-6)} for rate in RATES]
    assert not any(others), "only the chief writes"


def test_each_group_has_its_rate():
    injected = optax.inject_hyperparams(optax.sgd)
    groups = {"fast": injected(learning_rate=SCHEDULE), "slow": injected(learning_rate=0.01)}
    found = rows_of(optax.partition(groups, {"a": "slow", "b": "fast"}))
    assert [row["learning_rate/fast"] for row in found] == pytest.approx(RATES)
    assert {row["learning_rate/slow"] for row in found} == {float(np.float32(0.01))}


@pytest.mark.complete
def test_rates_without_labels_are_numbered():
    injected = optax.inject_hyperparams(optax.sgd)
    found = rows_of(optax.chain(injected(learning_rate=SCHEDULE), injected(learning_rate=2.0)))
    assert [row["learning_rate/0"] for row in found] == pytest.approx(RATES)
    assert {row["learning_rate/1"] for row in found} == {2.0}


def test_a_rate_that_the_program_sets_is_that_of_the_row():
    strategy, kept = strategies.IPUStrategy(1), KeptRows()
    trainer = strategies.Trainer(strategy, loss_fn, INJECTED(learning_rate=0.5))
    state = trainer.init({"a": np.ones(3, np.float32), "b": np.float32(1)})
    with strategies.metrics.open(kept, strategy=strategy):
        for rate in (0.25, 0.125):
            state.optimizer_state.hyperparams["learning_rate"] = jnp.float32(rate)
            state, _ = trainer.step(state, {"x": jnp.ones((4, 3))})
    assert [row["learning_rate"] for row in kept.values] == [0.25, 0.125]


def for_a(optimizer):
    """Return an optimizer that updates `a` with the given one."""
    return optax.partition({"given": optimizer, "plain": optax.sgd(0.1)}, {"a": "given", "b": "plain"})


UNKNOWN = {
    "constant": optax.adam(0.1),
    "schedule in a closure": optax.adam(SCHEDULE),
    "of each element": for_a(INJECTED(learning_rate=np.full(3, 0.1, np.float32))),
}


@pytest.mark.parametrize("optimizer", UNKNOWN)
def test_rates_that_nobody_knows_are_left_out(optimizer):
    assert rows_of(UNKNOWN[optimizer]) == [{}] * STEPS


def test_an_injected_rate_of_a_program_of_several_steps_is_that_of_the_last_step():
    found = rows_of(INJECTED_SCHEDULE, strategies.IPUStrategy(1), steps_per_execution=4)
    known = [number for number, row in enumerate(found) if row]
    assert known == [3, 5]
    assert [found[number]["learning_rate"] for number in known] == pytest.approx([RATES[number] for number in known])


def test_a_skipped_step_shows_the_last_rate_that_was_used():
    def broken(variables, batch, key):
        return loss_fn(variables, batch, key) * jnp.where(jnp.max(batch["x"]) < 0.2, jnp.inf, 1.0)

    found = rows_of(INJECTED_SCHEDULE, loss=broken, loss_scaling=LossScaling(4.0))
    used = [row["learning_rate"] for row in found]
    assert used[0] == RATES[0]
    assert used[-1] < RATES[-1] or used[-1] in RATES
    skipped = STEPS - len(set(used))
    assert used[-1] == pytest.approx(RATES[STEPS - 1 - skipped])


@pytest.mark.complete
def test_a_rate_of_the_loss_function_goes_first():
    def own(variables, batch, key):
        return loss_fn(variables, batch, key), {"learning_rate": jnp.float32(3)}

    assert rows_of(INJECTED_SCHEDULE, loss=own) == [{"learning_rate": 3.0}] * STEPS
