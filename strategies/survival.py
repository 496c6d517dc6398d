"""Going on without instances that are lost, with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from collectives import BrokenError, PeerLostError

if TYPE_CHECKING:
    from strategies.strategy import Strategy

T = TypeVar("T")

logger = logging.getLogger(__name__)


def surviving(strategy: Strategy, attempt: Callable[[], T], catch_up: Callable[[], T | None]) -> T:
    """Do something together with the other instances, whichever of them are lost meanwhile.

    Args:
        strategy: connects the instances.
        attempt: does it; it may be repeated when it has failed half-way because an instance was lost.
        catch_up: called on all instances that are left, after they have taken over the replicas; returns the result
            where another instance had done it already, and None where it is to be attempted once more.

    Raises:
        PeerLostError: if an instance is lost and the job was not started to go on without it, or if those that are left
            do not find each other, or go on without this one.
    """
    is_behind = False
    while True:
        if is_behind:
            strategy.carry_on()  # itself begins again for whoever is lost meanwhile; what it raises is final
        try:
            if is_behind:
                done = catch_up()
                if done is not None:
                    return done
            return attempt()
        except (PeerLostError, BrokenError) as error:
            if not strategy.can_carry_on:
                raise
            logger.info("an instance is lost: %s", error)
            is_behind = True


def gather_steps(strategy: Strategy, step: int) -> np.ndarray:
    """The step that each instance has reached; a collective call.

    Args:
        strategy: connects the instances.
        step: the one that this instance has reached.
    """
    return strategy.communicator.all_gather(np.array(step, np.int64), name="steps that were reached")
