"""The bounded queue of steps that devices have not finished; its error names the failed step."""

from __future__ import annotations

from collections import deque

import jax

from strategies.core.metrics import UnreadArray
from strategies.errors import StrategyError

MOST = 8
"""The most steps that may have begun before the oldest one has ended. They keep their batches in memory."""


class StepQueue:
    """The steps in progress, each with an array that is ready when the step has ended."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, UnreadArray]] = deque()

    def add(self, step: int, ready: UnreadArray) -> None:
        """Add a step that has begun.

        Args:
            step: Number of the step, from 0.
            ready: Array that the step computes.
        """
        self._steps.append((step, ready))

    def await_room(self) -> None:
        """Wait until one more step may be begun.

        At this point the next step has used up nothing. A KeyboardInterrupt mostly comes here, and leaves the state
        usable.

        Raises:
            StrategyError: A step has failed on the devices; the message has its number.
        """
        while self._steps and (len(self._steps) >= MOST or _has_ended(self._steps[0][1])):
            last = self._steps[-1][0]
            number, oldest = self._steps.popleft()
            try:
                if not oldest.is_deleted():
                    oldest.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                self._steps.clear()
                raise StrategyError(
                    f"step {number} has failed on the device, and step {last} was the last one begun: {error}; go on "
                    "from a checkpoint"
                ) from error


def _has_ended(array: UnreadArray) -> bool:
    return bool(array.is_deleted() or array.is_ready())
