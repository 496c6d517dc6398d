"""Sharding and offloading of optimizer state: less memory, the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import ConnectedStrategy
from test_ring_traffic import sent_by_each_rank

import strategies
from popdist import Instance
from popdist.instance import replica_blocks
from strategies import Checkpoints, Trainer
from strategies.exchange.flat import Shards
from strategies.jax.replicas.variables import PartOfArray, take

RNG = np.random.default_rng(5)
BATCH = {
    "x": RNG.standard_normal((32, 7)).astype(np.float32),
    "y": RNG.integers(0, 5, 32).astype(np.int32),
}
FIRST = {
    "w1": RNG.standard_normal((7, 33)).astype(np.float32),
    "b1": np.zeros(33, np.float32),
    "w2": RNG.standard_normal((33, 5)).astype(np.float32),
    "b2": np.zeros(5, np.float32),
    "scale": np.ones((), np.float32),
}
SHARDED = {"replicated_optimizer_state_sharding": True}
OPTIMIZERS = {
    "adam": optax.adam(0.01),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped": optax.chain(strategies.clip_by_global_norm(0.1), optax.adam(0.01)),
    "others": optax.multi_transform(
        {
            "adamw": optax.adamw(
                optax.exponential_decay(0.01, 2, 0.9),
                mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
            ),
            "rmsprop": optax.rmsprop(0.01),
            "lion": optax.lion(0.001),
            "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
        },
        {"w1": "adamw", "b1": "rmsprop", "w2": "lion", "b2": "nesterov", "scale": "adamw"},
    ),
}


def loss_fn(variables, batch, key):
    hidden = jax.nn.relu(batch["x"] @ variables["w1"] + variables["b1"])
    logits = (hidden @ variables["w2"] + variables["b2"]) * variables["scale"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def local_part(strategy, tree):
    rows = 32 // strategy.num_replicas_in_sync
    part = slice(strategy.local_replicas.start * rows, strategy.local_replicas.stop * rows)
    return jax.tree.map(lambda leaf: leaf[part], tree)


def trained(strategy, optimizer="adam", steps=3, **options):
    trainer = Trainer(strategy, loss_fn, OPTIMIZERS[optimizer], **options)
    state = trainer.init(FIRST)
    for _ in range(steps):
        state, _ = trainer.step(state, local_part(strategy, BATCH))
    return trainer, state


def whole(trainer, state):
    """Return the optimizer state as it would be without sharding."""
    leaves = jax.tree.leaves(trainer.whole(state).optimizer_state)
    return [leaf.gather("state") if isinstance(leaf, PartOfArray) else np.asarray(leaf) for leaf in leaves]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("others", {"gradient_transfer_dtype": "float16"}),
        pytest.param("clipped", {}, marks=pytest.mark.complete),
        pytest.param("adam", {"gradient_transfer_dtype": "bfloat16"}, marks=pytest.mark.complete),
    ],
)
def test_sharding_changes_no_bit_of_variables_and_state(strategy, on_instances, bits, optimizer, options):
    trainer, state = trained(strategy, optimizer, **options)
    alone = strategies.fingerprint(state.variables), [bits(leaf) for leaf in whole(trainer, state)]

    def sharded(strategy):
        trainer, state = trained(strategy, optimizer, **SHARDED, **options)
        return strategies.fingerprint(state.variables), [bits(leaf) for leaf in whole(trainer, state)]

    assert sharded(strategy) == alone
    assert on_instances(2, 4, sharded) == [alone] * 2


@pytest.mark.complete
def test_clipping_is_that_of_optax(strategy):
    _, ours = trained(strategy, "clipped")
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))
    trainer = Trainer(strategy, loss_fn, optimizer)
    theirs = trainer.init(FIRST)
    for _ in range(3):
        theirs, _ = trainer.step(theirs, BATCH)
    for one, other in zip(jax.tree.leaves(ours.variables), jax.tree.leaves(theirs.variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("instances", [2, *(pytest.param(n, marks=pytest.mark.complete) for n in (1, 4))])
def test_an_instance_holds_its_share_of_the_state(on_instances, instances):
    """Live bytes of XLA's buffers are (local / R) of each array that is cut, rounded up to equal parts."""

    def nbytes(strategy):
        _, state = trained(strategy, "momentum", **SHARDED)
        return sum(
            shard.data.nbytes for leaf in jax.tree.leaves(state.optimizer_state) for shard in leaf.addressable_shards
        )

    parts = [-(-size // 4) for size in (7 * 33, 33, 33 * 5)]  # w1, b1, w2; b2 and scale are small
    assert on_instances(instances, 4, nbytes) == [4 * (sum(parts) * (4 // instances) + 5 + 1)] * instances


LARGE = {"w": RNG.standard_normal((7, 80_021)).astype(np.float32), "b": np.zeros(33, np.float32)}  # w: 2.2 MB
TOGETHER = {
    "gradient_accumulation_count": 2,
    "compute_dtype": "bfloat16",
    "gradient_transfer_dtype": "bfloat16",
    "loss_scaling": "dynamic",
}


def large_loss(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["w"])
    return ((hidden.mean(axis=1) - batch["y"]) ** 2).mean() + (variables["b"] ** 2).sum()


def trained_large(strategy, optimizer="adam", steps=2, **options):
    trainer = Trainer(strategy, large_loss, OPTIMIZERS[optimizer], **options)
    state = trainer.init(LARGE)
    for _ in range(steps):
        state, _ = trainer.step(state, local_part(strategy, BATCH))
    return strategies.fingerprint((state.variables, [np.asarray(leaf) for leaf in whole(trainer, state)]))


@functools.cache
def trained_large_alone(optimizer, *options):
    return trained_large(strategies.IPUStrategy(4), optimizer, **dict(options))


@pytest.mark.parametrize(
    ("instances", "mechanism", "on_host", "optimizer", "options"),
    [
        (2, "ring", True, "adam", {}),
        pytest.param(2, "window", False, "adam", TOGETHER, marks=pytest.mark.complete),
        (2, "ring", False, "clipped", {}),  # needs whole gradients
        pytest.param(4, "ring", False, "clipped", {}, marks=pytest.mark.complete),
        pytest.param(4, "window", False, "adam", {}, marks=pytest.mark.complete),
        pytest.param(2, "ring", False, "adam", {"gradient_transfer_dtype": "bfloat16"}, marks=pytest.mark.complete),
    ],
)
def test_large_gradients_change_no_bit(on_instances, instances, mechanism, on_host, optimizer, options):
    alone = trained_large_alone(optimizer, *options.items())

    def sharded(strategy):
        return trained_large(strategy, optimizer, **options, **SHARDED)

    found = on_instances(instances, 4, sharded, mechanism, variables_on_host=on_host)
    assert found == [alone] * instances


def test_a_step_that_is_not_finite_on_one_replica_is_skipped_by_all(strategy, on_instances):
    """Only one instance has the part of the gradient with the non-finite value."""
    batch = {**BATCH, "x": BATCH["x"].copy()}
    batch["x"][-1, 3] = np.inf

    def skipped(strategy):
        trainer = Trainer(strategy, large_loss, OPTIMIZERS["adam"], loss_scaling="dynamic", **SHARDED)
        state = trainer.init(LARGE)
        state, metrics = trainer.step(state, local_part(strategy, batch))
        return strategies.fingerprint(state.variables), metrics["skipped_steps"]

    assert on_instances(2, 4, skipped) == [(strategies.fingerprint(jax.tree.map(jnp.asarray, LARGE)), 1.0)] * 2


@pytest.mark.parametrize(
    ("instances", "replicas"), [(2, 4), *(pytest.param(n, n, marks=pytest.mark.complete) for n in (2, 4))]
)
def test_a_step_sends_the_same_number_of_bytes_as_without_sharding(instances, replicas):
    """Owners of the parts get the sums of gradients, 1.0 (n - 1) / n of them; new variables take the same bytes."""

    def sent_in_a_step(**options):
        def program(steps, communicator):
            local = replicas // instances
            instance = Instance(
                communicator.rank, instances, local, communicator.rank * local, replicas, communicator.rank
            )
            trained_large(ConnectedStrategy(instance, communicator), "momentum", steps, **options)

        few, more = (sent_by_each_rank(instances, functools.partial(program, steps)) for steps in (1, 3))
        return [(after - before) / 2 for before, after in zip(few, more, strict=True)]

    nbytes = LARGE["w"].nbytes
    whole, sharded = max(sent_in_a_step()), max(sent_in_a_step(**SHARDED))
    assert sharded == pytest.approx(2 * (instances - 1) / instances * nbytes, rel=0.01)
    assert sharded / whole == pytest.approx(1, rel=0.01)


def test_small_variables_stay_whole(strategy):
    _, state = trained(strategy, "momentum", min_elements_for_sharding=100, **SHARDED)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.optimizer_state)}
    assert shapes == {(33,), (5,), (), (4 * 58, 1), (4 * 42, 1)}


def test_instances_may_have_parts_of_one_element(on_instances):
    """A batch of another shape lets instances agree again, when their parts differ already."""

    def program(strategy):
        options = {"min_elements_for_sharding": 1, **SHARDED}
        trainer = Trainer(strategy, lambda tree, x, key: (x @ tree["w"]).mean(), optax.adam(0.1), **options)
        state = trainer.init({"w": np.zeros(4, np.float32)})
        for rows in (1, 2):
            state, _ = trainer.step(state, np.tile(np.arange(4, dtype=np.float32), (rows, 1)))
        return strategies.fingerprint(state.variables)

    assert len(set(on_instances(4, 4, program))) == 1


ACROSS_ELEMENTS = {
    "norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "lamb": optax.lamb(0.01),
    "adafactor": optax.adafactor(0.01),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, 0), optax.sgd(0.1)),
    "places": optax.stateless(
        lambda gradients, _: jax.tree.map(lambda g: g * jnp.arange(g.size).reshape(g.shape), gradients)
    ),
    "first": optax.stateless(lambda gradients, _: jax.tree.map(lambda g: g * g.ravel()[0], gradients)),
    "size": optax.stateless(lambda gradients, _: jax.tree.map(lambda g: g / g.size, gradients)),
    "size on a device": optax.stateless(
        lambda gradients, _: jax.tree.map(lambda g: g / jnp.float32(g.size), gradients)
    ),
    "mask": optax.stateless(lambda gradients, _: jax.tree.map(lambda g, like: g * (like + 1), gradients, FIRST)),
    "random state": optax.GradientTransformation(
        lambda tree: jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape), tree),
        lambda gradients, state, tree=None: (gradients, state),
    ),
}
FEW_ACROSS = ("lamb", "mask")
"""Optimizers that use norms, keys, places, single elements, sizes or shapes, or have a state of another shape."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW_ACROSS else pytest.mark.complete) for name in ACROSS_ELEMENTS],
)
def test_the_state_of_optimizers_across_elements_is_gathered_for_updates(strategy, name):
    """Updates gather the state and have the bits of whole state; between updates it is in parts."""

    def made(**options):
        trainer = Trainer(strategy, loss_fn, ACROSS_ELEMENTS[name], **options)
        state = trainer.init(FIRST)
        for _ in range(2):
            state, _ = trainer.step(state, BATCH)
        return strategies.fingerprint(state.variables), trainer.is_sharded

    assert made(**SHARDED) == (made()[0], True)


def test_sharding_needs_offloading_to_be_allowed(strategy):
    """By default, sharding follows offloading."""
    with pytest.raises(ValueError, match="the optimizer state must be offloaded"):
        Trainer(strategy, loss_fn, optax.adam(0.1), offload_optimizer_state=False, **SHARDED)
    follows = {"replicated_optimizer_state_sharding": None}
    assert Trainer(strategy, loss_fn, optax.adam(0.1), offload_optimizer_state=True, **follows).is_sharded
    assert not Trainer(strategy, loss_fn, optax.adam(0.1), **follows).is_sharded
    with pytest.raises(ValueError, match="min_elements_for_sharding"):
        Trainer(strategy, loss_fn, optax.adam(0.1), min_elements_for_sharding=0, **SHARDED)
    with pytest.raises(TypeError, match="min_elements_for_sharding is 1.5"):
        Trainer(strategy, loss_fn, optax.adam(0.1), min_elements_for_sharding=1.5)


@pytest.mark.complete
@pytest.mark.parametrize("options", [{}, SHARDED])
def test_offloaded_state_lies_in_host_memory_and_changes_no_bit(strategy, on_instances, options):
    _, plain = trained(strategy)
    alone = strategies.fingerprint(plain.variables)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(plain.optimizer_state)} == {"device"}

    def offloaded(strategy):
        _, state = trained(strategy, offload_optimizer_state=True, **options)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer_state)}
        return strategies.fingerprint(state.variables), kinds

    assert on_instances(2, 4, offloaded) == [(alone, {"pinned_host"})] * 2


class TestCheckpoints:
    """Checkpoints with and without sharding: saved on any number of instances, and restored on any other."""

    OPTIONS = {"loss_scaling": "dynamic", "gradient_transfer_dtype": "bfloat16"}

    def run(self, strategy, folder, steps, **options):
        trainer = Trainer(strategy, loss_fn, OPTIMIZERS["adam"], **options)
        with Checkpoints(folder, trainer, every=2) as checkpoints:
            state = checkpoints.restore(trainer.init(FIRST))
            first = state.step
            for _ in range(first, steps):
                state, _ = trainer.step(state, local_part(strategy, BATCH))
                checkpoints.after_step(state)
            checkpoints.save(state)
        good_steps = None if state.loss_scale is None else int(state.loss_scale.good_steps)
        return first, strategies.fingerprint(state.variables), good_steps

    @pytest.mark.parametrize(
        ("options", "pieces"),
        [
            ({"loss_scaling": 8.0}, [(2, 0, 1)]),
            pytest.param(OPTIONS, [(4, 0, 2), (2, 2, 4)], marks=pytest.mark.complete),
        ],
    )
    def test_checkpoints_resume_to_the_same_bits(self, tmp_path, strategy, on_instances, options, pieces):
        *_, last = (steps for _, _, steps in pieces)
        wanted = self.run(strategy, tmp_path / "whole", last + 1, **options)
        for instances, first, steps in pieces:
            found = on_instances(
                instances, 4, lambda each, steps=steps: self.run(each, tmp_path / "other", steps, **options, **SHARDED)
            )
            assert {begin for begin, *_ in found} == {first}
        assert self.run(strategy, tmp_path / "other", last + 1, **options) == (last, *wanted[1:])  # unsharded too

    def test_other_numbers_of_replicas_are_refused_unless_asked_for(self, tmp_path, strategy):
        trainer, state = trained(strategy, **SHARDED)
        with Checkpoints(tmp_path, trainer) as checkpoints:
            checkpoints.restore(state)
            checkpoints.save(state)
        other = Trainer(strategies.IPUStrategy(8), loss_fn, OPTIMIZERS["adam"], **SHARDED)
        first = other.init(FIRST)
        with Checkpoints(tmp_path, other) as checkpoints:
            with pytest.raises(strategies.CheckpointError, match="other_replicas=True"):
                checkpoints.restore(first)
            restored = checkpoints.restore(first, other_replicas=True)
        assert restored.step == 3
        assert other.strategy.num_replicas_in_sync == 8
        assert strategies.fingerprint(restored.variables) == strategies.fingerprint(state.variables)
        for one, another in zip(whole(trainer, state), whole(other, restored), strict=True):
            np.testing.assert_array_equal(one, another)


# ---- one part of an array for each replica


def array(*shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("shape", "part"), [((4, 5), 7), ((21,), 7), ((19,), 7), ((3,), 1)])
def test_parts_are_equally_large(shape, part):
    assert Shards(replicas=3, local=1, min_elements=1).part(array(*shape)) == part


def test_small_arrays_and_scalars_stay_whole():
    shards = Shards(replicas=2, local=1, min_elements=6)
    assert [shards.divides(np.zeros(shape)) for shape in [(6,), (2, 3), (5,), ()]] == [True, True, False, False]
    assert not Shards(2, 1, 0).divides(np.zeros(()))
    assert shards.shape(np.zeros((5, 1))) == (5, 1)


def test_a_part_keeps_as_many_axes_as_the_array():
    assert Shards(3, 2, 1).shape(array(4, 5, 1)) == (14, 1, 1)


@pytest.mark.parametrize("instances", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(4, 5), (3, 7), (17,)])
def test_the_parts_of_all_instances_make_the_array(instances, shape):
    blocks, whole = replica_blocks(instances, 4), array(*shape)
    shards = Shards(4, len(blocks[0]), 1, is_even=4 % instances == 0)
    cut = jax.jit(take, static_argnums=0)
    parts = [np.asarray(cut(shards, whole, np.int32(block.start))) for block in blocks]
    assert {part.shape for part in parts} == {shards.shape(whole)}
    on_host = [shards.padded(whole.reshape(-1)[shards.bounds(whole, block.start)], whole) for block in blocks]
    np.testing.assert_array_equal(np.concatenate(on_host), np.concatenate(parts).reshape(-1))
    np.testing.assert_array_equal(shards.join(np.stack(parts), whole, np), whole)
    if shards.is_even:
        assert not np.concatenate(parts).reshape(-1)[whole.size :].any()  # padded with zeros


def test_a_part_with_a_copy_has_two_blocks():
    shards, whole = Shards(4, 2, 1, blocks=2), array(8)
    assert take(shards, whole, np.array([2, 0], np.int32)).tolist() == [5, 6, 7, 8, 1, 2, 3, 4]


def test_whole_arrays_are_taken_unchanged():
    whole = array(5)
    assert take(Shards(4, 1, 6), whole, np.int32(1)) is whole
