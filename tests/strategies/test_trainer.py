"""One step of training: the mean of the replicas' gradients, applied once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adding import added

import collectives
import strategies
from strategies import NonFiniteGradientError, Trainer, TrainState
from strategies.exchange.flat import private_memory

RNG = np.random.default_rng(0)
POINTS = RNG.standard_normal((24, 3)).astype(np.float32)
TARGETS = RNG.standard_normal(24).astype(np.float32)
BATCH = {"x": POINTS, "y": TARGETS}


def start():
    return {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}


def squared_error(variables, batch, key):
    error = batch["x"] @ variables["w"] + variables["b"] - batch["y"]
    return jnp.mean(error**2), {"largest": jnp.abs(error).max(), "rows": error.size}


def local_part(strategy, tree):
    """Return the local replicas' rows of a global batch."""
    rows = len(jax.tree.leaves(tree)[0]) // strategy.num_replicas_in_sync
    part = slice(strategy.local_replicas.start * rows, strategy.local_replicas.stop * rows)
    return jax.tree.map(lambda leaf: leaf[part], tree)


def trained(strategy, loss_fn=squared_error, optimizer=None, steps=1, variables=None, batch=BATCH, **options):
    """Return the state and metrics after some steps over the same global batch."""
    trainer = Trainer(strategy, loss_fn, optimizer or optax.sgd(0.125), **options)
    state = trainer.init(start() if variables is None else variables)
    for _ in range(steps):
        state, metrics = trainer.step(state, local_part(strategy, batch))
    return state, metrics


