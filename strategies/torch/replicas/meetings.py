"""Sums over all replicas in the middle of passes: local replicas meet, and the last to come calls the collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from collectives import CollectiveTimeoutError, Communicator
from collectives.reduction import Reduction
from strategies.errors import StrategyError
from strategies.pipelines.running.driver import AbandonedError
from strategies.torch.replicas.generators import lent_baton

SumArrays = Callable[[str, Sequence[np.ndarray]], np.ndarray]
"""(name, arrays of the local replicas) -> their sum over all replicas of all instances, in the order of the tree."""


def adding_over(communicator: Communicator, is_busy: bool) -> SumArrays:
    """Return a function that sums over the replicas of all instances.

    Args:
        communicator: The communicator of all instances.
        is_busy: Whether other collectives, or several of these sums, may run at the same time. Then sums are named
            collectives, which take longer. If instances ask for different named sums, only the timeout ends them.
    """

    def add_here(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        out = np.empty_like(arrays[0])
        Reduction("sum", out.dtype).reduce(arrays, out, len(arrays))
        return out

    def add(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return communicator.ordered_all_reduce(arrays, name=name)

    def add_by_name(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return communicator.start_ordered_all_reduce(arrays, np.empty_like(arrays[0]), name=name).wait()

    if communicator.size == 1:
        return add_here
    return add_by_name if is_busy else add


@dataclass
class _ReplicaMeeting:
    """One meeting: local replicas wait for each other at one place of their passes.

    Attributes:
        arrays: The replicas' arrays, by global index.
        is_over: Set when there is a total or an error.
        total: The sum over all replicas of all instances.
        error: The reason why there is no total.
    """

    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    total: np.ndarray | None = None
    error: BaseException | None = None


class ReplicaMeetings:
    """Meetings in which the local replicas of a module wait for each other, and for replicas of other instances.

    All local replicas must have begun, so each has a thread. A replica that waits lets another one compute. An error of
    one replica ends the meetings of all, until `begin`.

    Args:
        replicas: The global indices of the local replicas.
        add: Sums the arrays of all replicas.
        timeout_s: Limit of a replica's wait for other replicas of this instance.
        is_on_host: Whether replicas compute on the host.
    """

    def __init__(self, replicas: range, add: SumArrays, timeout_s: float, is_on_host: bool = True) -> None:
        self._replicas = replicas
        self._add = add
        self._timeout_s = timeout_s
        self._is_on_host = is_on_host
        self._lock = threading.Lock()
        self._open: dict[str, _ReplicaMeeting] = {}
        self._gone: set[int] = set()  # the replicas whose passes have ended
        self._failure: BaseException | None = None
        self._of_first: list[np.ndarray] | None = None  # the sums that the first local replica has got
        self._repeated: Iterator[np.ndarray] | None = None

    def begin(self, is_repeated: bool = False) -> None:
        """Begin a step of all local replicas, whose first one will compute again if `is_repeated`."""
        with self._lock:
            self._gone.clear()
            self._open.clear()
            self._failure = None
            self._of_first = [] if is_repeated else None

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Let the first local replica compute again, with the sums that it got before."""
        self._repeated = iter(self._of_first or ())
        try:
            yield
        finally:
            self._repeated = None

    @contextmanager
    def attended_by(self, replica: int) -> Iterator[None]:
        """Let this thread compute a replica's passes. Afterwards no replica waits for this one."""
        with nullcontext() if self._is_on_host else torch.autograd.set_multithreading_enabled(False):
            try:  # autograd has one thread for all backward passes on a device, and it must not wait
                yield
            finally:
                with self._lock:
                    self._gone.add(replica)
                    self._look_for_missing()

    def sum(self, name: str, replica: int, array: np.ndarray) -> np.ndarray:
        """Return the sum of all replicas' arrays in the meeting of this name. The result must not be changed.

        Raises:
            StrategyError: If another local replica ended its passes without this meeting, or waits at another one.
            AbandonedError: If another local replica has failed.
            CollectiveError: If the collective fails, or after `timeout_s` a local replica has not come.
        """
        if self._repeated is not None:
            if (known := next(self._repeated, None)) is None:
                raise StrategyError(f"replica {replica} comes to {name} more often than before")
            return known
        with self._lock:
            if self._failure is not None:
                raise AbandonedError(f"replica {replica} is given up in {name}: {self._failure}") from self._failure
            meeting = self._open.setdefault(name, _ReplicaMeeting())
            meeting.arrays[replica] = array
            is_last = len(meeting.arrays) == len(self._replicas)
            if is_last:
                del self._open[name]
            else:
                self._look_for_missing()
        if is_last:
            self._carry_out(name, meeting)
        else:
            self._wait(name, replica, meeting)
        if meeting.error is not None:
            raise meeting.error
        assert meeting.total is not None
        if self._of_first is not None and replica == self._replicas[0]:
            self._of_first.append(meeting.total)
        return meeting.total

    def _carry_out(self, name: str, meeting: _ReplicaMeeting) -> None:
        try:
            with lent_baton():
                meeting.total = self._add(name, [meeting.arrays[replica] for replica in self._replicas])
        except BaseException as error:
            meeting.error = error
            raise
        finally:
            meeting.is_over.set()

    def _wait(self, name: str, replica: int, meeting: _ReplicaMeeting) -> None:
        with lent_baton():
            if not meeting.is_over.wait(self._timeout_s):
                self._give_up(name, replica, meeting)
                meeting.is_over.wait()  # if all local replicas are there, the collective has a limit of its own

    # ---- missing replicas

    def _give_up(self, name: str, replica: int, meeting: _ReplicaMeeting) -> None:
        with self._lock:
            if missing := [str(one) for one in self._replicas if one not in meeting.arrays]:
                self._fail(
                    CollectiveTimeoutError(
                        f"replica {replica} has waited for replica {', '.join(missing)} of this instance in {name}: "
                        f"gave up after timeout_s = {self._timeout_s:g}"
                    )
                )

    def fail(self, replica: int, error: BaseException) -> None:
        """End the meetings, because a replica has failed."""
        with self._lock:
            if self._failure is None:
                self._fail(AbandonedError(f"replica {replica} has failed: {error}"))

    def _look_for_missing(self) -> None:
        """End all meetings if a replica will never come to one of them. The lock is held."""
        for name, meeting in self._open.items():
            if gone := sorted(self._gone - meeting.arrays.keys()):
                self._fail(
                    StrategyError(
                        f"replica {gone[0]} has ended its passes without {name}, where replica {min(meeting.arrays)} "
                        "waits for it; all replicas must call such a layer equally often: call the layer in every "
                        "replica, even without rows"
                    )
                )
                return
        waiting = {replica: name for name, meeting in self._open.items() for replica in meeting.arrays}
        if len(waiting) + len(self._gone) == len(self._replicas) and len(self._open) > 1:
            places = ", ".join(f"replica {replica} in {name}" for replica, name in sorted(waiting.items()))
            self._fail(
                StrategyError(
                    f"replicas wait for each other in different layers: {places}; every replica must call such "
                    "layers in the same order"
                )
            )

    def _fail(self, error: BaseException) -> None:
        """End all open meetings with an error. The lock is held."""
        self._failure = error
        for meeting in self._open.values():
            meeting.error = error
            meeting.is_over.set()
        self._open.clear()
