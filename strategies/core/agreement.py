"""The agreement of all instances before a step, and the message about differences between them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence

import numpy as np

from collectives import Communicator
from strategies.core.members import Members
from strategies.errors import DisagreementError

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
    told = [json.loads(broadcast_text(communicator, text, root, what)) for root in range(communicator.size)]
    numbers = communicator.all_gather(np.array(members.first_index, np.int64), name="numbers of instances")
    raise DisagreementError(describe(dict(zip(numbers.tolist(), told, strict=True)), way_out))


def broadcast_text(communicator: Communicator, text: str, root: int, name: str) -> str:
    """Return the text of rank `root` on all ranks. Collective.

    Args:
        communicator: Connection of the ranks.
        text: The text of this rank.
        root: The rank whose text is returned.
        name: The name of the text, for messages.
    """
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = communicator.broadcast(np.array([data.size], np.int64), root, name=f"size of {name}")
    data = data if communicator.rank == root else np.empty(size[0], np.uint8)
    return communicator.broadcast(data, root, name=name).tobytes().decode()


def describe(told: Mapping[int, Terms], way_out: str = _ARGUMENTS) -> str:
    """Return a message that names the differences and the instances with different terms.

    Args:
        told: The terms of each instance, by its number; they are not all the same.
        way_out: The end of a message about values.
    """
    for groups in zip(*told.values(), strict=True):
        of_instances = dict(zip(told, groups, strict=True))
        names = dict.fromkeys(name for group in groups for name in group)
        different = [name for name in names if len({str(group.get(name)) for group in groups}) > 1]
        values = {name: {instance: of[name] for instance, of in of_instances.items() if name in of} for name in names}
        programs = [name for name in different if any(isinstance(value, list) for value in values[name].values())]
        if programs:
            return _of_lines(programs[0], {each: list(lines) for each, lines in values[programs[0]].items()})
        if different:
            shown = "; ".join(_of_value(name, values[name], list(told)) for name in different[:_MOST])
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