class TestOneUpdate:
    def test_an_update_applies_the_mean_of_the_gradients(self, strategy):
        state, _ = trained(strategy)
        error = POINTS @ np.array([1.0, -2.0, 0.5]) + 0.25 - TARGETS
        gradient = 2 * (error[:, None] * POINTS).mean(axis=0)
        np.testing.assert_allclose(state.variables["w"], [1.0, -2.0, 0.5] - 0.125 * gradient, rtol=1e-5)
        np.testing.assert_allclose(state.variables["b"], 0.25 - 0.125 * 2 * error.mean(), rtol=1e-5)

    def test_gradients_are_added_in_the_order_of_the_tree(self, strategy, bits):
        state, _ = trained(strategy)
        gradient = jax.jit(jax.grad(lambda v, batch: squared_error(v, batch, None)[0]))
        parts = [gradient(start(), {k: v[6 * r : 6 * r + 6] for k, v in BATCH.items()}) for r in range(4)]
        total = added([np.asarray(part["b"]) for part in parts])
        wanted = np.float32(0.25) - np.float32(0.125) * (np.asarray(total) / np.float32(4))
        assert bits(state.variables["b"]) == bits(wanted)

    @pytest.mark.parametrize("replicas", [3, 6])
    def test_the_sum_is_divided_once_by_the_replicas(self, bits, replicas):
        """Multiplying by 1 / R would round differently for an R that is no power of two."""

        def loss_fn(variables, batch, key):
            return jnp.sum(variables["w"] * batch)

        gradients = np.random.default_rng(2).standard_normal((replicas, 64)).astype(np.float32)
        strategy = strategies.IPUStrategy(num_replicas=replicas)
        zeros = {"w": jnp.zeros((1, 64))}
        state, _ = trained(strategy, loss_fn, optax.sgd(1.0), variables=zeros, batch=gradients)
        assert bits(-state.variables["w"][0]) == bits(added(gradients) / np.float32(replicas))

    def test_steps_are_counted(self, strategy):
        assert trained(strategy, steps=3)[0].step == 3

    def test_variables_keep_their_shapes_and_dtypes(self, strategy):
        state, _ = trained(strategy)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state.variables) == {
            "w": ((3,), jnp.float32),
            "b": ((), jnp.float32),
        }

    def test_the_optimizer_state_is_kept(self, strategy):
        momentum, _ = trained(strategy, optimizer=optax.sgd(0.1, momentum=0.5), steps=2)
        plain, _ = trained(strategy, optimizer=optax.sgd(0.1), steps=2)
        assert not np.array_equal(momentum.variables["w"], plain.variables["w"])
        assert jax.tree.leaves(momentum.optimizer_state)

    def test_a_step_uses_up_the_old_state(self, strategy):
        """Deletion may be late: under load XLA's threads release their reads late."""
        trainer = Trainer(strategy, squared_error, optax.adam(0.1))
        state, used_up = trainer.init(start()), 0
        for _ in range(10):
            before = jax.tree.leaves(state.variables)
            state, _ = trainer.step(state, BATCH)
            jax.block_until_ready(state.variables)
            used_up += all(leaf.is_deleted() for leaf in before)
        assert used_up >= 5

    def test_the_program_may_change_its_own_optimizer_state_after_a_step(self):
        """JAX reads the arrays of the program in place, and later than the call, if they are aligned."""
        trainer = Trainer(strategies.IPUStrategy(), lambda v, batch, key: (v * batch).sum(), optax.sgd(0.1, momentum=1))
        ones = np.ones(1 << 22, np.float32)
        state, _ = trainer.step(trainer.init(ones), jax.device_put(ones))
        for _ in range(3):
            momenta = private_memory(ones.shape, ones.dtype)
            momenta[...] = 0
            leaves, structure = jax.tree.flatten(state.optimizer_state)
            optimizer_state = jax.tree.unflatten(structure, [momenta] * len(leaves))
            given = TrainState(jax.device_put(ones), optimizer_state, state.step)
            state, _ = trainer.step(given, jax.device_put(ones))
            momenta[...] = np.nan
            assert np.isfinite(state.variables).all()

    def test_init_leaves_the_given_variables_alone(self, strategy):
        given = start()
        trained(strategy, variables=given)
        np.testing.assert_array_equal(given["w"], [1.0, -2.0, 0.5])

    def test_a_state_is_a_tree(self, strategy):
        state, _ = trained(strategy)
        doubled = jax.tree.map(lambda leaf: leaf * 2, state)
        assert isinstance(doubled, TrainState)
        assert doubled.step == 1

    def test_batches_of_another_size_are_accepted_in_between(self, strategy):
        trainer = Trainer(strategy, squared_error, optax.sgd(0.1))
        state = trainer.init(start())
        for rows in (24, 8, 24):
            state, metrics = trainer.step(state, {k: v[:rows] for k, v in BATCH.items()})
            assert metrics["rows"] == rows // 4

    def test_a_trainer_can_restart_with_variables_of_other_shapes(self, strategy):
        def loss_fn(variables, batch, key):
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(variables)) * batch.mean()

        trainer = Trainer(strategy, loss_fn, optax.sgd(0.25))
        ones = np.ones(4, np.float32)
        first, _ = trainer.step(trainer.init({"w": jnp.ones((1, 4))}), ones)
        second, _ = trainer.step(trainer.init({"w": jnp.ones(4)}), ones)
        third, _ = trainer.step(trainer.init({"w": jnp.ones((2, 2), jnp.bfloat16)}), ones)
        assert [state.variables["w"].shape for state in (first, second, third)] == [(1, 4), (4,), (2, 2)]
        for state in (first, second, third):
            np.testing.assert_array_equal(np.asarray(state.variables["w"], np.float32).reshape(-1), [0.5] * 4)


SPREADS = {(6, 3, "ring"), (6, 2, "window"), (8, 8, "window")}  # in every run; other spreads in the complete tier


