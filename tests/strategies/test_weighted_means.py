"""Losses with weights: the mean over all tokens of all replicas and micro-batches, and the same bits everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import also, first_of, only

import strategies
from strategies.core.options import is_weighted, travelling, weighted_means
from strategies.defaults import Defaults
from strategies.errors import WeightError, ZeroWeightError

REPLICAS, MICRO_BATCHES, ROWS, TOKENS = 4, 3, 2, 7
STEPS = 2
DRAW = np.random.default_rng(4)
X = DRAW.standard_normal((STEPS, REPLICAS * MICRO_BATCHES * ROWS, TOKENS, 5)).astype(np.float32)
Y = DRAW.standard_normal(X.shape[:-1]).astype(np.float32)
COUNTS = DRAW.integers(0, TOKENS + 1, X.shape[:2])
COUNTS[:, :ROWS] = 0  # replica 0 begins with a micro-batch without tokens
MASK = np.arange(TOKENS) < COUNTS[..., None]
VARIABLES = {"w": DRAW.standard_normal((5, 4)).astype(np.float32), "v": np.ones(4, np.float32)}


def losses(variables, batch):
    """Return the loss of each token."""
    return jnp.square(jnp.tanh(batch["x"] @ variables["w"]) @ variables["v"] - batch["y"])


def mean_over_tokens(variables, batch, key):
    """Return the mean over the tokens of a micro-batch, NaN if there is none, with their number as the weight."""
    tokens = batch["mask"].sum()
    mean = jnp.where(batch["mask"], losses(variables, batch), 0).sum() / tokens
    return strategies.Outcome(mean, {"doubled": 2 * mean, "tokens": tokens}, weight=tokens)


def plain(variables, batch, key):
    mean = losses(variables, batch).mean()
    return mean, {"doubled": 2 * mean}


def weighted_alike(weight):
    def loss_fn(variables, batch, key):
        return strategies.Outcome(*plain(variables, batch, key), weight=weight)

    return loss_fn


def batch_of(strategy, step, weights=1):
    local = strategy.local_replicas
    rows = slice(local.start * MICRO_BATCHES * ROWS, local.stop * MICRO_BATCHES * ROWS)
    return {"x": X[step, rows], "y": Y[step, rows], "mask": MASK[step, rows] * weights}


def trained(strategy, loss_fn=mean_over_tokens, optimizer=None, **options):
    """Return variables, their fingerprint, and the metrics of each step."""
    given = {"gradient_accumulation_count": MICRO_BATCHES} | options
    trainer = strategies.Trainer(strategy, loss_fn, optimizer or optax.adam(0.1), **given)
    state, seen = trainer.init(VARIABLES), []
    for step in range(STEPS):
        state, metrics = trainer.step(state, batch_of(strategy, step))
        seen.append(dict(metrics))
    return jax.tree.map(np.asarray, state.variables), strategies.fingerprint(state.variables), seen


def alone(factor=1.0):
    """Return variables and losses of one process that trains with all tokens at once, without this library."""
    optimizer, variables, seen = optax.adam(0.1), VARIABLES, []
    state = optimizer.init(variables)

    @jax.jit
    def update(variables, state, batch):
        def loss_of(variables):
            return jnp.where(batch["mask"], losses(variables, batch), 0).sum() / batch["mask"].sum()

        loss, gradients = jax.value_and_grad(loss_of)(variables)
        changes, state = optimizer.update(jax.tree.map(lambda one: factor * one, gradients), state, variables)
        return optax.apply_updates(variables, changes), state, loss

    for step in range(STEPS):
        variables, state, loss = update(variables, state, {"x": X[step], "y": Y[step], "mask": MASK[step]})
        seen.append(float(loss))
    return variables, seen


OPTIONS = {
    "plain": {},
    "at once": {"gradient_accumulation_count": 1},
    "running mean": {"reduction_method": "running_mean"},
    "sum": {"reduction_method": "sum"},
    "scaled": {"loss_scaling": 2.0**10},
    "sharded": {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1},
    "checked": {"check_numerics": True},
    "mapped": {"map_gradient": lambda gradient, variable: gradient * 1},
    "bfloat16": {"gradient_transfer_dtype": "bfloat16"},
    "computed": {"compute_dtype": "bfloat16"},
}
ROUNDED = {"bfloat16": 0.05, "computed": 0.1}


@pytest.mark.parametrize("name", only(["plain", "bfloat16"], OPTIONS))
def test_a_training_is_that_of_one_process_with_all_tokens_for_every_option(on_instances, name):
    """A micro-batch without tokens has the loss NaN, and counts nothing."""
    options = OPTIONS[name]
    found = on_instances(2, REPLICAS, lambda strategy: trained(strategy, **options))
    assert found[0][1:] == found[1][1:]
    variables, wanted = alone(factor=MICRO_BATCHES if name == "sum" else 1.0)
    own, _, seen = found[0]
    limit = ROUNDED.get(name, 1e-5)
    for leaf in variables:
        np.testing.assert_allclose(own[leaf], variables[leaf], atol=limit)
    assert [each["loss"] for each in seen] == pytest.approx(wanted, rel=limit)
    assert [each["doubled"] for each in seen] == pytest.approx([2 * loss for loss in wanted], rel=limit)


@pytest.mark.parametrize("name", only(["plain", "sharded"], ["plain", "bfloat16", "sharded", "scaled"]))
@pytest.mark.parametrize("mechanism", first_of(["ring", "window"]))
def test_the_bits_are_the_same_for_every_number_of_instances(on_instances, name, mechanism):
    def run(strategy):
        return trained(strategy, **OPTIONS[name])[1:]

    [one] = on_instances(1, REPLICAS, run, mechanism)
    for instances in (2, 4):
        assert on_instances(instances, REPLICAS, run, mechanism) == [one] * instances


WIDE = {
    name: DRAW.standard_normal(shape).astype(np.float32) / 24
    for name, shape in {"w": (5, 600), "a": (600, 600), "b": (600, 600)}.items()
}


def mean_of_wide(variables, batch, key):
    """Return a loss with two gradients that have buffers of their own."""
    tokens = batch["mask"].sum()
    hidden = jnp.tanh(batch["x"] @ variables["w"])
    of_tokens = jnp.square((jnp.tanh(hidden @ variables["a"]) @ variables["b"]).sum(-1) - batch["y"])
    return strategies.Outcome(jnp.where(batch["mask"], of_tokens, 0).sum() / tokens, weight=tokens)


def test_large_gradients_have_the_same_bits(on_instances):
    def run(strategy):
        trainer = strategies.Trainer(strategy, mean_of_wide, optax.adam(0.1))
        state, metrics = trainer.step(trainer.init(WIDE), batch_of(strategy, 0))
        return strategies.fingerprint(state.variables), dict(metrics)

    [one] = on_instances(1, REPLICAS, run)
    assert on_instances(2, REPLICAS, run, variables_on_host=True) == [one] * 2


def test_gradients_that_stay_on_a_device_have_the_same_bits():
    """XLA may round a sum of two products in two ways, which differ between the programs of exchanges."""
    draw = np.random.default_rng(4)
    start = {"w": draw.standard_normal((5, 64)) / 4, "v": draw.standard_normal((64, 33)) / 8}
    batch = {"x": draw.standard_normal((6, 5)), "weight": np.repeat(np.int32([1, 5, 7]), 2)}
    start, batch["x"] = jax.tree.map(np.float32, start), np.float32(batch["x"])

    def loss_fn(variables, batch, key):
        hidden = jnp.tanh(batch["x"] @ variables["w"]) @ variables["v"]
        return strategies.Outcome(jnp.square(hidden.mean(-1) - 1).mean(), weight=batch["weight"][0])

    def bits(exchange, **options):
        strategy = strategies.IPUStrategy(1, defaults=Defaults(exchange=exchange))
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1.0), gradient_accumulation_count=3, **options)
        state, metrics = trainer.step(trainer.init(start), batch)
        return strategies.fingerprint(state.variables), metrics["loss"]

    assert bits("host") == bits("compiled")
    assert bits("host", reduction_method="running_mean") == bits("compiled", reduction_method="running_mean")


def test_weights_of_one_change_no_bit(on_instances):
    [unweighted] = on_instances(1, REPLICAS, lambda strategy: trained(strategy, plain)[1:])
    assert on_instances(1, REPLICAS, lambda strategy: trained(strategy, weighted_alike(1.0))[1:]) == [unweighted]


def double(variables, batch, key):
    return jnp.square(variables["w"] - 1 / 3).sum()


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (lambda *given: strategies.Outcome(double(*given), weight=3), {}),
        (double, {"loss_scaling": 8.0}),
        (double, {"loss_scaling": 8.0, "map_gradient": lambda gradient, variable: gradient}),
    ],
)
def test_gradients_of_64_bits_keep_them(strategy, loss_fn, options):
    with jax.enable_x64(True):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.25), **options)
        state, _ = trainer.step(trainer.init({"w": np.zeros(3)}), {"x": np.ones(REPLICAS)})
        np.testing.assert_allclose(state.variables["w"], 1 / 6, rtol=1e-15)


def test_equal_weights_of_any_size_change_results_by_rounding_only(strategy):
    unweighted = trained(strategy, plain)
    for weight in (2.0**24, 7):
        found = trained(strategy, weighted_alike(weight))
        assert found[2] == [pytest.approx(step, rel=1e-5) for step in unweighted[2]]


def test_a_weight_is_no_notice(strategy):
    trainer = strategies.Trainer(strategy, weighted_alike(3.0), optax.sgd(0.1))
    state, _ = trainer.step(trainer.init(VARIABLES), batch_of(strategy, 0))
    assert not trainer.notice.is_agreed
    trainer.notice.give(15)
    trainer.step(state, batch_of(strategy, 1))
    assert trainer.notice.is_agreed


def test_one_replica_makes_no_fused_step_with_weights():
    """A step without weight would have to end it."""
    strategy = strategies.IPUStrategy(num_replicas=1)
    trainer = strategies.Trainer(strategy, mean_over_tokens, optax.sgd(0.1), gradient_accumulation_count=MICRO_BATCHES)
    state = trainer.init(VARIABLES)
    for _ in range(3):
        state, _ = trainer.step(state, batch_of(strategy, 0))
    with pytest.raises(ZeroWeightError):
        trainer.step(state, batch_of(strategy, 0, weights=0))
    assert np.isfinite(state.variables["w"]).all()


# ---- without weight


def without_weight(strategy, **options):
    trainer = strategies.Trainer(
        strategy, mean_over_tokens, optax.adam(0.1), gradient_accumulation_count=MICRO_BATCHES, **options
    )
    state, _ = trainer.step(trainer.init(VARIABLES), batch_of(strategy, 0))
    before = strategies.fingerprint(state.variables)
    try:
        state, metrics = trainer.step(state, batch_of(strategy, 1, weights=0))
    except ZeroWeightError as error:
        told = str(error)
    else:
        told = dict(metrics)
    assert strategies.fingerprint(state.variables) == before
    state, metrics = trainer.step(state, batch_of(strategy, 1))
    return told, state.step, strategies.fingerprint(state.variables), dict(metrics)


@pytest.mark.parametrize("exchange", ["host", also("compiled")])
def test_a_step_without_weight_is_an_error_on_all_instances_and_training_goes_on(on_instances, exchange):
    if exchange == "compiled":
        found = [without_weight(strategies.IPUStrategy(4, defaults=Defaults(exchange=exchange)))]
    else:
        found = on_instances(2, REPLICAS, without_weight)
    for told, steps, *_ in found:
        assert "all replicas and micro-batches have weight 0 at step 1" in told
        assert steps == 2
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("exchange", [also("host"), "compiled"])
def test_a_step_without_weight_is_skipped_if_so_told(exchange):
    strategy = strategies.IPUStrategy(REPLICAS, defaults=Defaults(exchange=exchange))
    told, steps, bits, after = without_weight(strategy, zero_weight="skip")
    assert all(np.isnan(told[name]) for name in ("loss", "doubled", "tokens"))
    assert steps == 3
    assert np.isfinite(after["loss"])
    assert bits == without_weight(strategy)[2]


def test_a_skipped_step_is_counted_with_loss_scaling_and_keeps_the_scale(on_instances):
    scaling = strategies.LossScaling(initial=8.0, interval=2)

    def run(strategy):
        return without_weight(strategy, zero_weight="skip", loss_scaling=scaling)

    for told, _, _, after in on_instances(2, REPLICAS, run):
        assert (told["skipped_steps"], told["loss_scale"]) == (1, 8)
        assert (after["skipped_steps"], after["loss_scale"]) == (1, 16)  # the second good step


# ---- weights that are refused


@pytest.mark.parametrize("bad", first_of([-1.0, np.nan, np.inf, -1e-40]))
@pytest.mark.parametrize("exchange", ["host", also("compiled")])
def test_a_bad_weight_on_one_replica_is_an_error_on_all_instances(on_instances, bad, exchange):
    """The sum of the weights is above 0."""

    def loss_fn(variables, batch, key):
        replica = strategies.get_replica_context().replica_id_in_sync_group
        return strategies.Outcome(batch["y"].mean() * variables["v"].sum(), weight=jnp.where(replica == 2, bad, 100.0))

    def refused(strategy):
        trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), zero_weight="skip")
        state = trainer.init(VARIABLES)
        with pytest.raises(WeightError, match="weight of a loss is negative or not finite at step 0"):
            trainer.step(state, batch_of(strategy, 0))
        return strategies.fingerprint(state.variables)

    if exchange == "compiled":
        refused(strategies.IPUStrategy(REPLICAS, defaults=Defaults(exchange=exchange)))
    else:
        assert len(set(on_instances(2, REPLICAS, refused))) == 1


def weighted_by_rows(variables, batch, key):
    return strategies.Outcome(losses(variables, batch).mean(), weight=batch["weight"][0])


def weighted_in_stages(variables, batch, key):
    outcome = in_stages(variables, batch, key)
    with strategies.pipeline_stage(1):
        return strategies.Outcome(jnp.mean(outcome.loss), weight=batch["weight"][0])


SMALL, LARGE = "mean weight of the losses is below 1.26e-29 at step 0", "weights of losses overflows float32"
WAYS = {
    "plain": {"gradient_accumulation_count": 1},
    "accumulated": {},
    "running mean": {"reduction_method": "running_mean"},
    "pipeline": {"pipeline": strategies.Pipelining([0, 1], schedule="sequential")},
}


@pytest.mark.parametrize("way", only(["accumulated", "pipeline"], WAYS))
def test_weights_that_products_cannot_hold_are_an_error_on_all_instances(on_instances, way):
    """XLA computes with 0 in place of a subnormal number: the mean would be 0 / 0."""
    loss_fn = weighted_in_stages if way == "pipeline" else weighted_by_rows

    def refused(strategy):
        trainer = strategies.Trainer(
            strategy,
            loss_fn,
            optax.sgd(0.1),
            zero_weight="skip",
            **{"gradient_accumulation_count": MICRO_BATCHES, **WAYS[way]},
        )
        state, batch = trainer.init(VARIABLES), batch_of(strategy, 0)
        for weight, text in ((1e-40, SMALL), (1e-33, SMALL), (3e38, LARGE)):
            with pytest.raises(WeightError, match=text):
                trainer.step(state, {**batch, "weight": np.full(len(batch["x"]), weight, np.float32)})
        return strategies.fingerprint(state.variables)

    expected = {strategies.fingerprint(VARIABLES)}
    assert set(on_instances(2, REPLICAS, refused, ipus_per_replica=2)) == expected
    if way == "accumulated":
        assert {refused(strategies.IPUStrategy(REPLICAS, defaults=Defaults(exchange="compiled")))} == expected


def test_a_subnormal_weight_beside_others_counts_nothing(on_instances):
    def run(strategy, small):
        trainer = strategies.Trainer(strategy, weighted_by_rows, optax.sgd(0.1))
        state, batch = trainer.init(VARIABLES), batch_of(strategy, 0)
        weights = np.where(np.arange(len(batch["x"])) < len(batch["x"]) // 2, np.float32(small), np.float32(2))
        return strategies.fingerprint(trainer.step(state, {**batch, "weight": weights})[0].variables)

    small, none = (on_instances(1, 2, lambda strategy, small=small: run(strategy, small)) for small in (1e-40, 0))
    assert small == none


@pytest.mark.parametrize(
    ("weight", "options", "error", "text"),
    [
        (np.ones(2, np.float32), {}, TypeError, r"weight of the loss is float32\[2\]; it must be a real scalar"),
        (np.complex64(1), {}, TypeError, "it must be a real scalar"),
        ({"a": 1.0}, {}, TypeError, "weight of the loss is a dict"),
        (jnp.bfloat16(3), {}, TypeError, "bfloat16, which rounds counts of tokens"),
        (1.0, {"gradient_transfer_dtype": "float16"}, ValueError, "gradient_transfer_dtype='bfloat16'"),
        (1.0, {"gradient_accumulation_dtype": "float16"}, ValueError, "gradient_accumulation_dtype='float32'"),
        (1.0, {"zero_weight": "ignore"}, ValueError, "use 'error' or 'skip'"),
        (1.0, {"zero_weight": None}, TypeError, "use 'error' or 'skip'"),
    ],
)
def test_wrong_weights_and_options_are_refused_before_the_first_step(strategy, weight, options, error, text):
    with pytest.raises(error, match=text):
        trained(strategy, weighted_alike(weight), **options)


@pytest.mark.parametrize("is_weighted_there", first_of([True, False]))
def test_instances_agree_on_whether_losses_have_weights(on_instances, is_weighted_there):
    def run(strategy):
        is_other = strategy.instance_index == 1
        with pytest.raises(strategies.DisagreementError):
            trained(strategy, weighted_alike(1.0) if is_other is is_weighted_there else plain)

    on_instances(2, REPLICAS, run)


def test_instances_agree_on_what_happens_without_weight(on_instances):
    def run(strategy):
        with pytest.raises(strategies.DisagreementError, match="zero_weight"):
            trained(strategy, zero_weight="skip" if strategy.instance_index else "error")

    on_instances(2, REPLICAS, run)


# ---- evaluation


def mean_of_row(variables, batch, key):
    tokens = batch["mask"].sum()  # without one, the loss is NaN and "inverse" is infinite
    metrics = {"tokens": tokens, "inverse": 1 / tokens}
    return strategies.Outcome((batch["mask"] * batch["y"]).sum() / tokens, metrics, weight=tokens)


@pytest.mark.parametrize("instances", [1, 2])
def test_an_evaluation_is_the_mean_over_all_tokens(on_instances, instances):
    rows = {"y": Y[0][:21], "mask": MASK[0][:21]}

    def evaluated(strategy):
        trainer = strategies.Trainer(strategy, mean_of_row, optax.sgd(0.1))
        dataset = strategy.distribute_dataset(rows, batch_size=2, shuffle=False, remainder="pad")
        return dict(trainer.evaluate(trainer.init(VARIABLES), dataset))

    wanted = rows["y"][rows["mask"]].mean(dtype=np.float64)
    counts = rows["mask"].sum(-1)
    assert 0 in counts
    for found in on_instances(instances, REPLICAS, evaluated):
        assert found["loss"] == pytest.approx(wanted, rel=1e-6)
        assert found["tokens"] == (counts**2).sum() / counts.sum()
        assert found["inverse"] == pytest.approx((counts > 0).sum() / counts.sum(), rel=1e-6)


def test_a_bad_weight_in_an_evaluation_is_an_error_on_all_instances(on_instances):
    rows = {"y": Y[0][:21], "mask": MASK[0][:21] * np.where(np.arange(21) == 20, -1, 1)[:, None]}

    def refused(strategy):
        trainer = strategies.Trainer(strategy, mean_of_row, optax.sgd(0.1))
        dataset = strategy.distribute_dataset(rows, batch_size=2, shuffle=False, remainder="pad")
        with pytest.raises(WeightError, match="weight of a row is negative or not finite"):
            trainer.evaluate(trainer.init(VARIABLES), dataset)

    on_instances(2, REPLICAS, refused)


# ---- pipelines


def in_stages(variables, batch, key):
    with strategies.pipeline_stage(0):
        hidden = jnp.tanh(batch["x"] @ variables["w"])
    with strategies.pipeline_stage(1):
        tokens = batch["mask"].sum()
        every = jnp.square(hidden @ variables["v"] - batch["y"])
        mean = jnp.where(batch["mask"], every, 0).sum() / jnp.maximum(tokens, 1)
    return strategies.Outcome(mean, weight=tokens)


def pipelined(strategy, schedule, **options):
    return trained(strategy, in_stages, pipeline=strategies.Pipelining([0, 1], schedule=schedule), **options)


@pytest.mark.parametrize("schedule", first_of(["one_forward_one_backward", "zero_bubble", "sequential"]))
def test_a_pipeline_trains_with_all_tokens_on_any_number_of_instances(on_instances, schedule):
    def run(strategy):
        return pipelined(strategy, schedule)

    [(own, *one)] = on_instances(1, REPLICAS, run, ipus_per_replica=2)
    variables, wanted = alone()
    for leaf in variables:
        np.testing.assert_allclose(own[leaf], variables[leaf], atol=1e-5)
    assert [each["loss"] for each in one[1]] == pytest.approx(wanted, rel=1e-5)
    assert [found[1:] for found in on_instances(2, REPLICAS, run, ipus_per_replica=2)] == [tuple(one)] * 2


def test_a_pipeline_refuses_a_loss_of_weight_0_that_is_not_finite(on_instances):
    """Its gradients would be NaN in all stages, and the loss of the step finite."""

    def loss_fn(variables, batch, key):
        outcome = in_stages(variables, batch, key)
        with strategies.pipeline_stage(1):
            return strategies.Outcome(jnp.where(outcome.weight > 0, outcome.loss, jnp.nan), weight=outcome.weight)

    def refused(strategy):
        with pytest.raises(WeightError, match="or it is 0 and the loss is not finite, .* at step 0"):
            trained(strategy, loss_fn, pipeline=strategies.Pipelining([0, 1], schedule="sequential"))

    on_instances(1, REPLICAS, refused, ipus_per_replica=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"map_gradient": lambda gradient, variable: gradient}, "that weights have multiplied"),
        ({"compute_dtype": "float16"}, "use compute_dtype='bfloat16'"),
    ],
)
def test_a_pipeline_refuses_options_that_weights_would_spoil(on_instances, options, text):
    def refused(strategy):
        with pytest.raises(ValueError, match=text):
            pipelined(strategy, "sequential", **options)

    on_instances(1, REPLICAS, refused, ipus_per_replica=2)


# ---- the rules


def test_a_mean_weight_decides_whether_a_step_is_applied():
    assert is_weighted(2.0, 0, "error")
    assert not is_weighted(0.0, 0, "skip")
    with pytest.raises(ZeroWeightError, match="at step 5"):
        is_weighted(0.0, 5, "error")
    for bad in (-1.0, np.nan, np.inf, 1e39):
        assert np.isnan(travelling(bad))
        with pytest.raises(WeightError, match="at step 5"):
            is_weighted(float(travelling(bad)), 5, "skip")
    assert travelling(2**24) == 2**24


def test_weighted_means_are_quotients_and_nan_without_weight():
    assert weighted_means(np.float32([3, -6]), 1.5).tolist() == [2, -4]
    assert np.isnan(weighted_means(np.zeros(2, np.float32), 0.0)).all()
