"""The instances of a job, the agreement of all of them before a step, and the comparison of their bits.

The comparison of bits finds flipped bits, and programs that are not deterministic.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import numpy as np

from collectives import Communicator
from collectives.instruments import Instruments
from popdist.instance import replica_blocks
from popdist.records.distribution_settings import DistributionSettings
from popdist.records.faults import FaultInjector
from popdist.records.progress import ProgressPage
from strategies.core.journal import InstanceProgress, Journal
from strategies.errors import DisagreementError, DivergenceError
from strategies.sinks.sinks import Sinks
from strategies.typing import Batch


class ReplicaPrograms(Protocol):
    """The running programs of the local replicas, which call back into Python for collectives and feeds.

    A step calls `begin`, and runs all programs inside `ending`.
    """

    def begin(self) -> None:
        """Drop the remains of programs that failed half-way."""

    def ending(self) -> AbstractContextManager[None]:
        """End the programs with the block. If the framework hides the error of a callback, raise that error."""


class Members(Protocol):
    """The instances of a job, and the replicas that this instance drives; `Replicas` is the implementation.

    A loop calls `up_to_date` before each step. If a collective call shows a loss, the loop calls `carry_on` and then
    `replicas_batch`, and repeats the step. `carry_on` replaces the communicator, ranks and local replicas.
    """

    @property
    def kind(self) -> str:
        """The kind of these instances, for messages."""

    @property
    def communicator(self) -> Communicator:
        """The connection of the remaining instances."""

    @property
    def first_index(self) -> int:
        """The index of this instance at the start of the job, which poprun uses in its messages."""

    @property
    def instance_index(self) -> int:
        """The rank of this instance."""

    @property
    def local_replicas(self) -> range:
        """The global indices of the replicas that this instance drives now."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all instances."""

    @property
    def instruments(self) -> Instruments:
        """The instruments attached to this instance."""

    @property
    def sinks(self) -> Sequence[Sinks]:
        """The open sinks of metrics."""

    @property
    def distributions(self) -> DistributionSettings | None:
        """The steps in which norms and histograms are taken; None if never."""

    @property
    def progress(self) -> ProgressPage:
        """The connection to the supervisor of this instance."""

    @property
    def faults(self) -> FaultInjector:
        """The faults that the user has asked to inject into this instance."""

    @property
    def running_programs(self) -> ReplicaPrograms:
        """The programs of the local replicas."""

    @property
    def done_so_far(self) -> InstanceProgress:
        """The progress of this instance."""

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on if an instance is lost."""

    @property
    def is_spare(self) -> bool:
        """Whether this instance waits to take the place of a lost one; it takes part in no collective call."""

    @property
    def journal(self) -> Journal:
        """The results of the operations, for spares."""

    def wait_for_values(self) -> None:
        """Wait on a spare, outside of operations, until its placeholders have values; see `Journal.wait_for_values`."""

    def carry_on(self) -> None:
        """Take over the replicas of lost instances, together with the other remaining instances. Collective.

        It repeats itself if more instances are lost meanwhile. Its errors are final.

        Raises:
            LifeCycleError: If the job cannot go on.
        """

    def replicas_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step for the replicas that this instance drives since `carry_on`.

        Raises:
            StrategyError: If `batch` is not the last batch of a data set of the strategy.
        """

    def real_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step with values, on a spare, which gets placeholders from data sets."""

    def position_of(self, batch: Batch) -> Sequence[int] | None:
        """Return the epoch and the step of a batch that a data set has given last; None for any other batch."""

    def up_to_date(self, batch: Batch) -> Batch:
        """Return the batch, or the same step's batch for the present replicas if an instance was lost meanwhile."""

    def check_known_batches(self, batches: Iterable[Batch]) -> None:
        """Refuse batches without a data set of a strategy after instances were lost or have joined.

        Raises:
            StrategyError: Nobody knows for which replicas the batches are.
        """


# ---- gathering

OfReplicas: TypeAlias = Sequence[Sequence[np.ndarray]]
"""The arrays of each replica."""


