"""Comparisons of the bits of a training between instances, and fingerprints.

They show a flipped bit, or a program that is not deterministic.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from strategies.errors import DivergenceError
from strategies.replicas.devices import borrow, is_key
from strategies.replicas.replicas import Replicas
from strategies.typing import Tree, Variables

logger = logging.getLogger(__name__)

Digest = tuple[int, int]


def digest_of(tree: Tree) -> Digest:
    """A number for the bits of all arrays of a tree, and another one; one flipped bit changes both.

    Exclusive or, and sum, of the arrays' 64-bit words, which goes as fast as memory can be read. It finds accidents;
    two trees that somebody has made alike on purpose it may not tell apart.
    """
    mixed = total = 0
    for leaf in jax.tree.leaves(tree):
        data = np.ascontiguousarray(borrow(jax.random.key_data(leaf) if is_key(leaf) else leaf))
        octets = data.reshape(-1).view(np.uint8)
        whole = octets[: octets.size // 8 * 8].view(np.uint64)
        rest = int.from_bytes(octets[whole.nbytes :].tobytes(), "little")
        mixed = _rotated(mixed) ^ int(np.bitwise_xor.reduce(whole, initial=np.uint64(0))) ^ rest
        total = (_rotated(total) + int(np.add.reduce(whole, dtype=np.uint64)) + rest) % (1 << 64)
    return mixed, total


def instances_that_differ(digests: Sequence[Digest]) -> list[int]:
    """Those whose digest is not that of more than half of them; all of them where there is no such majority."""
    digest, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return list(range(len(digests)))
    return [instance for instance, other in enumerate(digests) if other != digest]


def compare(replicas: Replicas, tree: Tree, step: int) -> Tree:
    """Compare a tree that has to be the same everywhere; a collective call.

    Args:
        replicas: connects the instances.
        tree: arrays, with the same names, shapes and dtypes on all instances.
        step: for messages.

    Returns:
        The tree; where a majority has other bits, and the job carries on without instances that fail, that of the
        majority.

    Raises:
        DivergenceError: see `majority_of`.
    """
    source, is_other = _compared(replicas, tree, step)
    if source is None:
        return tree
    majority = replicas.broadcast(tree, source)
    return majority if is_other else tree


def majority_of(replicas: Replicas, tree: Tree, step: int) -> int | None:
    """Return the rank of an instance that holds the majority state, or None if all agree. Collective.

    Args:
        replicas: see `compare`.
        tree: see there.
        step: for messages.

    Raises:
        DivergenceError: on all instances if their bits differ, and the job does not carry on or there is no majority.
    """
    return _compared(replicas, tree, step)[0]


def insist_on_same_bits(replicas: Replicas, tree: Tree, step: int) -> None:
    """Compare a tree that has to be the same everywhere, also where a job could carry on; a collective call.

    Args:
        replicas: see `compare`.
        tree: see there.
        step: for messages.

    Raises:
        DivergenceError: on all instances if their bits differ.
    """
    _compared(replicas, tree, step, heals=False)


def _compared(replicas: Replicas, tree: Tree, step: int, heals: bool = True) -> tuple[int | None, bool]:
    """`majority_of`, and whether this instance has other bits."""
    mine = np.array([*digest_of(tree), replicas.first_index], np.uint64)
    gathered = replicas.communicator.all_gather(mine, name="digests of the state")
    differ = instances_that_differ([(int(mixed), int(total)) for mixed, total, _ in gathered])
    if not differ:
        return None, False
    where = _first_difference(replicas, tree)
    if len(differ) == len(gathered):
        raise DivergenceError(
            f"before step {step} the instances have different bits, and no majority has the same{where}"
        )
    who = f"{'instance' if len(differ) == 1 else 'instances'} {', '.join(str(gathered[each, 2]) for each in differ)}"
    if not heals or not replicas.can_carry_on:
        raise DivergenceError(
            f"before step {step} {who} had other bits than the other {len(gathered) - len(differ)}{where}"
        )
    source = next(instance for instance in range(len(gathered)) if instance not in differ)
    if replicas.instance_index == source:
        logger.warning("before step %d %s had other bits than the others, and got theirs", step, who)
    return source, replicas.instance_index in differ


def _first_difference(replicas: Replicas, tree: Tree) -> str:
    """Describe the first array that is not the same everywhere. A collective call, made only after a difference."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    own = np.array([digest_of(leaf) for _, leaf in leaves], np.uint64)
    gathered = replicas.communicator.all_gather(own, name="digests of each array")
    first = int(np.argmax((gathered != gathered[0]).any(axis=(0, 2))))
    path, leaf = leaves[first]
    numbers = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else borrow(leaf)).astype(np.float64)
    norms = replicas.communicator.all_gather(np.array(np.linalg.norm(numbers)), name="norms of an array")
    shown = ", ".join(f"{float(norm):.9g}" for norm in norms)
    return (
        f": the first array that differs is {jax.tree_util.keystr(path)}, of the norms {shown} on the instances; a "
        "program that changes the state on some instances only, or draws from other generators there, does that, and "
        "so does faulty memory"
    )


def flip_bit(variables: Variables) -> Tree:
    """The variables with a bit in the middle of one number changed; for faults on purpose."""
    leaves, structure = jax.tree.flatten(variables)
    changed = np.array(leaves[0])
    changed.reshape(-1).view(np.uint8)[changed.itemsize // 2] ^= 1
    return jax.tree.unflatten(structure, [jax.device_put(changed, next(iter(leaves[0].devices()))), *leaves[1:]])


def _rotated(number: int) -> int:
    return (number << 1 | number >> 63) % (1 << 64)


# ---- fingerprints


def fingerprint(variables: Variables) -> str:
    """The SHA-256 of the bits of all leaves, in tree order, as 64 hexadecimal digits.

    Args:
        variables: a pytree of arrays.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(variables):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
