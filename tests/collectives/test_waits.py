"""The messages of a waiting rank, and the waits themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from collectives import Communicator, Limits, PeerLostError, Settings, run_on_threads
from collectives.calls import Call
from collectives.instruments import Instruments
from collectives.waiting import Watch

LIMIT_S = 60.0


def test_all_awaited_ranks_are_named() -> None:
    names = [f"rank {rank} on node{rank}" for rank in range(4)]
    watch = Watch(1, names, range(4), Limits(), Instruments(), spins=3)
    watch.call, watch.number = Call("all_reduce", "weights"), 17
    watch.cancelled = True  # normally set by another thread
    with pytest.raises(PeerLostError) as caught:
        watch.wait(lambda: False, lambda: [0, 2, 3])
    text = str(caught.value)
    assert text.startswith("rank 1 on node1 has waited ")
    assert "s for rank 0 on node0, rank 2 on node2, rank 3 on node3 in all_reduce 'weights' (collective 17)" in text


class Noted:
    """An instrument that sees a rank wait in the barrier of an epoch."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self._of_thread = threading.local()

    def operation_begins(self, number: int, call: Call) -> None:
        self._of_thread.title = call.title

    def waiting_for(self, instances: Sequence[int]) -> None:
        if getattr(self._of_thread, "title", "") == "barrier 'epoch'":
            self.has_come.set()


@pytest.mark.parametrize("mechanism", ["ring", "window"])
def test_a_barrier_waits_for_all_ranks(mechanism: str) -> None:
    """The last rank arrives once another one waits for it, or has passed without it."""
    noted, passed = Noted(), threading.Event()

    def program(communicator: Communicator) -> None:
        if communicator.rank == 2:
            assert noted.has_come.wait(LIMIT_S)
            assert not passed.is_set()
        communicator.barrier(name="epoch")
        passed.set()
        noted.has_come.set()

    run_on_threads(3, program, Settings(mechanism=mechanism, progress=Instruments(noted)))
