"""Groups of instances: run something on a few of them, wait for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from popdist import context
from popdist.errors import LifeCycleError
from popdist.leaving import at_renumbering
from popdist.process import group, process

if TYPE_CHECKING:
    from collectives import Communicator

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_DEFAULT = "default"

_registered: dict[str, Communicator | None] = {}
_of_instances: dict[tuple[int, ...], Communicator] = {}


def forget() -> None:
    """Drop all groups: the instances are numbered anew."""
    _registered.clear()
    _of_instances.clear()


at_renumbering(forget)


def defaultCommunicatorId() -> str:
    """Return the id of the group of all instances."""
    return _DEFAULT


def registerCommunicator(participants: Iterable[int], communicator_id: str = _DEFAULT) -> None:
    """Make a group of instances under an id of one's own; all instances call it, with equal arguments.

    Args:
        participants: the instances of the group.
        communicator_id: how collectives refer to it. The default id replaces the group of all instances
            in later calls that name no group.

    Raises:
        ValueError: if the group is empty or names an instance that does not exist.
        LayoutMismatchError: on all instances if they disagree.
    """
    members = _check(participants)
    everybody = _everybody()
    everybody.barrier(name=f"registerCommunicator({list(members)}, {communicator_id!r})")
    _registered[communicator_id] = _subgroup(members) if context.instance().index in members else None


def communicator_of(communicator_id: str = _DEFAULT) -> Communicator:
    """Return the communicator behind an id.

    Raises:
        ValueError: if the id is unknown.
        LifeCycleError: if this instance is not in the group.
    """
    inside = group.get()
    if communicator_id == _DEFAULT and (inside is not None or _DEFAULT not in _registered):
        return context.communicator()
    if communicator_id not in _registered:
        known = ", ".join(sorted({_DEFAULT, *_registered}))
        raise ValueError(f"no communicator is called {communicator_id!r}; known are {known}")
    communicator = _registered[communicator_id]
    if communicator is None:
        raise LifeCycleError(
            f"instance {context.instance().index} is not in the group {communicator_id!r}; only members may use it"
        )
    return communicator


def execute_on_instances(
    instances: Iterable[int],
    func: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result | None:
    """Run `func` on the named instances; inside it, collectives and `synchronize` concern only these.

    The others go on at once. All named instances have to call it, the others may.

    Args:
        instances: whom to run it on.
        func: what to run.
        *args: its arguments.
        **kwargs: its named arguments.

    Returns:
        The result of `func`; None on the other instances.

    Raises:
        ValueError: if `instances` is empty or names an instance that does not exist.
    """
    members = _check(instances)
    if context.instance().index not in members:
        return None
    token = group.set(_subgroup(members))
    try:
        return func(*args, **kwargs)
    finally:
        group.reset(token)


def synchronize() -> None:
    """Wait until all instances, or inside `execute_on_instances` the named ones, have called it."""
    communicator_of().barrier(name="synchronize")


def _everybody() -> Communicator:
    communicator = process.communicator
    if communicator is None:
        raise LifeCycleError("the instances are not connected yet; call popdist.init first")
    return communicator


def _check(instances: Iterable[int]) -> tuple[int, ...]:
    try:
        members = tuple(sorted({index(instance) for instance in instances}))
    except TypeError:
        raise TypeError(f"instances is {instances!r}, not a set of whole numbers; name them as {{0, 1}}") from None
    count = context.instance().count
    if not members or members[0] < 0 or members[-1] >= count:
        raise ValueError(f"instances {list(members)} were named; name some of 0 to {count - 1}")
    return members


def _subgroup(members: tuple[int, ...]) -> Communicator:
    """Return the communicator of some instances, made when it is first needed and then kept."""
    everybody = _everybody()
    if len(members) == everybody.size:
        return everybody
    if members not in _of_instances:
        _of_instances[members] = everybody.subgroup(members)
    return _of_instances[members]