class TestTheSameBitsForEveryNumberOfInstances:
    @pytest.mark.parametrize(
        ("replicas", "instances", "mechanism"),
        [
            pytest.param(*sizes, mechanism, marks=() if (*sizes, mechanism) in SPREADS else pytest.mark.complete)
            for sizes in [(8, 2), (8, 4), (8, 8), (6, 2), (6, 3), (6, 6)]
            for mechanism in ("ring", "window")
        ],
    )
    def test_bits_are_the_same_with_every_mechanism(self, on_instances, replicas, instances, mechanism):
        def program(strategy):
            state, metrics = trained(strategy, optimizer=optax.adamw(0.1), steps=5)
            return strategies.fingerprint(state.variables), dict(metrics)

        alone = program(strategies.IPUStrategy(num_replicas=replicas))
        assert on_instances(instances, replicas, program, mechanism) == [alone] * instances

    @pytest.mark.parametrize("mechanism", ["ring", "window"])
    def test_bits_are_the_same_with_buffers_larger_than_a_chunk(self, on_instances, mechanism):
        def loss_fn(variables, batch, key):
            return jnp.mean((batch["x"][:, :1] * variables["w"]) ** 2)

        def program(strategy):
            variables = {"w": jnp.linspace(-1, 1, 500_003)}
            return strategies.fingerprint(trained(strategy, loss_fn, steps=2, variables=variables)[0].variables)

        alone = program(strategies.IPUStrategy(num_replicas=6))
        assert on_instances(3, 6, program, mechanism) == [alone] * 3


class TestDtypes:
    def mixed(self):
        return {
            "a": jnp.arange(3, dtype=jnp.float32),
            "b": jnp.ones((2, 2), jnp.bfloat16),
            "c": jnp.ones(5, jnp.float16),
            "d": jnp.full((7,), 2, jnp.float32),
            "e": jnp.bfloat16(3),
        }

    def loss(self, variables, batch, key):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(variables)) * batch.mean()

    @pytest.mark.parametrize("instances", [2, *(pytest.param(n, marks=pytest.mark.complete) for n in (1, 4))])
    def test_variables_of_several_dtypes(self, on_instances, instances):
        def program(strategy):
            batch = np.ones(8, np.float32)
            state, _ = trained(strategy, self.loss, optax.sgd(0.5), variables=self.mixed(), batch=batch)
            return jax.tree.map(lambda leaf: (leaf.dtype.name, np.asarray(leaf, np.float32).tolist()), state.variables)

        wanted = jax.tree.map(lambda leaf: (leaf.dtype.name, np.asarray(leaf - 0.5, np.float32).tolist()), self.mixed())
        assert on_instances(instances, 4, program) == [wanted] * instances

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
    def test_variables_that_are_not_floating_point_are_refused(self, strategy, dtype):
        with pytest.raises(
            TypeError, match=rf"variable \['deep'\]\['n'\] is of dtype {np.dtype(dtype)}, but only floating"
        ):
            Trainer(strategy, self.loss, optax.sgd(1.0)).init({"deep": {"n": jnp.zeros(2, dtype)}})

    def test_a_mean_of_16_bit_gradients_does_not_overflow(self, strategy):
        def loss_fn(variables, batch, key):
            return (variables["w"].astype(jnp.float32) * 40000 * batch.mean()).sum()

        variables = {"w": jnp.zeros(2, jnp.float16)}
        state, _ = trained(strategy, loss_fn, optax.sgd(1.0), variables=variables, batch=np.ones(4, np.float32))
        np.testing.assert_array_equal(state.variables["w"], [-40000] * 2)


