"""Comparison of the bits of a training between instances.

It finds flipped bits, and programs that are not deterministic.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from strategies.core.members import Members
from strategies.errors import DivergenceError

logger = logging.getLogger(__name__)

Digest = tuple[int, int]


def digest_of_arrays(arrays: Iterable[np.ndarray]) -> Digest:
    """Return two numbers that depend on all bits of the arrays; one flipped bit changes both.

    They are the exclusive or and the sum of 64-bit words, computed at the speed of memory. A digest finds accidents; it
    does not protect against arrays that were made to have the same digest.
    """
    mixed = total = 0
    for array in arrays:
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = octets[: octets.size // 8 * 8].view(np.uint64)
        rest = int.from_bytes(octets[whole.nbytes :].tobytes(), "little")
        mixed = _rotated(mixed) ^ int(np.bitwise_xor.reduce(whole, initial=np.uint64(0))) ^ rest
        total = (_rotated(total) + int(np.add.reduce(whole, dtype=np.uint64)) + rest) % (1 << 64)
    return mixed, total


def instances_that_differ(digests: Sequence[Digest]) -> list[int]:
    """Return the instances whose digest differs from the majority's; all instances without a majority."""
    digest, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return list(range(len(digests)))
    return [instance for instance, other in enumerate(digests) if other != digest]


def majority_of(members: Members, arrays: Mapping[str, np.ndarray], step: int, heals: bool = True) -> int | None:
    """Return the rank of an instance that holds the majority state, or None if all agree. Collective.

    Args:
        members: The instances.
        arrays: The arrays by name, with the same names, shapes and dtypes on all instances.
        step: The number of steps so far, for messages.
        heals: Whether a majority may hand its state to the others, in a job that can carry on.

    Raises:
        DivergenceError: On all instances, if their bits differ and no majority hands on its state.
    """
    mine = np.array([*digest_of_arrays(arrays.values()), members.first_index], np.uint64)
    gathered = members.communicator.all_gather(mine, name="digests of the state")
    differ = instances_that_differ([(int(mixed), int(total)) for mixed, total, _ in gathered])
    if not differ:
        return None
    where = _first_difference(members, arrays)
    if len(differ) == len(gathered):
        raise DivergenceError(
            f"before step {step} the instances have different bits, and no majority has the same bits{where}"
        )
    who = f"{'instance' if len(differ) == 1 else 'instances'} {', '.join(str(gathered[each, 2]) for each in differ)}"
    if not heals or not members.can_carry_on:
        raise DivergenceError(
            f"before step {step} {who} had other bits than the other {len(gathered) - len(differ)}{where}"
        )
    source = next(instance for instance in range(len(gathered)) if instance not in differ)
    if members.instance_index == source:
        logger.warning("before step %d %s had other bits than the others, and got theirs", step, who)
    return source


def insist_on_same_bits(members: Members, arrays: Mapping[str, np.ndarray], step: int) -> None:
    """Refuse to go on if arrays have other bits on any instance, even in a job that could carry on. Collective.

    Args:
        members: The instances.
        arrays: The arrays by name, with the same names, shapes and dtypes on all instances.
        step: The number of steps so far, for messages.

    Raises:
        DivergenceError: On all instances, if their bits differ.
    """
    majority_of(members, arrays, step, heals=False)


def _first_difference(members: Members, arrays: Mapping[str, np.ndarray]) -> str:
    """Describe the first array that differs between instances. Collective; called only after a difference."""
    own = np.array([digest_of_arrays([array]) for array in arrays.values()], np.uint64)
    gathered = members.communicator.all_gather(own, name="digests of each array")
    first = int(np.argmax((gathered != gathered[0]).any(axis=(0, 2))))
    name, array = list(arrays.items())[first]
    norm = np.array(np.linalg.norm(array.astype(np.float64)))
    norms = members.communicator.all_gather(norm, name="norms of an array")
    shown = ", ".join(f"{float(norm):.9g}" for norm in norms)
    return (
        f": the first array that differs is {name}, with the norms {shown} on the instances; possible causes are a "
        "program that changes the state, or draws from other generators, on some instances only, and faulty memory"
    )


def _rotated(number: int) -> int:
    return (number << 1 | number >> 63) % (1 << 64)
