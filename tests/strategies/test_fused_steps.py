"""Many steps in one program, tested without a trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.jax.fused_steps import FusedSteps, probe_of
from strategies.jax.gradients.computation import Trainable
from strategies.jax.gradients.model_state import ModelStateRule, control_words
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.options import StepOptions
from strategies.jax.updates.update import WholeStateUpdate
from strategies.values import TrainState

BATCHES = [{"x": np.float32([[number, 1], [2, -number]])} for number in (1, 4, 2)]
SEED, FIRST_STEP = 3, 5


def loss_fn(variables, batch, key):
    """Compute a loss whose gradient is the sum of the rows; all of it is exact."""
    return (batch["x"] @ variables["w"]).sum(), {"draw": jax.random.uniform(key)}


def drawn(step):
    """Return the number that the loss function draws in a step."""
    return float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), step), 0)))


@pytest.fixture
def alone():
    return strategies.IPUStrategy(1)


def start(dtype=np.float32):
    return {"w": jnp.array([1, 2], dtype)}


class Steps:
    """The steps of one replica, in one program or one by one."""

    def __init__(self, strategy, loss_fn=loss_fn, optimizer=None, variables=None, batch=BATCHES[0], **settings):
        shapes = ReplicaShapes(*jax.tree.map(jax.typeof, (variables or start(), jax.tree.map(jnp.asarray, batch))))
        trainable, rule, options = (
            Trainable.of(shapes.variables, None),
            ModelStateRule.of(None, None),
            StepOptions(seed=SEED),
        )
        self.program = ReplicaProgram(strategy.replicas, loss_fn, shapes, trainable, rule, None, options)
        self.update = WholeStateUpdate(
            strategy.replicas, optimizer or optax.sgd(0.5, momentum=0.5), StepOptions(**settings)
        )
        self.fused = FusedSteps(self.program, self.update)

    def state(self, variables):
        return TrainState(variables, self.update.init(variables), FIRST_STEP)

    def together(self, variables):
        state, tails, _ = self.fused(self.state(variables), BATCHES)
        return state.variables, state.optimizer_state, tails

    def one_by_one(self, variables):
        state, tails, run = self.update.init(variables), [], jax.jit(self.program)
        for number, batch in enumerate(BATCHES):
            words = control_words(FIRST_STEP + number, False, 1.0)
            tail, *gradients = run(variables, batch, np.int32(0), words)
            variables, state = self.update.apply(variables, state, {"w": np.asarray(gradients[0])}, words)
            tails.append(tail)
        return variables, state, np.stack(tails)


def test_each_step_takes_its_batch_and_the_state_of_the_step_before(alone):
    variables, state, _ = Steps(alone).together(start())
    w, momentum = np.float32([1, 2]), np.zeros(2, np.float32)
    for batch in BATCHES:
        momentum = 0.5 * momentum + batch["x"].sum(0)
        w = w - 0.5 * momentum
    assert variables["w"].tolist() == w.tolist()
    assert [leaf.tolist() for leaf in jax.tree.leaves(state)] == [momentum.tolist()]


def test_each_step_has_a_tail_with_values_from_before_its_update(alone, bits):
    *_, tails = Steps(alone).together(start())
    losses, notice = [1 * 3 + 2 * 0, -0.5 * 6 + 2 * -3, -4.25 * 4 + 3.5 * -1], 0
    assert tails.tolist() == [[loss, drawn(FIRST_STEP + number), notice] for number, loss in enumerate(losses)]
    assert bits(tails) == bits(Steps(alone).one_by_one(start())[2])


@pytest.mark.complete
def test_each_update_has_the_random_bits_of_its_own_step(alone):
    """All sums are exact before they are rounded, so nothing else can make a difference."""

    def loss(variables, batch, key):
        return variables["w"].astype(jnp.float32).sum() * batch["x"].sum()

    begin = {"w": jnp.ones(500, jnp.bfloat16)}
    settings = {"optimizer": optax.sgd(2.0**-10), "variables": begin, "stochastic_rounding": True, "seed": SEED}
    together, one_by_one = Steps(alone, loss, **settings), Steps(alone, loss, **settings)
    found, wanted = (
        steps({"w": jnp.ones(500, jnp.bfloat16)})[0] for steps in (together.together, one_by_one.one_by_one)
    )
    assert len(set(np.asarray(wanted["w"]).tolist())) > 1
    assert strategies.fingerprint(found) == strategies.fingerprint(wanted)


def test_old_variables_and_state_are_used_up(alone):
    """The donation is declared to the compiler, which may write the new arrays into the same memory."""

    def loss(variables, batch, key):
        return variables["w"].sum() * batch["x"].sum()

    variables = {"w": jnp.ones(1000)}
    steps = Steps(alone, loss, variables=variables)
    compiled = steps.fused._run.lower(*steps.fused._arguments(steps.state(variables), BATCHES)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * 4000


@pytest.mark.parametrize("count", [1, 3])
def test_the_gradients_of_the_last_step_are_returned(alone, count):
    """The loss is a square, so its gradient shows the variables; a learning rate of 0 keeps them."""

    def loss(variables, batch, key):
        return (batch["x"] @ variables["w"]).sum() ** 2 / 2 * jax.random.uniform(key)

    steps, batches = Steps(alone, loss, optax.sgd(0.0)), BATCHES[-count:]
    state = TrainState(start(), steps.update.init(start()), FIRST_STEP)
    rows = BATCHES[-1]["x"].sum(0)
    wanted = np.float32(drawn(FIRST_STEP + count - 1)) * (rows @ [1, 2]) * rows
    np.testing.assert_allclose(steps.fused(state, batches)[2]["w"], wanted, rtol=1e-6)


def printing(variables, batch, key):
    jax.debug.callback(lambda: None)
    return loss_fn(variables, batch, key)


def reducing(variables, batch, key):
    """Reduce over one replica, which needs no exchange."""
    return strategies.get_replica_context().all_reduce("sum", loss_fn(variables, batch, key)[0])


@pytest.mark.parametrize(("loss", "wanted"), [(loss_fn, False), (reducing, False), (printing, True)])
def test_programs_that_call_python_are_recognised_without_running(alone, loss, wanted):
    variables = start()
    steps = Steps(alone, loss)
    assert steps.fused.has_effects(steps.state(variables), BATCHES) is wanted
    assert not variables["w"].is_deleted()


# ---- values to compare two programs


ZEROS = {"w": jnp.zeros((100, 50)), "h": jnp.zeros(400, jnp.bfloat16), "s": jnp.zeros(())}


def redrawn(seed, batch=None):
    """Return the variables and the batch with which programs are compared."""
    state, rows = probe_of(TrainState(ZEROS, None, 0), batch, seed)
    return state.variables, rows


def test_drawn_variables_have_the_given_shapes_and_are_nonzero(seed):
    found, _ = redrawn(seed)
    for name, leaf in found.items():
        assert (leaf.shape, leaf.dtype) == (ZEROS[name].shape, ZEROS[name].dtype)
        assert leaf.sharding == ZEROS[name].sharding
        assert np.asarray(leaf).all()


def test_outputs_of_a_layer_have_about_unit_variance(seed):
    found = redrawn(seed)[0]["w"]
    assert 0.5 < 100 * float(jnp.var(found)) < 2


def test_the_same_seed_draws_the_same():
    one, again, other = (np.asarray(redrawn(seed)[0]["w"]) for seed in (3, 3, 4))
    assert (one == again).all()
    assert not (one == other).any()


def test_numbers_of_a_batch_are_redrawn_and_labels_stay(seed):
    batch = {"x": np.zeros((6, 2), np.float32), "y": jnp.zeros(6, jnp.bfloat16), "label": np.arange(6)}
    _, found = redrawn(seed, batch)
    assert found["label"] is batch["label"]
    assert (found["x"].dtype, found["x"].shape, type(found["x"])) == (np.float32, (6, 2), np.ndarray)
    assert (found["y"].dtype, found["y"].sharding) == (jnp.bfloat16, batch["y"].sharding)
    assert found["x"].all()