def gather_arrays(members: Members, local: OfReplicas, name: str) -> list[list[np.ndarray]]:
    """Return the arrays of every replica of all instances, in the order of the replicas. Collective.

    Args:
        members: The instances.
        local: The arrays of each local replica; all replicas have the same number of arrays, shapes and dtypes.
        name: The name of the call, for messages.
    """
    whole = members.communicator.all_gather(_message(members, local), name=name)
    return _unpacked(members, whole, local[0])


def gather_arrays_on_first(members: Members, local: OfReplicas, name: str) -> list[list[np.ndarray]] | None:
    """Gather arrays like `gather_arrays`, but on instance 0 alone; return None on the others. Collective."""
    whole = members.communicator.gather(_message(members, local), name=name)
    return None if whole is None else _unpacked(members, whole, local[0])


def replicas_where(members: Members, is_so: Iterable[bool], name: str) -> list[int]:
    """Return the replicas of all instances that have a property. Collective.

    Args:
        members: The instances.
        is_so: Whether each local replica has the property, in their order.
        name: The name of the call, for messages.
    """
    gathered = gather_arrays(members, [[np.array(one)] for one in is_so], name)
    return [replica for replica, [one] in enumerate(gathered) if one]


def _message(members: Members, local: OfReplicas) -> np.ndarray:
    """Return the bytes of the local replicas' arrays, one row each; an instance with fewer replicas adds a row."""
    packed = [
        np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]) for arrays in local
    ]
    blocks = replica_blocks(members.communicator.size, members.num_replicas_in_sync)
    message = np.zeros((max(map(len, blocks)), packed[0].size), np.uint8)
    message[: len(packed)] = packed
    return message


