"""Agreement of instances: a difference in their options is reported before the first step, by name and value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from surviving_instances import run_instances
from tiers import also

import strategies
from strategies import DisagreementError, LossScaling, Trainer
from strategies.core.agreement import describe
from strategies.jax.step_record import facts_in_common

ROWS = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
MODES = [{}, {"variables_on_host": True}]


def noisy_error(variables, batch, key):
    return jnp.mean((batch @ variables["w"] - 0.1 * jax.random.normal(key)) ** 2)


def trained(strategy, *, loss_fn=noisy_error, optimizer=None, rows=ROWS, batch_size=2, data=None, steps=2, **options):
    """Return the fingerprint of the variables after some steps."""
    dataset = strategy.distribute_dataset(rows, batch_size, **{"seed": 0, **(data or {})})
    trainer = Trainer(strategy, loss_fn, optimizer or optax.sgd(0.1, momentum=0.9), **options)
    state = trainer.init({"w": jnp.ones(3)})
    for _, batch in zip(range(steps), dataset.epoch(0), strict=False):
        state, _ = trainer.step(state, batch)
    return strategies.fingerprint(state.variables)


def loss_of(factor):
    return lambda variables, batch, key: noisy_error(variables, batch, key) * factor


def clipped(norm):
    return optax.chain(strategies.clip_by_global_norm(norm), optax.sgd(0.1))


def hyper(rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)


DIFFERENT = {
    "seed": ({"seed": 4}, {"seed": 3}, "instance 1 has seed 3, instance 0 seed 4; start all with the same arguments"),
    "learning rate": (
        {"optimizer": optax.sgd(0.1)},
        {"optimizer": optax.sgd(0.2)},
        r"instance 1 computes the update differently from instance 0: line \d+ of its program is '.* -0.2 .*', and "
        r"there it is '.* -0.1 .*'; start all with the same program and arguments",
    ),
    "schedule": (
        {"optimizer": optax.sgd(optax.cosine_decay_schedule(0.1, 10))},
        {"optimizer": optax.sgd(optax.cosine_decay_schedule(0.1, 20))},
        r"the update differently .*' 20.0'|the update differently .* 20.0.* 10.0",
    ),
    "optimizer": ({"optimizer": optax.sgd(0.1)}, {"optimizer": optax.adam(0.1)}, "computes the update differently"),
    "clipping": ({"optimizer": clipped(1.0)}, {"optimizer": clipped(2.0)}, "the update differently .* 2.0.* 1.0"),
    "hyperparameters in the state": (
        {"optimizer": hyper(0.1)},
        {"optimizer": hyper(0.2)},
        r"instance 1 has optimizer state \.hyperparams\['learning_rate'\] 0.2, instance 0 .* 0.1; start all",
    ),
    "loss": ({}, {"loss_fn": loss_of(2.0)}, "instance 1 computes the loss function differently from instance 0: line"),
    "number in the loss": ({"loss_fn": loss_of(2.0)}, {"loss_fn": loss_of(2.5)}, r"the loss .* 2\.5.* 2\.0"),
    "batch size": ({}, {"batch_size": 3}, "instance 1 has data set batch_size 3, instance 0 data set batch_size 2; st"),
    "length": ({}, {"rows": ROWS[:-4]}, "instance 1 has data set length 56, instance 0 data set length 60"),
    "shuffle": ({}, {"data": {"shuffle": False}}, "has data set shuffle False, instance 0 data set shuffle True"),
    "seed of the data": ({}, {"data": {"seed": 1}}, "instance 1 has data set seed 1, instance 0 data set seed 0"),
    "remainder": (
        {"rows": ROWS[:-1], "loss_fn": lambda variables, batch, key: variables["w"].sum()},
        {
            "rows": ROWS[:-1],
            "loss_fn": lambda variables, batch, key: variables["w"].sum(),
            "data": {"remainder": "pad"},
        },
        "instance 1 has data set remainder pad, instance 0 data set remainder drop",
    ),
    "accumulation": (
        {},
        {"gradient_accumulation_count": 2},
        "instance 1 has gradient_accumulation_count 2, instance 0 gradient_accumulation_count 1",
    ),
    "loss scaling": ({"loss_scaling": 8.0}, {"loss_scaling": LossScaling(4.0, 1.0)}, r"initial=4.0.*initial=8.0"),
    "several": (
        {},
        {"seed": 3, "stochastic_rounding": True},
        "seed 3, instance 0 seed 0; instance 1 has stochastic_rounding True, instance 0 stochastic_rounding False",
    ),
    "checks": ({}, {"check_numerics": True}, "instance 1 has check_numerics True, instance 0 check_numerics False"),
    "dtype": ({"compute_dtype": "bfloat16"}, {}, "instance 1 has compute_dtype None, instance 0 compute_dtype bfloat1"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_differences_that_affect_the_result_are_named_on_all_instances(on_instances, what):
    of_first, of_second, words = DIFFERENT[what]

    def program(strategy):
        with pytest.raises(DisagreementError, match=words) as caught:
            trained(strategy, **(of_second if strategy.instance_index else of_first))
        return str(caught.value)

    one, other = on_instances(2, 4, program)
    assert one == other


@pytest.mark.parametrize("mode", MODES)
def test_different_loss_functions_of_large_gradients_are_named(on_instances, mode):
    """Each gradient has a buffer of its own."""

    def program(strategy):
        def loss_fn(variables, batch, key):
            return sum((leaf**2).sum() for leaf in variables) * (strategy.instance_index + 1)

        trainer = Trainer(strategy, loss_fn, optax.sgd(0.1))
        state = trainer.init([jnp.ones((600, 600)), jnp.ones((600, 600))])
        with pytest.raises(DisagreementError, match="the loss function differently"):
            trainer.step(state, np.ones((2, 1), np.float32))

    on_instances(2, 4, program, **mode)


@pytest.mark.complete
def test_sharded_state_is_no_obstacle(on_instances):
    def program(strategy):
        options = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1}
        same = trained(strategy, **options)
        with pytest.raises(DisagreementError, match="the update differently"):
            trained(strategy, optimizer=optax.adam((0.1, 0.2)[strategy.instance_index]), **options)
        with pytest.raises(DisagreementError, match="instance 1 has replicated_optimizer_state_sharding True"):
            trained(strategy, **(options if strategy.instance_index else {}))
        return same

    assert len(set(on_instances(2, 4, program))) == 1


@pytest.mark.parametrize("instances", [2, 3])
def test_batches_of_different_shapes_are_named(on_instances, instances):
    """The batches come from no data set: each instance makes its own."""

    def program(strategy):
        trainer = Trainer(strategy, noisy_error, optax.sgd(0.1))
        state = trainer.init({"w": jnp.ones(3)})
        rows = len(strategy.local_replicas) * (2 + (strategy.instance_index == 1))
        others = "instance 0" if instances == 2 else "instances 0 and 2"
        words = rf"instance 1 has batch for each replica float32\[3, 3\], {others} batch for each replica float32\[2, 3"
        with pytest.raises(DisagreementError, match=words):
            trainer.step(state, ROWS[:rows])

    on_instances(instances, 6, program)


def test_a_different_setting_of_jax_is_named(on_instances):
    """No line of a program shows this setting, which decides random numbers."""

    def program(strategy):
        words = (
            "instance 1 has jax_threefry_partitionable False, instance 0 jax_threefry_partitionable True; start all "
            "with the same arguments, settings and versions, on hosts of one kind"
        )
        with jax.threefry_partitionable(strategy.is_chief), pytest.raises(DisagreementError, match=words):
            trained(strategy)

    on_instances(2, 4, program)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            "--xla_cpu_enable_fast_math=true",
            "",
            "instance 1 has XLA_FLAGS , instance 0 XLA_FLAGS --xla_cpu_enable_fast",
        ),
        ("--a=1 --xla_dump_to=/0 --b", "--b --xla_force_host_platform_device_count=2 --a=1", None),
    ],
)
def test_different_flags_of_xla_are_named_if_they_decide_bits(monkeypatch, first, second, words):
    facts = []
    for flags in (first, second):
        monkeypatch.setenv("XLA_FLAGS", flags)
        facts.append([{name: str(value) for name, value in facts_in_common(jax.devices()[0]).items()}])
    if words is None:
        assert facts[0] == facts[1]
    else:
        assert words in describe(dict(enumerate(facts)))


def test_vector_instructions_are_compared_unless_a_flag_says_which_xla_uses(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert facts_in_common(jax.devices()[0])["CPU vectors"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert not facts_in_common(jax.devices()[0])["CPU vectors"]


def test_a_different_step_is_named(on_instances):
    def program(strategy):
        trainer = Trainer(strategy, noisy_error, optax.sgd(0.1))
        state = trainer.init({"w": jnp.ones(3)})
        state = strategies.TrainState(state.variables, state.optimizer_state, 7 * strategy.instance_index)
        with pytest.raises(DisagreementError, match="instance 1 has step 7, instance 0 step 0"):
            trainer.step(state, ROWS[:4])

    on_instances(2, 4, program)


EQUAL = {
    "nothing special": {},
    "a schedule": {"optimizer": optax.adamw(optax.cosine_decay_schedule(0.1, 10))},
    "clipping": {"optimizer": clipped(1.0)},
    "loss scaling": {"loss_scaling": "dynamic", "compute_dtype": "bfloat16"},
    "smaller gradients": {"gradient_transfer_dtype": "bfloat16"},
    "accumulation": {"gradient_accumulation_count": 2, "data": {"gradient_accumulation_count": 2}},
    "a function as option": {"gradient_accumulation_dtype": lambda leaf: leaf.dtype},
    "a policy": {"recompute": jax.checkpoint_policies.dots_saveable},
}


FEW = ("nothing special", "loss scaling")


@pytest.mark.parametrize(
    ("what", "mode"),
    [(what, mode) if what in FEW and not mode else also(what, mode) for what in EQUAL for mode in MODES],
)
def test_equal_programs_train_to_the_same_bits(on_instances, what, mode):
    found = on_instances(2, 4, lambda strategy: trained(strategy, **EQUAL[what]), **mode)
    assert found == [trained(strategies.IPUStrategy(4), **EQUAL[what])] * 2


def test_differences_that_do_not_affect_the_result_are_allowed(on_instances):
    """Prefetching, printing, other function objects, and earlier traces affect no result."""

    def program(strategy):
        is_first = strategy.instance_index == 0

        def loss_fn(variables, batch, key):
            if is_first:
                jax.debug.print("{}", batch.sum())
            return noisy_error(variables, batch, key)

        if is_first:
            jax.jit(jax.grad(lambda variables: noisy_error(variables, ROWS, jax.random.key(0))))({"w": jnp.ones(3)})
        return trained(strategy, loss_fn=loss_fn, data={"prefetch": 0 if is_first else 3})

    one, other = on_instances(2, 4, program)
    assert one == other


def test_options_that_are_functions_are_compared_by_name(on_instances):
    """Each instance has its own objects at other addresses."""

    def program(strategy):
        policy = functools.partial(jax.checkpoint_policies.dots_saveable)
        return trained(strategy, recompute=policy, gradient_accumulation_dtype=lambda leaf: leaf.dtype)

    one, other = on_instances(2, 4, program)
    assert one == other


def test_a_loss_can_depend_on_the_replica(on_instances):
    def loss_fn(variables, batch, key):
        index = strategies.get_replica_context().replica_id_in_sync_group
        return noisy_error(variables, batch, key) * (1 + index)

    one, other = on_instances(2, 4, lambda strategy: trained(strategy, loss_fn=loss_fn))
    assert one == other


def test_instances_compare_once_for_all_steps(on_instances):
    def program(strategy):
        begun = [strategy.communicator.calls_made]
        for steps in (1, 2, 7):
            trained(strategy, steps=steps)
            begun.append(strategy.communicator.calls_made)
        return np.diff(begun)

    (of_one, of_two, of_seven), _ = on_instances(2, 4, program)
    assert of_seven - of_two == 5 * (of_two - of_one)


@pytest.mark.parametrize("lost", [0, 2])
def test_survivors_compare_again_wherever_each_was(lost):
    """The first step was abandoned half-way; one instance had compared already, and the others had not."""
    faults = [f"kill:instance={lost},step=0,phase=all_gather"]
    found = run_instances(3, 6, trained, faults, mechanism="ring")
    assert [each for each in found if each is not None] == [trained(strategies.IPUStrategy(6))] * 2


def test_survivors_still_learn_of_a_difference():
    def program(strategy):
        with pytest.raises(DisagreementError, match="instance 2 has seed 1, instance 1 seed 0"):
            trained(strategy, seed=strategy.replicas.first_index // 2)
        return True

    assert run_instances(3, 6, program, ["kill:instance=0,step=0,phase=all_gather"]) == [None, True, True]


class TestWords:
    def test_the_minority_is_named_first(self):
        told = {each: [{"seed": "3" if each == 2 else "4"}] for each in range(4)}
        assert describe(told) == (
            "instance 2 has seed 3, instances 0, 1 and 3 seed 4; start all with the same arguments"
        )

    def test_a_missing_value_is_named(self):
        assert describe({0: [{"a": "1"}], 5: [{}]}).startswith("instance 5 has no a, instance 0 a 1")

    def test_at_most_four_differences_are_named(self):
        told = {each: [{name: str(each) for name in "abcdef"}] for each in range(2)}
        assert describe(told).count("instance 1 has") == 4
        assert "; and 2 more; start all" in describe(told)

    def test_consequences_of_other_differences_are_left_out(self):
        told = {0: [{"a": "1"}, {"p": ["x"]}], 1: [{"a": "2"}, {"p": ["y"]}]}
        assert "'x'" not in describe(told)

    def test_another_order_is_named_with_its_first_difference(self):
        order = "in another order than instance 0: number 2 is 'c', and there it is 'b'; make them in one order"
        assert f"instance 1 has p {order}" in describe({0: [{"p": ["a", "b", "c"]}], 1: [{"p": ["a", "c", "b"]}]})
        assert f"instance 1 has the same parts {order}" in describe(
            {0: [dict.fromkeys("abc", "1")], 1: [dict.fromkeys("acb", "1")]}
        )

    def test_a_program_that_ends_earlier_is_no_difference(self):
        told = {0: [{"p": ["x", "y"]}], 1: [{"p": ["x", "y"]}], 2: [{"p": ["x"]}]}
        assert describe(told) == (
            "instance 2 computes p differently from instance 0: line 2 of its program is 'nothing', and there it is "
            "'y'; start all with the same program and arguments"
        )
