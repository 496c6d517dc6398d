"""What instances tell each other between steps, whichever of them are lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from strategies.comparing.agreement import Terms, insist_on_agreement
from strategies.comparing.digest import fingerprint
from strategies.errors import DisagreementError
from strategies.replicas.membership import meet, surviving
from strategies.replicas.replicas import Replicas
from strategies.roles import Batch

T = TypeVar("T")


def broadcast(replicas: Replicas, tree: T) -> T:
    """Instance 0's tree on every instance, placed as a step needs it; a collective call."""
    return _together(replicas, lambda: replicas.broadcast(tree), replicas.broadcast, tree)


def number_of_leader(replicas: Replicas, number: int, name: str) -> int:
    """Instance 0's number on every instance; a collective call.

    Args:
        replicas: connects the instances.
        number: of this one.
        name: of the call.
    """

    def told(number: int, root: int) -> int:
        return _of(replicas, number, root, name)

    return _together(replicas, lambda: told(number, 0), told, number)


def is_so_anywhere(replicas: Replicas, flag: bool, name: str) -> bool:
    """Whether it is so on one instance at least; a collective call.

    Args:
        replicas: connects the instances.
        flag: of this one.
        name: of the call.
    """

    def asked() -> int:
        return int(replicas.communicator.all_reduce(np.array([flag], np.float32), "max", name=name)[0])

    def told(answer: int, root: int) -> int:
        return _of(replicas, answer, root, name)

    return bool(_together(replicas, asked, told, int(flag)))


def compared(replicas: Replicas, flag: bool, digest: bytes, name: str) -> tuple[bool, bool]:
    """Return whether a flag is set on any instance, and whether all have the same digest; a collective call.

    Args:
        replicas: connects the instances.
        flag: of this one.
        digest: of this one, equally long on all.
        name: of the call.
    """

    def asked() -> int:
        mine = np.frombuffer(bytes([flag]) + digest, np.uint8)
        of_all = replicas.communicator.all_gather(mine, name=name)
        return int(of_all[:, 0].any()) + 2 * int((of_all[:, 1:] == of_all[0, 1:]).all())

    def told(answer: int, root: int) -> int:
        return _of(replicas, answer, root, name)

    answer = _together(replicas, asked, told, int(flag) + 2)
    return bool(answer & 1), bool(answer & 2)


def insist(replicas: Replicas, terms: Terms, name: str, way_out: str) -> None:
    """Compare terms with those of the other instances; a collective call.

    Args:
        replicas: connects the instances.
        terms: of this one.
        name: of the call.
        way_out: at the end of the message.

    Raises:
        DisagreementError: on all instances, if they are not the same.
    """

    def asked() -> int:
        insist_on_agreement(replicas, terms, name, way_out)
        return 1

    def told(answer: int, root: int) -> int:
        return _of(replicas, answer, root, name)

    _together(replicas, asked, told, 1)


def refuse_other_rows(replicas: Replicas, rows: Batch) -> None:
    """Refuse data of which instances do not see the same rows; a collective call.

    Args:
        replicas: connects the instances.
        rows: some of the data.

    Raises:
        DisagreementError: on all instances.
    """
    is_same = compared(replicas, False, bytes.fromhex(fingerprint(rows)), "rows of the data")[1]
    if not is_same:
        raise DisagreementError(
            "the instances do not see the same rows or weights of rows, and each of them reads all data, or those "
            "batches that its replicas take; give all of them the same data, and call keras.utils.set_random_seed "
            "where something shuffles"
        )


def _together(replicas: Replicas, attempt: Callable[[], T], share: Callable[[T, int], T], mine: T) -> T:
    """What `attempt` returns, also where instances are lost.

    Args:
        replicas: connects the instances.
        attempt: a collective call.
        share: hands over what it has returned; a collective call.
        mine: something like it.
    """
    if replicas.communicator.size == 1:
        return attempt()

    def catch_up() -> T | None:
        meeting = meet(replicas)
        return share(mine, meeting.newest) if meeting.is_late else None

    return surviving(replicas, attempt, catch_up, share)


def _of(replicas: Replicas, number: int, root: int, name: str) -> int:
    """The number of instance `root`; a collective call."""
    array = np.array(number, np.int64)
    replicas.communicator.broadcast(array, root, name=name)
    return int(array)