class TestMetrics:
    def test_metrics_are_means_over_all_replicas(self, strategy):
        _, metrics = trained(strategy)
        error = POINTS @ np.array([1.0, -2.0, 0.5]) + 0.25 - TARGETS
        assert set(metrics) == {"loss", "largest", "rows"}
        assert metrics["loss"] == pytest.approx((error**2).mean(), rel=1e-5)
        assert metrics["largest"] == pytest.approx(np.abs(error).reshape(4, 6).max(axis=1).mean(), rel=1e-5)
        assert metrics["rows"] == 6
        assert all(isinstance(value, float) for value in metrics.values())

    def test_metrics_are_those_before_the_update(self, strategy):
        assert trained(strategy, steps=1)[1]["loss"] > trained(strategy, steps=2)[1]["loss"]

    def test_metrics_stay_unchanged_while_training_continues(self, strategy):
        trainer = Trainer(strategy, squared_error, optax.sgd(0.1))
        state, first = trainer.step(trainer.init(start()), BATCH)
        before = dict(first)
        for _ in range(3):
            state, _ = trainer.step(state, BATCH)
        assert dict(first) == before

    def test_metrics_can_be_missing(self, strategy):
        _, metrics = trained(strategy, lambda v, batch, key: squared_error(v, batch, key)[0])
        assert list(metrics) == ["loss"]

    def test_an_unknown_metric_is_a_key_error(self, strategy):
        with pytest.raises(KeyError, match="accuracy"):
            trained(strategy)[1]["accuracy"]

    @pytest.mark.parametrize(
        ("metric", "text"), [(jnp.zeros(3), r"metric 'bad' is of shape \[3\], but metrics are scalars")]
    )
    def test_metrics_that_are_no_scalars_are_refused(self, strategy, metric, text):
        with pytest.raises(TypeError, match=text):
            trained(strategy, lambda v, batch, key: (v["b"], {"bad": metric}))

    def test_a_metric_called_loss_is_refused(self, strategy):
        with pytest.raises(TypeError, match="'loss'"):
            trained(strategy, lambda v, batch, key: (v["b"], {"loss": v["b"]}))


class TestTheLoss:
    @pytest.mark.parametrize(
        ("loss", "text"),
        [
            (lambda v: v["w"], r"the loss is float32\[3\]; it must be a floating-point scalar: take jnp.mean of it"),
            (lambda v: jnp.int32(3), "the loss is int32"),
            (lambda v: (v["w"], {}), r"the loss is float32\[3\]"),
            (lambda v: None, "the loss function returns None; it must return the loss"),
            (lambda v: (v["b"], v["b"]), r"returns \('float32\[\]', 'float32\[\]'\); it must return the loss"),
            (lambda v: (v["b"], {}, 3), "or the loss and a dictionary of metrics"),
        ],
    )
    def test_a_loss_that_is_no_floating_point_scalar_is_refused(self, strategy, loss, text):
        with pytest.raises(TypeError, match=text):
            trained(strategy, lambda variables, batch, key: loss(variables))

    def test_the_loss_can_be_part_of_an_outcome(self, strategy):
        def outcome(variables, batch, key):
            loss, metrics = squared_error(variables, batch, key)
            return strategies.Outcome(loss, metrics, outputs=batch["x"])

        wanted, metrics = trained(strategy)
        state, same = trained(strategy, outcome)
        assert strategies.fingerprint(state.variables) == strategies.fingerprint(wanted.variables)
        assert dict(same) == dict(metrics)
        assert dict(trained(strategy, lambda *given: strategies.Outcome(squared_error(*given)[0]))[1]) == {
            "loss": metrics["loss"]
        }

    def test_an_outcome_with_a_loss_that_is_no_scalar_is_refused(self, strategy):
        with pytest.raises(TypeError, match=r"the loss is float32\[3\]"):
            trained(strategy, lambda v, batch, key: strategies.Outcome(v["w"]))

    def test_an_outcome_without_a_model_state_is_accepted(self, strategy):
        with pytest.raises(TypeError, match="returns a model state, but gets none"):
            trained(strategy, lambda v, batch, key: strategies.Outcome(v["b"], model_state={"mean": v["w"]}))

    def test_the_loss_can_have_16_bits(self, strategy):
        _, metrics = trained(strategy, lambda v, batch, key: (v["b"] * 2).astype(jnp.bfloat16))
        assert metrics["loss"] == 0.5


