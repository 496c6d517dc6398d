"""The server of tokens, which limits simultaneous tests by the number of cores."""

from __future__ import annotations

import threading
import time

from sharing_cores import PATIENCE, TokenServer, cores_of

LIMIT_S = 60.0


def wait_until_awaited(server: TokenServer) -> None:
    """Return when a client has asked for more tokens than are free."""
    while not server.is_awaited:
        time.sleep(0.001)


class Holder:
    """A holder of tokens, which keeps them in a separate thread until it is told to return them."""

    def __init__(self, server: TokenServer, count: int, log: list[str], name: str) -> None:
        self.is_in, self._may_leave = threading.Event(), threading.Event()
        self._arguments = (server.address, count)
        self._log, self._name = log, name
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()

    def _hold(self) -> None:
        with cores_of(*self._arguments):
            self._log.append(self._name)
            self.is_in.set()
            self._may_leave.wait(LIMIT_S)

    def leave(self) -> None:
        self._may_leave.set()
        self._thread.join(LIMIT_S)


def test_clients_are_admitted_while_tokens_last():
    server, log = TokenServer(3), []
    holders = [Holder(server, count, log, str(count)) for count in (1, 2)]
    assert all(holder.is_in.wait(LIMIT_S) for holder in holders)
    third = Holder(server, 1, log, "third")
    wait_until_awaited(server)
    assert not third.is_in.is_set()
    holders[0].leave()
    assert third.is_in.wait(LIMIT_S)
    for holder in (holders[1], third):
        holder.leave()


def test_a_request_for_too_many_tokens_gets_all():
    server, log = TokenServer(2), []
    greedy = Holder(server, 100, log, "greedy")
    assert greedy.is_in.wait(LIMIT_S)
    modest = Holder(server, 1, log, "modest")
    wait_until_awaited(server)
    assert log == ["greedy"]
    greedy.leave()
    assert modest.is_in.wait(LIMIT_S)
    modest.leave()


def test_a_waiting_client_is_overtaken_only_a_few_times():
    server, log = TokenServer(2), []
    with cores_of(server.address, 1):
        waiting = Holder(server, 2, log, "two")
        wait_until_awaited(server)
        for number in range(PATIENCE):
            with cores_of(server.address, 1):
                log.append(f"one {number}")
        late = Holder(server, 1, log, "late")
        assert not waiting.is_in.is_set()
    assert waiting.is_in.wait(LIMIT_S)
    waiting.leave()
    assert late.is_in.wait(LIMIT_S)
    late.leave()
    assert log == [*(f"one {number}" for number in range(PATIENCE)), "two", "late"]
