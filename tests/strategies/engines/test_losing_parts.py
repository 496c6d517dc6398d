"""Loss of an instance with parts of the state that no other instance computes: a copy of them survives.

Sharded optimizer state and model state of single replicas end with the bits of one
process, wherever in a step the instance is lost.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing_at_events import Events, run_losing
from surviving_instances import run_instances

import strategies
from strategies import Checkpoints, Outcome, Trainer
from strategies.errors import LostPartError
from strategies.jax.programs import captures
from strategies.jax.shard_backups import COMMIT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

REPLICAS = 8  # four instances share them evenly, three do not
STEPS = 3
BATCH_SIZE = 2
SHARDED = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 8}
CLIPPED = optax.chain(strategies.clip_by_global_norm(0.5), optax.adam(0.01))
FACTORED = optax.adafactor(0.01, min_dim_size_to_factor=4)  # needs whole arrays, so parts are gathered for each update
CASES = {
    "sharded": (CLIPPED, False, SHARDED),
    "gathered": (FACTORED, False, SHARDED),
    "own model state": (optax.adam(0.01), True, {}),
    "all": (CLIPPED, True, {"loss_scaling": "dynamic", "gradient_accumulation_count": 2, **SHARDED}),
}


def loss_fn(variables, batch, key, *model_states):
    hidden = jnp.tanh(batch["x"] @ variables["w"] + variables["b"])
    loss = jnp.mean((hidden @ variables["v"] - batch["y"]) ** 2)
    if not model_states:
        return loss
    [before] = model_states
    return Outcome(loss, model_state={"own": 0.9 * before["own"] + hidden.mean(0), "mean": hidden.mean()})


def trainer_of(strategy, case):
    optimizer, has_model_state, options = CASES[case]
    rule = {"own": "per_replica", "mean": "mean"} if has_model_state else None
    return Trainer(strategy, loss_fn, optimizer, model_state_aggregation=rule, **options)


def first_state(trainer, case):
    draw = np.random.default_rng(1)
    w = draw.normal(size=(5, 7)).astype(np.float32)
    model_state = {"own": np.zeros(7, np.float32), "mean": np.float32(0)} if CASES[case][1] else None
    return trainer.init({"w": w, "b": np.zeros(7, np.float32), "v": np.ones((7, 1), np.float32)}, model_state)


def dataset_of(strategy, case):
    count = CASES[case][2].get("gradient_accumulation_count", 1)
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH_SIZE * REPLICAS * count, 5)).astype(np.float32)
    return strategy.distribute_dataset({"x": x, "y": x[:, :1]}, BATCH_SIZE, seed=1, gradient_accumulation_count=count)


def is_part(leaf):
    return hasattr(leaf, "gather")


def bits_of(trainer, state):
    """Return the bits of the whole state."""
    leaves = jax.tree.leaves(trainer.whole(state), is_leaf=is_part)
    return [np.asarray(leaf.gather("a leaf") if is_part(leaf) else leaf).tobytes() for leaf in leaves]


def train(strategy, case, between=lambda strategy, step: None):
    trainer, found = trainer_of(strategy, case), []
    state = first_state(trainer, case)
    for batch in dataset_of(strategy, case).epoch(0):
        state, metrics = trainer.step(state, batch)
        found.append(dict(metrics))
        between(strategy, state.step)
    return found, state.step, bits_of(trainer, state)


@functools.cache
def alone(case):
    [found] = run_instances(1, REPLICAS, functools.partial(train, case=case))
    return found


def check(found, case, *lost):
    assert found == [None if instance in lost else alone(case) for instance in range(len(found))]


def of_tier(case, count, lost, mechanism):
    """Make a case, which belongs to the complete tier unless it is among a few."""
    is_short = (case, count, mechanism) == ("sharded", 4, "window")
    return pytest.param(case, count, lost, mechanism, marks=[] if is_short else [pytest.mark.complete])


WAYS = [(4, 1, "window"), (4, 0, "ring"), (2, 1, "ring")]


@pytest.mark.parametrize(
    ("case", "count", "lost", "mechanism"), [of_tier(case, *way) for case in CASES for way in WAYS]
)
def test_survivors_put_parts_together_wherever_an_instance_is_lost_in_an_update(case, count, lost, mechanism):
    function, of_all = functools.partial(train, case=case), Events(lost, 1)
    check(run_losing(count, REPLICAS, function, mechanism, of_all), case)
    commit = of_all.seen.index(f"barrier '{COMMIT}'")
    for number in range(commit - 2, len(of_all.seen)):
        check(run_losing(count, REPLICAS, function, mechanism, Events(lost, 1, number)), case, lost)


@pytest.mark.complete
@pytest.mark.parametrize("step", [-1, 0, 2])
@pytest.mark.parametrize("case", CASES)
def test_survivors_put_parts_together_wherever_an_instance_is_lost_in_a_step(case, step):
    function, of_all = functools.partial(train, case=case), Events(2, step)
    check(run_losing(4, REPLICAS, function, "window", of_all), case)
    for number in range(len(of_all.seen)):
        check(run_losing(4, REPLICAS, function, "window", Events(2, step, number)), case, 2)


@pytest.mark.complete
@pytest.mark.parametrize("case", CASES)
def test_a_second_instance_can_be_lost_during_the_recovery_of_parts(case):
    """The instance that keeps no copy of the lost one's parts is lost as well, at each event of the recovery."""
    function, first = functools.partial(train, case=case), Events(2, 1)
    check(run_losing(4, REPLICAS, function, "ring", first), case)
    commit = first.seen.index(f"barrier '{COMMIT}'")
    later = Events(0, 1, in_recovery=True)
    check(run_losing(4, REPLICAS, function, "ring", Events(2, 1, commit), later), case, 2)
    for number in range(len(later.seen)):
        second = Events(0, 1, number, in_recovery=True)
        check(run_losing(4, REPLICAS, function, "ring", Events(2, 1, commit), second), case, 0, 2)