def _unpacked(members: Members, whole: np.ndarray, like: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return the arrays of all replicas, from the messages of all instances."""
    ends = np.cumsum([array.nbytes for array in like])[:-1]
    blocks = replica_blocks(len(whole), members.num_replicas_in_sync)
    rows = [whole[rank, row] for rank, block in enumerate(blocks) for row in range(len(block))]
    return [
        [part.copy().view(array.dtype).reshape(array.shape) for part, array in zip(parts, like, strict=True)]
        for parts in (np.split(row, ends) for row in rows)
    ]


# ---- before a step

Terms = Sequence[Mapping[str, str | Sequence[str]]]
"""The facts that decide a result, by name: a value, or the lines of a program.

They come in groups. A difference in an earlier group may cause differences in later groups.
"""
_MOST = 4  # largest number of differences in a message
_PROGRAM = "; start all with the same program and arguments"
_ARGUMENTS = "; start all with the same arguments"
_ORDER = "; make them in one order: go through sorted(names) in place of a set, or set PYTHONHASHSEED=0 everywhere"


def insist_on_agreement(
    members: Members, terms: Terms, name: str = "digests of options and programs", way_out: str = _ARGUMENTS
) -> None:
    """Compare the facts that decide the result between all instances. Collective.

    Each instance sends 32 bytes. If instances differ, each also sends all of its facts.

    Args:
        members: The instances.
        terms: The facts of this instance.
        name: The name of the call, for messages.
        way_out: The end of a message about values.

    Raises:
        DisagreementError: On all instances, with the same text, if they do not agree.
    """
    communicator = members.communicator
    if communicator.size == 1:
        return
    text = json.dumps([dict(group) for group in terms])
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = communicator.all_gather(mine, name=name)
    if (digests == digests[0]).all():
        return
    what = "arguments of an instance"
    reported = [json.loads(broadcast_text(communicator, text, root, what)) for root in range(communicator.size)]
    numbers = communicator.all_gather(np.array(members.first_index, np.int64), name="numbers of instances")
    raise DisagreementError(describe(dict(zip(numbers.tolist(), reported, strict=True)), way_out))


def broadcast_text(communicator: Communicator, text: str, root: int, name: str) -> str:
    """Return the text of rank `root` on all ranks. Collective.

    Args:
        communicator: Connection of the ranks.
        text: The text of this rank.
        root: The rank whose text is returned.
        name: The name of the text, for messages.
    """
    return broadcast_bytes(communicator, text.encode(), root, name).decode()


def broadcast_bytes(communicator: Communicator, data: bytes, root: int, name: str) -> bytes:
    """Return the bytes of rank `root` on all ranks, as `broadcast_text` does. Collective."""
    octets = np.frombuffer(data, np.uint8).copy()
    size = communicator.broadcast(np.array([octets.size], np.int64), root, name=f"size of {name}")
    octets = octets if communicator.rank == root else np.empty(size[0], np.uint8)
    return communicator.broadcast(octets, root, name=name).tobytes()


def describe(reported: Mapping[int, Terms], way_out: str = _ARGUMENTS) -> str:
    """Return a message that names the differences and the instances with different terms.

    Args:
        reported: The terms of each instance, by its number; they are not all the same.
        way_out: The end of a message about values.
    """
    for groups in zip(*reported.values(), strict=True):
        of_instances = dict(zip(reported, groups, strict=True))
        names = dict.fromkeys(name for group in groups for name in group)
        different = [name for name in names if len({str(group.get(name)) for group in groups}) > 1]
        values = {name: {instance: of[name] for instance, of in of_instances.items() if name in of} for name in names}
        programs = [name for name in different if any(isinstance(value, list) for value in values[name].values())]
        if programs:
            return _of_lines(programs[0], {each: list(lines) for each, lines in values[programs[0]].items()})
        if different:
            shown = "; ".join(_of_value(name, values[name], list(reported)) for name in different[:_MOST])
            more = len(different) - _MOST
            return shown + (f"; and {more} more" if more > 0 else "") + way_out
        if len(set(map(tuple, groups))) > 1:
            return _of_lines("the same parts", {instance: list(group) for instance, group in of_instances.items()})
    raise ValueError("all instances agree")


def _of_value(name: str, values: Mapping[int, str | Sequence[str]], instances: Sequence[int]) -> str:
    """Describe a difference, such as: instance 1 has seed 3, instances 0 and 2 seed 4."""
    having: dict[str, list[int]] = {}
    for instance in instances:
        having.setdefault(f"{name} {values[instance]}" if instance in values else f"no {name}", []).append(instance)
    fewest_first = sorted(having.items(), key=lambda item: (len(item[1]), -item[1][0]))
    (what, who), *others = fewest_first
    verb = "has" if len(who) == 1 else "have"
    return ", ".join([f"{_named(who)} {verb} {what}", *(f"{_named(whose)} {other}" for other, whose in others)])


def _of_lines(name: str, programs: Mapping[int, Sequence[str]]) -> str:
    """Describe the first line in which the programs of two instances differ, or the names in another order."""
    (first, wanted), *others = programs.items()
    instance, lines = next((each, found) for each, found in others if found != wanted)
    pairs = enumerate(itertools.zip_longest(lines, wanted, fillvalue="nothing"), 1)
    number, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    if sorted(lines) == sorted(wanted):
        return (
            f"instance {instance} has {name} in another order than instance {first}: number {number} is '{here}', and "
            f"there it is '{there}'{_ORDER}"
        )
    return (
        f"instance {instance} computes {name} differently from instance {first}: line {number} of its program is "
        f"'{here}', and there it is '{there}'{_PROGRAM}"
    )


def _named(instances: Sequence[int]) -> str:
    if len(instances) == 1:
        return f"instance {instances[0]}"
    return f"instances {', '.join(map(str, instances[:-1]))} and {instances[-1]}"


# ---- bits

logger = logging.getLogger(__name__)

Digest = tuple[int, int]


_ODD = np.arange(1 << 12, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
"""Factors of the words of a row, which are odd so that no bit is lost."""


def digest_of_arrays(arrays: Iterable[np.ndarray]) -> Digest:
    """Return two numbers that depend on all bits of the arrays and on their places; one flipped bit changes both.

    They are a hash of sums: each row of 4,096 words of 64 bits is multiplied by fixed factors and added. A digest finds
    accidents; it does not protect against arrays that were made to have the same digest.
    """
    whole = hashlib.sha256()
    for array in arrays:
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        size = octets.size // (_ODD.size * 8) * _ODD.size * 8
        sums = octets[:size].view(np.uint64).reshape(-1, _ODD.size) @ _ODD
        whole.update(sums.tobytes() + octets[size:].tobytes() + np.array(octets.size).tobytes())
    return divmod(int.from_bytes(whole.digest()[:16], "little"), 1 << 64)


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