class TestBatches:
    def test_batches_that_local_replicas_cannot_share_are_refused(self, strategy):
        trainer = Trainer(strategy, squared_error, optax.sgd(0.1))
        state = trainer.init(start())
        with pytest.raises(
            ValueError, match=r"shape \[23, 3\] for 4 local replicas; its first axis must be a multiple"
        ):
            trainer.step(state, {"x": POINTS[:23], "y": TARGETS[:23]})
        assert trainer.step(state, BATCH)[0].step == 1

    def test_batches_without_a_first_axis_are_refused(self, strategy):
        trainer = Trainer(strategy, squared_error, optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"a batch has the shape \[\] for 4 local replicas"):
            trainer.step(trainer.init(start()), {"x": np.float32(0), "y": TARGETS})

    def test_batches_without_rows_are_refused(self, strategy):
        trainer = Trainer(strategy, squared_error, optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"a batch of shape \[0, 3\] has no rows"):
            trainer.step(trainer.init(start()), {"x": POINTS[:0], "y": TARGETS[:0]})

    def test_batches_that_are_no_arrays_are_refused(self, strategy):
        trainer = Trainer(strategy, squared_error, optax.sgd(0.1))
        with pytest.raises(TypeError, match="the batch has a float; use arrays"):
            trainer.step(trainer.init(start()), [1.0, 2.0])

    def test_integers_that_do_not_fit_into_32_bits_are_refused(self, strategy):
        """JAX would silently truncate them: classes that are hashes, for example, would change."""
        labels = np.full(24, 2**33 + 7)
        trainer = Trainer(strategy, lambda variables, batch, key: variables["b"] * batch[0, 0], optax.sgd(0.1))
        state = trainer.init(start())
        with pytest.raises(ValueError, match="numbers from 8589934599 to 8589934599 do not fit into int32"):
            trainer.step(state, labels[:, np.newaxis])
        with pytest.raises(ValueError, match="do not fit into int32, which JAX would keep"):
            list(strategy.distribute_dataset(labels, batch_size=3, shuffle=False).epoch(0))
        small = strategy.distribute_dataset(labels - 2**33, batch_size=3, shuffle=False)
        assert next(small.epoch(0)).tolist() == [7] * 3 * len(strategy.local_replicas)

    def test_each_replica_sees_its_own_part(self, strategy):
        def loss_fn(variables, batch, key):
            own = strategies.get_replica_context().replica_id_in_sync_group
            return variables["b"] * 0, {"right": (batch == own).all(), "rows": batch.shape[0]}

        _, metrics = trained(strategy, loss_fn, batch=np.repeat(np.arange(4), 5))
        assert (metrics["right"], metrics["rows"]) == (1, 5)


class TestKeys:
    """Keys of random numbers: one per replica and step, for every number of instances."""

    @staticmethod
    def draws(strategy, steps=3, seed=0):
        """Return the draw of each replica for each step, as the variables of all replicas show it."""
        total = strategy.num_replicas_in_sync

        def loss_fn(variables, batch, key):
            own = jnp.arange(total) == strategies.get_replica_context().replica_id_in_sync_group
            return (variables["w"] * own * jax.random.uniform(key)).sum() * total

        trainer = Trainer(strategy, loss_fn, optax.sgd(1.0), seed=seed)
        state = trainer.init({"w": jnp.zeros(total)})
        found = [np.zeros(total, np.float32)]
        for _ in range(steps):
            state, _ = trainer.step(state, np.zeros(len(strategy.local_replicas), np.float32))
            found.append(np.array(state.variables["w"]))
        return -np.diff(found, axis=0)

    def test_keys_differ_for_each_replica_and_step(self, strategy):
        assert len(np.unique(self.draws(strategy).round(4))) == 12

    def test_keys_differ_with_the_seed(self, strategy):
        assert not np.intersect1d(self.draws(strategy).round(4), self.draws(strategy, seed=1).round(4)).size

    @pytest.mark.parametrize("instances", [3, *(pytest.param(n, marks=pytest.mark.complete) for n in (2, 6))])
    def test_keys_do_not_depend_on_the_number_of_instances(self, on_instances, instances):
        alone = self.draws(strategies.IPUStrategy(num_replicas=6))
        for found in on_instances(instances, 6, self.draws):
            np.testing.assert_array_equal(found, alone)


