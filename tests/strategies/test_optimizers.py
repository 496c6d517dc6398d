"""Transformations of optax: each updates as in plain optax on the mean gradients, or is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from tiers import only

import strategies
from strategies.jax.updates.optimizers import AS_WRITTEN, OptaxOptimizer, StepFacts

VARIABLES = {"b": np.float32([0.25, -1, 0.5]), "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}
STEPS = [(np.float32(2), 0.5), (np.float32(1.9), 0.25), (np.float32(2.5), 1.0)]  # losses, factors of gradients
PRIVATE = contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0))
USED = {
    "adabelief": optax.adabelief(0.1),
    "adadelta": optax.adadelta(0.1),
    "adafactor": optax.adafactor(0.1),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "adamax": optax.adamax(0.1),
    "adamw": optax.adamw(0.1),
    "adan": optax.adan(0.1),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "add_noise": optax.chain(optax.add_noise(0.1, 0.55, key=jax.random.key(0)), optax.sgd(0.1)),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "conditionally_transform": optax.conditionally_transform(optax.sgd(0.1), lambda step, **_: step > 0),
    "fromage": optax.fromage(0.1),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 4)),
    "keep_params_nonnegative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "lbfgs without a line search": optax.lbfgs(0.1, linesearch=None),
    "lion": optax.lion(0.1),
    "masked": optax.masked(optax.adam(0.1), {"b": False, "w": True}),
    "multi_transform": optax.multi_transform({"one": optax.adam(0.1), "two": optax.sgd(0.1)}, {"b": "one", "w": "two"}),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "MultiSteps, made": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "novograd": optax.novograd(0.1),
    "optimistic_adam": optax.optimistic_adam_v2(0.1),
    "polyak_sgd": optax.polyak_sgd(),
    "polyak_sgd for some": optax.partition(
        {"one": optax.polyak_sgd(), "two": optax.sgd(0.1)}, {"b": "one", "w": "two"}
    ),
    "rprop": optax.rprop(0.1),
    "skip_not_finite": optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
    "sm3": optax.sm3(0.1),
    "acprop": contrib.acprop(0.1),
    "ademamix": contrib.ademamix(0.1),
    "adopt": contrib.adopt(0.1),
    "cocob": contrib.cocob(),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "dog": contrib.dog(),
    "dowg": contrib.dowg(),
    "galore": contrib.galore(0.1, rank=2),
    "madgrad": contrib.madgrad(0.1),
    "mechanize": contrib.mechanize(optax.sgd(0.1)),
    "momo": contrib.momo(),
    "momo_adam": contrib.momo_adam(),
    "muon": contrib.muon(0.1),
    "prodigy": contrib.prodigy(),
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1, rtol=0.9)),
    "sam": contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "sam in a chain": optax.chain(optax.clip(1.0), contrib.sam(optax.sgd(0.1), optax.sgd(0.05))),
    "schedule_free": contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule_free_adamw": contrib.schedule_free_adamw(),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(0.1)),
}
PECULIAR = {
    "adam",
    "conditionally_transform",
    "dadapt_adamw",
    "inject_hyperparams",
    "masked",
    "mechanize",
    "momo",
    "MultiSteps",
    "polyak_sgd for some",
    "prodigy",
    "reduce_on_plateau",
    "sam in a chain",
    "schedule_free",
    "skip_not_finite",
}
"""Rows of the default tier: optimizers that wrap others or take extra arguments."""

REFUSED = {
    "lbfgs": (optax.lbfgs(), "zoom_linesearch .* value_fn"),
    "a line search": (optax.scale_by_backtracking_linesearch(5), "scale_by_backtracking_linesearch .* value_fn"),
    "sophia": (contrib.sophia(0.1), "hutchinson_estimator_diag_hessian .* obj_fn"),
    "sam that evaluates": (contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True), "sam .* grad_fn"),
    "differentially_private_aggregate": (PRIVATE, "per_example_global_norm_clip .* batch dimension"),
}


def gradients_like(variables, factor):
    return jax.tree.map(lambda leaf: factor * (leaf + 0.125), variables)


def by_optax(optimizer, variables):
    """Return the variables after plain optax, with `value` for optimizers that take it."""
    with_value = optax.with_extra_args_support(optimizer)
    state = optimizer.init(variables)
    for loss, factor in STEPS:
        gradients = gradients_like(variables, factor)
        try:
            changes, state = with_value.update(gradients, state, variables, value=loss)
        except TypeError:  # it takes no extra arguments, contrary to its class
            changes, state = with_value.update(gradients, state, variables)
        variables = optax.apply_updates(variables, changes)
    return variables


def by_us(optimizer, variables):
    ours = OptaxOptimizer(optimizer)
    state = ours.init(variables)
    for loss, factor in STEPS:
        known = StepFacts(jnp.float32(1), jnp.asarray(loss))
        variables, state = ours.apply(gradients_like(variables, factor), state, variables, known, AS_WRITTEN)
    return variables


@pytest.mark.parametrize("name", only(PECULIAR, USED))
def test_optimizers_of_optax_update_by_mean_gradients_as_optax_does(name):
    variables = jax.tree.map(jnp.asarray, VARIABLES)
    wanted, found = by_optax(USED[name], variables), by_us(USED[name], variables)
    assert strategies.fingerprint(found) == strategies.fingerprint(wanted)
    assert strategies.fingerprint(found) != strategies.fingerprint(variables)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_with_unknown_extra_arguments_is_refused_by_name(name):
    optimizer, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"cannot be used: {message}"):
        OptaxOptimizer(optimizer).check(VARIABLES, VARIABLES)


def test_changes_of_other_shapes_than_those_of_the_variables_are_refused():
    """Adding would broadcast them: a sum over rows would become the change of each element."""
    with pytest.raises(ValueError, match=r"a change of shape \[\] for a variable of \[3\]"):
        OptaxOptimizer(PRIVATE).check({"b": np.zeros(3)}, {"b": np.zeros(3)})


def test_lookahead_gets_the_gradients_of_its_fast_variables():
    variables = optax.LookaheadParams.init_synced({"w": jnp.zeros(3)})
    ours = OptaxOptimizer(optax.lookahead(optax.sgd(0.5), 2, 0.5))
    gradients = optax.LookaheadParams({"w": jnp.ones(3)}, {"w": jnp.zeros(3)})
    known = StepFacts(jnp.float32(1), jnp.float32(1))
    state = ours.init(variables)
    for _ in range(2):
        variables, state = ours.apply(gradients, state, variables, known, AS_WRITTEN)
    assert variables.fast["w"].tolist() == variables.slow["w"].tolist() == [-0.5] * 3  # half of the way


def loss_fn(variables, batch, key):
    return jnp.mean((variables["w"] - batch) ** 2)


@pytest.mark.parametrize("options", [{}, {"replicated_optimizer_state_sharding": True}], ids=["whole", "sharded"])
def test_the_optimizer_gets_the_mean_loss_of_all_replicas_with_the_same_bits_everywhere(on_instances, options):
    batch = np.linspace(0.1, 1, 8, dtype=np.float32)

    def train(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.polyak_sgd(), **options)
        state = trainer.init({"w": np.zeros(64, np.float32)})
        own = batch.reshape(4, 2)[strategy.local_replicas.start : strategy.local_replicas.stop].reshape(-1, 1)
        for _ in range(2):
            state, metrics = trainer.step(state, own)
        return strategies.fingerprint(state.variables), metrics["loss"]

    alone = on_instances(1, 4, train)
    assert set(on_instances(2, 4, train)) == set(alone)
    assert alone[0][1] < 0.38  # it was 0.39


@pytest.mark.parametrize("steps", [1, 4], ids=["step by step", "in one execution"])
def test_the_loss_of_a_single_replica_reaches_the_optimizer_in_every_kind_of_program(steps):
    """The steps suffice to be compiled as one program, which then gets the loss of each step."""
    plateau = optax.chain(optax.sgd(0.25), contrib.reduce_on_plateau())
    trainer = strategies.Trainer(strategies.IPUStrategy(1), loss_fn, plateau)
    state = trainer.init({"w": np.zeros(1, np.float32)})
    state, metrics = trainer.run(state, [np.ones((2, 1), np.float32)] * 12, steps)
    assert 0 < metrics["loss"] == float(state.optimizer_state[1].best_value)