def test_parts_survive_one_loss_after_another_down_to_one_instance():
    faults = [f"kill:instance={instance},step={step},phase=update" for step, instance in enumerate((3, 1, 0))]
    check(run_instances(4, REPLICAS, functools.partial(train, case="sharded"), faults), "sharded", 0, 1, 3)


def test_the_parts_of_the_survivors_are_not_traced_with_the_shapes_of_before(monkeypatch):
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    fault = "kill:instance=1,step=1,phase=all_reduce"
    check(run_instances(4, REPLICAS, functools.partial(train, case="sharded"), [fault]), "sharded", 1)


def test_parts_are_lost_if_both_instances_that_have_them_are_lost_at_once():
    faults = [f"kill:instance={instance},step=1,phase=update" for instance in (1, 2)]
    with pytest.raises(LostPartError, match=r"of replicas 4, 5 are lost: .* start the job again from its last checkp"):
        run_instances(4, REPLICAS, functools.partial(train, case="sharded"), faults)


def test_parts_are_cut_anew_after_a_loss_between_steps():
    def losing(strategy, step):
        if step == 1:
            strategy.on_chief(lambda: None)

    function = functools.partial(train, case="all", between=losing)
    of_all = Events(1, 0)
    check(run_losing(4, REPLICAS, function, "window", of_all), "all")
    number = next(number for number, name in enumerate(of_all.seen) if "duty of the chief" in name)
    check(run_losing(4, REPLICAS, function, "window", Events(1, 0, number)), "all", 1)


def restore_and_train(strategy, folder, case, saves=False):
    """Restore a checkpoint after a duty of the chief, and train to the end, or to the first step to save it."""
    trainer, dataset = trainer_of(strategy, case), dataset_of(strategy, case)
    state = first_state(trainer, case)
    with Checkpoints(folder, trainer, dataset) as checkpoints:
        strategy.instruments.step_begins(0)
        strategy.on_chief(lambda: None)
        state = checkpoints.restore(state)
        for batch in dataset.epoch(0):
            state, _ = trainer.step(state, batch)
            if saves and state.step == 1:
                checkpoints.save(state)
                checkpoints.wait()
                return None
    return bits_of(trainer, state)


def restored(folder, case, count, fault):
    """Return the bits of each instance, given the first step of two instances and a fault of some that restore it."""
    pytest.importorskip("orbax.checkpoint")
    function = functools.partial(restore_and_train, folder=folder, case=case)
    run_instances(2, REPLICAS, functools.partial(function, saves=True))
    return run_instances(count, REPLICAS, function, [fault])


def test_a_restored_state_is_copied_again_before_its_first_step(tmp_path):
    found = restored(tmp_path, "own model state", 4, "kill:instance=2,step=1,phase=all_reduce")
    assert found == [alone("own model state")[2], alone("own model state")[2], None, alone("own model state")[2]]


@pytest.mark.parametrize(("case", "count", "lost"), [("sharded", 2, 0), ("all", 4, 1)])
def test_a_state_that_is_restored_after_a_loss_has_the_parts_of_the_present_replicas(tmp_path, case, count, lost):
    found = restored(tmp_path, case, count, f"kill:instance={lost},step=0,phase=barrier")
    assert found == [None if instance == lost else alone(case)[2] for instance in range(count)]


def test_no_copies_are_made_in_a_job_that_ends_after_a_loss():
    def function(strategy):
        trainer = trainer_of(strategy, "sharded")
        state = first_state(trainer, "sharded")
        calls = strategy.communicator.calls_made
        for batch in dataset_of(strategy, "sharded").epoch(0):
            state, _ = trainer.step(state, batch)
        return state.held, sum(leaf.size for leaf in jax.tree.leaves(state.optimizer_state)), calls

    ending = run_instances(4, REPLICAS, function, survives=False)
    surviving = run_instances(4, REPLICAS, function)
    assert [held for held, *_ in ending] == [None] * 4
    assert {size for _, size, _ in surviving} != {size for _, size, _ in ending}
