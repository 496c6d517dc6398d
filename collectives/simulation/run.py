"""The execution of traffic on a virtual clock.

A rank adds and sends one thing after another, and receives concurrently. A link carries messages in order of arrival,
one at a time in each direction. The first byte of a message reaches the other end after the latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collectives.plans.cutting import UNDER_WAY
from collectives.plans.network import Network
from collectives.simulation.traffic import Traffic, Wave

PARTS = ("adding", "messages", "latency", "bytes", "busy links and ranks")
_ADDING, _MESSAGES, _LATENCY, _BYTES, _BUSY = range(len(PARTS))
_STEADY = 6  # number of equally long waves after which the following ones are extrapolated


@dataclass(frozen=True)
class Outcome:
    """The duration and traffic of a reduction.

    Attributes:
        seconds: Time until the last rank has the result.
        link_bytes: Bytes that leave each host.
        critical: Duration of each of `PARTS` on the critical path, which ends at the last rank.
    """

    seconds: float
    link_bytes: np.ndarray
    critical: dict[str, float]


def simulate(traffic: Traffic, network: Network) -> Outcome:
    """Run all pieces of the traffic."""
    run = _Run(traffic, network)
    run.flow_all(traffic)
    return run.outcome()


def steady_s(calls: Sequence[Traffic], network: Network, times: int = 12) -> float:
    """Return the time of one pass of successive calls in the steady state.

    A rank begins a call as soon as it has finished the call before it.
    """
    run = _Run(calls[0], network)
    ends = []
    for _ in range(times):
        for traffic in calls:
            run.begin(traffic)
            run.flow_all(traffic)
        ends.append(run.outcome().seconds)
    first = times // 2
    return (ends[-1] - ends[first - 1]) / (times - first)


class _Run:
    def __init__(self, traffic: Traffic, network: Network) -> None:
        hosts = int(traffic.hosts.max()) + 1
        self._network = network
        self._hosts = traffic.hosts
        self._ready = np.zeros((traffic.pieces, traffic.ranks))  # when each rank has everything that it waits for
        self._spent = np.zeros((traffic.pieces, traffic.ranks, len(PARTS)))  # the parts of that time
        self._busy = np.zeros(traffic.ranks)  # until when each rank adds or sends
        self._receiving = np.zeros(traffic.ranks)
        self._out = np.zeros(hosts)  # until when each link carries earlier messages
        self._into = np.zeros(hosts)
        self._link_bytes = np.zeros(hosts)

    def begin(self, traffic: Traffic) -> None:
        """Continue with other traffic on the same ranks, each rank when it has finished the earlier traffic."""
        ended = self._ready.max(0)
        self._ready = np.tile(ended, (traffic.pieces, 1))
        self._spent = np.zeros((traffic.pieces, traffic.ranks, len(PARTS)))

    def flow_all(self, traffic: Traffic) -> None:
        """Run all waves for all pieces."""
        if traffic.pieces == 1:
            for wave in traffic.waves():
                self.repeat(wave)
        else:
            self.overlap(list(traffic.waves()))

    def repeat(self, wave: Wave) -> None:
        """Run equal waves; once their duration is constant, extrapolate the others."""
        took: list[np.ndarray] = []
        for number in range(wave.times):
            before = self._state()
            self.flow(wave, 0)
            took = [*took[1 - _STEADY :], self._state() - before]
            is_steady = len(took) == _STEADY and all(np.allclose(one, other, 1e-9) for one, other in pairwise(took))
            if is_steady and number < wave.times - 1:
                self._skip(took[-1], wave.times - 1 - number)
                return

    def _state(self) -> np.ndarray:
        return np.concatenate([part.ravel() for part in self._parts()])

    def _parts(self) -> list[np.ndarray]:
        return [self._ready[0], self._spent[0], self._busy, self._receiving, self._out, self._into, self._link_bytes]

    def _skip(self, step: np.ndarray, times: int) -> None:
        state = self._state() + times * step
        for part in self._parts():
            part[...], state = state[: part.size].reshape(part.shape), state[part.size :]

    def overlap(self, waves: Sequence[Wave]) -> None:
        """Run several pieces at once; the piece whose ranks are ready first runs its next wave."""
        reached = [0] * len(self._ready)
        while under_way := [piece for piece, number in enumerate(reached) if number < len(waves)][:UNDER_WAY]:
            free = [piece for piece in under_way if piece == under_way[0] or reached[piece - 1] > reached[piece]]
            piece = min(free, key=lambda piece: float(self._ready[piece].min()))
            if not reached[piece] and piece >= UNDER_WAY:
                self._ready[piece] = self._ready[piece - UNDER_WAY]
                self._spent[piece] = self._spent[piece - UNDER_WAY]
            self.flow(waves[reached[piece]], piece)
            reached[piece] += 1

    def flow(self, wave: Wave, piece: int) -> None:
        """Run the messages of one wave."""
        ready, spent = self._ready[piece], self._spent[piece]
        if wave.added is not None:
            self._add(wave.added, ready, spent)
        if not wave.source.size:
            return
        network = self._network
        from_host, to_host = self._hosts[wave.source], self._hosts[wave.to]
        is_local = from_host == to_host
        handling = np.where(is_local, network.local_message_s, network.message_s)
        copying = np.where(is_local, wave.nbytes / network.local_bytes_per_s, 0)
        left = _served(wave.source, ready[wave.source], handling + copying, self._busy)
        latency = np.where(is_local, network.local_latency_s, network.latency_s)
        arrived = left + latency
        carried = np.where(is_local, 0, wave.nbytes / network.bytes_per_s)
        remote = np.flatnonzero(~is_local)
        if remote.size:
            saved = network.burst_bytes / network.bytes_per_s  # seconds of traffic that a full token bucket lets pass
            gone = _served(from_host[remote], left[remote], carried[remote], self._out)
            begun = np.maximum(left[remote], gone - carried[remote] - saved) + network.latency_s
            come = _served(to_host[remote], begun, carried[remote], self._into)
            arrived[remote] = np.maximum(begun, come - saved)
            np.add.at(self._link_bytes, from_host[remote], wave.nbytes[remote])
        done = _served(wave.to, arrived, handling, self._receiving)
        self._hand_over(wave, ready, spent, done, (2 * handling, latency, carried + copying))

    def _add(self, added: np.ndarray, ready: np.ndarray, spent: np.ndarray) -> None:
        ranks = np.flatnonzero(added)
        took = added[ranks] / self._network.memory_bytes_per_s
        spent[ranks, _ADDING] += took
        spent[ranks, _BUSY] += np.maximum(self._busy[ranks] - ready[ranks], 0)
        ready[ranks] = self._busy[ranks] = np.maximum(ready[ranks], self._busy[ranks]) + took

    def _hand_over(
        self,
        wave: Wave,
        ready: np.ndarray,
        spent: np.ndarray,
        done: np.ndarray,
        parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Let ranks continue when their last message has arrived; its path becomes their critical path."""
        order = np.argsort(done, kind="stable")
        last = np.full(ready.size, -1)
        last[wave.to[order]] = order  # NumPy keeps the last of several assignments
        ranks = np.flatnonzero((last >= 0) & (np.where(last >= 0, done[last], 0) > ready))
        messages = last[ranks]
        way = spent[wave.source[messages]].copy()
        for part, seconds in zip((_MESSAGES, _LATENCY, _BYTES), parts, strict=True):
            way[:, part] += seconds[messages]
        way[:, _BUSY] += done[messages] - way.sum(1)
        spent[ranks], ready[ranks] = way, done[messages]

    def outcome(self) -> Outcome:
        last = int(self._ready[-1].argmax())
        critical = dict(zip(PARTS, self._spent[-1, last].tolist(), strict=True))
        return Outcome(float(self._ready.max()), self._link_bytes, critical)


def _served(places: np.ndarray, comes: np.ndarray, takes: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return the time at which each item has been served; items at one place are served in order of arrival.

    Args:
        places: Place of each item.
        comes: Arrival time of each item.
        takes: Service time of each item.
        free: Time from which each place is free; updated to the end of its last item.
    """
    order = np.lexsort((comes, places))
    place, took = places[order], takes[order]
    starts = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
    group = np.repeat(np.arange(starts.size), np.diff(np.r_[starts, place.size]))
    before = np.cumsum(took) - took
    before -= before[starts][group]  # service time of earlier items at the same place
    earliest = np.maximum(comes[order], free[place]) - before
    apart = float(earliest.max() - earliest.min()) + 1.0
    earliest = np.maximum.accumulate(earliest + group * apart) - group * apart
    ends = earliest + before + took
    free[place[starts]] = ends[np.r_[starts[1:], place.size] - 1]
    done: np.ndarray = np.empty_like(ends)
    done[order] = ends
    return done
