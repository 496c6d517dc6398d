"""The model state after a step on the device: each replica's own values, and the values on which replicas agree."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from strategies.jax.gradients.model_state import FIRST, MEAN, PER_REPLICA, SUM
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.replicas.replicas import Replicas
from strategies.typing import Leaf, Tree


def model_state_after(
    program: ReplicaProgram,
    replicas: Replicas,
    before: Tree,
    kept: Sequence[Sequence[jax.Array]],
    means: Sequence[jax.Array],
) -> Tree:
    """Return the new model state. Collective if several instances take leaves of replica 0.

    Only those leaves wait for the device.

    Args:
        program: Computation of a replica.
        replicas: Places of the replicas.
        before: Model state before the step.
        kept: Values that each local replica keeps.
        means: Means, over all replicas, of the leaves that travel.
    """
    rule, device = program.rule, replicas.variables_device
    of_state = [program.unpack_kept(of_replica)[1] for of_replica in kept]
    averaged = rule.words.count(MEAN)
    sums = [jnp.asarray(old) + mean for old, mean in zip(rule.pick(before, SUM), means[averaged:], strict=True)]
    new = {**of_state[0], MEAN: list(means[:averaged]), SUM: sums}
    if new[FIRST] and replicas.communicator.size > 1:  # replica 0 is on the first instance
        new[FIRST] = replicas.broadcast(new[FIRST])
    own = [jax.device_put(each[PER_REPLICA], device) for each in of_state]
    new[PER_REPLICA] = replicas.devices.place([_joined(leaves) for leaves in zip(*own, strict=True)])
    return rule.put(before, new)


@jax.jit
def _joined(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the replicas' arrays one behind the other along the first axis."""
    return jnp.concatenate(leaves)


@jax.jit
def _chosen(is_finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(is_finite, new, old)


def chosen(is_finite: Leaf, new: Tree, old: Tree) -> Tree:
    """Return the new model state if the step may be applied, else the old one, without waiting for the flag."""
    if is_finite is True:
        return new
    return jax.tree.map(lambda one, other: _chosen(_beside(is_finite, one), one, other), new, old)


def _beside(is_finite: Leaf, leaf: jax.Array) -> Leaf:
    """Return the flag on all devices of a leaf. A leaf has several devices if each replica has its own part of it."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(is_finite, sharding)