class TestCheckNumerics:
    @staticmethod
    def loss(variables, batch, key):
        bad = jnp.where((batch == 13).any(), jnp.nan, 1.0)
        return variables["fine"] + variables["deep"]["bad"] * bad

    @staticmethod
    def variables():
        return {"fine": jnp.float32(1), "deep": {"bad": jnp.float32(2)}}

    @pytest.mark.parametrize("instances", [2, *(pytest.param(n, marks=pytest.mark.complete) for n in (1, 4))])
    def test_the_error_names_variable_replica_and_step_on_every_instance(self, on_instances, instances):
        def program(strategy):
            trainer = Trainer(strategy, self.loss, optax.sgd(0.5), check_numerics=True)
            state = trainer.init(self.variables())
            state, _ = trainer.step(state, local_part(strategy, np.zeros(8)))
            with pytest.raises(NonFiniteGradientError) as caught:
                trainer.step(state, local_part(strategy, np.array([0, 0, 0, 0, 0, 13, 0, 0])))
            return str(caught.value)

        for message in on_instances(instances, 4, program):
            assert "variable ['deep']['bad'] on replica 2 is not finite at step 1" in message

    def test_the_error_names_all_replicas_with_a_non_finite_gradient(self, strategy):
        with pytest.raises(NonFiniteGradientError, match=r"first of the replicas \[1, 3\]"):
            trained(
                strategy, self.loss, variables=self.variables(), batch=np.array([0, 13, 0, 13]), check_numerics=True
            )

    def test_infinity_is_not_finite_either(self, strategy):
        with pytest.raises(NonFiniteGradientError):
            trained(strategy, lambda v, batch, key: v["b"] * jnp.inf, check_numerics=True)

    def test_checking_changes_no_bit(self, strategy):
        plain, checked = (trained(strategy, steps=3, check_numerics=check)[0] for check in (False, True))
        assert strategies.fingerprint(plain.variables) == strategies.fingerprint(checked.variables)

    def test_checking_is_off_by_default(self, strategy):
        state, _ = trained(strategy, self.loss, variables=self.variables(), batch=np.full(4, 13))
        assert np.isnan(state.variables["deep"]["bad"])

    def test_metrics_can_be_nan(self, strategy):
        _, metrics = trained(strategy, lambda v, batch, key: (v["b"], {"nan": jnp.nan}), check_numerics=True)
        assert np.isnan(metrics["nan"])


class TestVariablesThatDifferBetweenInstances:
    def test_values_become_those_of_instance_0(self, on_instances):
        def program(strategy):
            state = Trainer(strategy, squared_error, optax.sgd(1.0)).init(
                {"w": jnp.full(3, 1.0 + strategy.instance_index), "b": jnp.float32(0)}
            )
            return np.asarray(state.variables["w"]).tolist()

        assert on_instances(3, 3, program) == [[1, 1, 1]] * 3

    @pytest.mark.parametrize(
        ("name", "other"), [("w", jnp.zeros(4)), ("w", jnp.zeros(3, jnp.bfloat16)), ("extra", jnp.zeros(3))]
    )
    def test_shapes_dtypes_or_names_are_an_error_that_names_the_variable(self, on_instances, name, other):
        def program(strategy):
            variables = start() | ({name: other} if strategy.instance_index else {})
            with pytest.raises(collectives.LayoutMismatchError) as caught:
                Trainer(strategy, squared_error, optax.sgd(1.0)).init(variables)
            return str(caught.value)

        for message in on_instances(2, 2, program):
            assert "Tensor layouts did not match on all instances" in message
            assert f"['{name}']" in message


def test_training_inside_a_replica_is_refused(strategy):
    trainer = Trainer(strategy, squared_error, optax.sgd(1.0))
    state = trainer.init(start())
    calls = {"init": (start(),), "step": (state, BATCH), "run": (state, [BATCH])}
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError, match=f"^trainer.{name} was called by a replica, inside strategy.run"):
            strategy.run(lambda name=name, arguments=arguments: getattr(trainer, name)(*arguments))
