"""Groups of instances: run a function on some of them, or wait for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from popdist import context
from popdist.errors import LifeCycleError
from popdist.membership.leaving import at_renumbering
from popdist.membership.process import group, process

if TYPE_CHECKING:
    from collectives import Communicator

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_DEFAULT = "default"

_registered: dict[str, Communicator | None] = {}
_of_instances: dict[tuple[int, ...], Communicator] = {}


def forget() -> None:
    """Drop all groups, because the instances get new numbers."""
    _registered.clear()
    _of_instances.clear()


at_renumbering(forget)


def defaultCommunicatorId() -> str:
    """Return the id of the group of all instances."""
    return _DEFAULT


def registerCommunicator(participants: Iterable[int], communicator_id: str = _DEFAULT) -> None:
    """Make a group of instances with a user-defined id. All instances call it, with equal arguments.

    Args:
        participants: Indices of the group's instances.
        communicator_id: Id of the group for collectives. The default id replaces the group of all instances in later
            calls that name no group.

    Raises:
        ValueError: The group is empty or names an instance that does not exist.
        LayoutMismatchError: The arguments differ between instances. Raised on all instances.
    """
    members = _check(participants)
    everybody = _everybody()
    everybody.barrier(name=f"registerCommunicator({list(members)}, {communicator_id!r})")
    _registered[communicator_id] = _subgroup(members) if context.instance().index in members else None


def communicator_of(communicator_id: str = _DEFAULT) -> Communicator:
    """Return the communicator with an id.

    Raises:
        ValueError: The id is unknown.
        LifeCycleError: This instance is not in the group.
    """
    inside = group.get()
    if communicator_id == _DEFAULT and (inside is not None or _DEFAULT not in _registered):
        return context.communicator()
    if communicator_id not in _registered:
        known = ", ".join(sorted({_DEFAULT, *_registered}))
        raise ValueError(f"no communicator is called {communicator_id!r}; use one of {known}")
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
    """Run `func` on the named instances. Inside `func`, collectives and `synchronize` concern only these instances.

    All named instances must call it. Other instances may call it; they return at once.

    Args:
        instances: Indices of the instances that run `func`.
        func: Function to run.
        *args: Positional arguments of `func`.
        **kwargs: Keyword arguments of `func`.

    Returns:
        The result of `func`; None on the other instances.

    Raises:
        ValueError: `instances` is empty or names an instance that does not exist.

    Example:
        >>> import popdist
        >>> popdist.init()
        >>> popdist.execute_on_instances({0}, sum, [1, 2])
        3
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
    """Wait until all instances have called this; inside `execute_on_instances`, until the named instances have."""
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
        raise ValueError(f"{list(members)} is no group of this job's instances; name some of 0 to {count - 1}")
    return members


def _subgroup(members: tuple[int, ...]) -> Communicator:
    """Return the communicator of some instances; it is made on first use and then kept."""
    everybody = _everybody()
    if len(members) == everybody.size:
        return everybody
    if members not in _of_instances:
        _of_instances[members] = everybody.subgroup(members)
    return _of_instances[members]
