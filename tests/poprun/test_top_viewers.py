"""Viewers of a job: discovery, mutual authentication, and their isolation from the job."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Thread

import pytest

from poprun.cli.log import Log
from poprun.errors import PopRunError, UsageError
from poprun.ipc import wire
from poprun.ipc.resizes import RESIZE, RESIZED, ResizeAnswer, ResizeRequest
from poprun.ipc.sockets import connect
from poprun.monitor.doors import (
    ANSWER,
    FULL,
    RANDOM_BYTES,
    SEEN,
    TOKEN_VARIABLE,
    Door,
    SnapshotSource,
    answer_to,
    call_remote,
    doors_in,
    is_welcome,
    open_doors,
    read_address,
    token_from,
    welcome_to,
)
from poprun.monitor.snapshot import Seen, Snapshot
from poprun.monitor.viewers import (
    GREETING_LIMIT_S,
    INTERVAL_S,
    MOST_VIEWERS,
    PAUSE_S,
    UNREAD_LIMIT_S,
    Viewers,
)

TOKEN = "the token of the job"
LIMIT_S = 10.0
INSTANCES = (Seen(0, "node0"), Seen(1, "node1"))


def listening(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    made = socket.socket(family)
    made.bind(("127.0.0.1", 0) if family == socket.AF_INET else b"")
    made.listen(100)
    made.setblocking(False)
    return made


@dataclass
class Job:
    """poprun's end, on a clock that stands still unless a test moves it."""

    viewers: Viewers
    address: object
    family: socket.AddressFamily
    now_s: float = 100.0
    looks: int = 0

    def serve(self) -> None:
        """Serve the ready connections, as poprun's loop does."""
        poll = select.poll()
        handlers = {}
        for descriptor, events, serve in self.viewers.handlers(self.now_s):
            poll.register(descriptor, events)
            handlers[descriptor] = serve
        for descriptor, _ in poll.poll(0):
            handlers[descriptor]()
        self.viewers.push(self.now_s, self.look)

    def look(self) -> tuple[Seen, ...]:
        self.looks += 1
        return INSTANCES

    def call(self) -> socket.socket:
        """Connect a viewer and admit it."""
        connection = socket.socket(self.family)
        connection.connect(self.address)
        self.serve()
        return connection

    @property
    def count(self) -> int:
        """Return the number of connected viewers."""
        return len(list(self.viewers.handlers(self.now_s))) - 1


def job_at(family: socket.AddressFamily, token: str) -> Iterator[Job]:
    door = Door(listening(family), token)
    job = Job(Viewers(), door.socket.getsockname(), family)
    job.viewers = Viewers([door], ("train.py",), lambda: job.now_s)
    yield job
    job.viewers.close()


@pytest.fixture
def local() -> Iterator[Job]:
    yield from job_at(socket.AF_UNIX, "")


@pytest.fixture
def remote() -> Iterator[Job]:
    yield from job_at(socket.AF_INET, TOKEN)


def message(connection: socket.socket) -> tuple[int, bytes]:
    found = SnapshotSource(connection, "job").next_message(LIMIT_S)
    assert found is not None
    return found


def is_over(connection: socket.socket) -> bool:
    connection.settimeout(LIMIT_S)
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


class TestOnOneMachine:
    def test_a_snapshot_comes_at_once_and_then_every_second(self, local):
        with local.call() as viewer:
            seen = SnapshotSource(viewer, "job")
            assert seen.next(LIMIT_S) == Snapshot(
                os.getpid(), os.uname().nodename, ("train.py",), 0.0, instances=INSTANCES
            )
            local.now_s += INTERVAL_S / 2
            local.serve()
            with pytest.raises(TimeoutError, match="job has said nothing for 0 s"):
                seen.next(0)
            local.now_s += INTERVAL_S / 2
            local.serve()
            assert seen.next(LIMIT_S).age_s == INTERVAL_S

    def test_a_snapshot_is_made_once_for_all_viewers_and_never_without_one(self, local):
        local.serve()
        assert local.looks == 0
        viewers = [local.call() for _ in range(3)]
        local.now_s += INTERVAL_S
        before = local.looks
        local.serve()
        assert local.looks == before + 1
        for each in viewers:
            each.close()

    def test_a_disconnected_viewer_is_forgotten(self, local):
        local.call().close()
        local.serve()
        assert local.count == 0

    def test_a_viewer_that_does_not_read_is_dropped_and_holds_one_snapshot(self, local):
        with local.call() as viewer:
            viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            local.viewers._program = ("x" * 10_000_000,)  # noqa: SLF001 - more than the kernel takes
            for _ in range(2 * int(UNREAD_LIMIT_S)):
                assert sum(len(each._unsent) for each in local.viewers._viewers) < 11_000_000  # noqa: SLF001
                local.now_s += INTERVAL_S
                local.serve()
            assert local.count == 0
            assert local.looks == 2

    def test_a_viewer_that_sends_data_is_disconnected(self, local):
        with local.call() as viewer:
            viewer.sendall(b"x" * 100_000)
            local.serve()
            assert local.count == 0

    def test_viewers_beyond_the_limit_are_rejected(self, local):
        viewers = [local.call() for _ in range(MOST_VIEWERS + 1)]
        assert local.count == MOST_VIEWERS
        assert [message(each)[0] for each in viewers[:MOST_VIEWERS]] == [SEEN] * MOST_VIEWERS
        with pytest.raises(PopRunError, match="^job has too many viewers already; close one of them, and try again$"):
            SnapshotSource(viewers[-1], "job").next(LIMIT_S)
        assert is_over(viewers[-1])
        for each in viewers:
            each.close()

    def test_a_pause_between_attempts_has_no_instances(self, local):
        local.viewers.attempt = 1
        with local.call() as viewer:
            message(viewer)
            clock = iter([200.0, 200.5, 200.5, 201.0, 202.0, 203.0])
            local.viewers._now_s = lambda: next(clock)  # noqa: SLF001
            local.viewers.pause(0.7)
            assert SnapshotSource(viewer, "job").next(LIMIT_S).instances == ()

    def test_the_end_of_the_job_ends_all_viewers(self, local):
        with local.call() as viewer:
            seen = SnapshotSource(viewer, "job")
            seen.next(LIMIT_S)
            local.viewers.close()
            assert seen.next(LIMIT_S) is None

    @pytest.mark.parametrize("data", [wire.pack(SEEN, b"{}"), wire.pack(ANSWER, b"{}"), b"\xff" * 100])
    def test_an_unknown_message_gives_one_error(self, data):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            with pytest.raises(PopRunError, match="^job 7: .*; use the version of poprun that runs the job"):
                SnapshotSource(ours, "job 7").next(LIMIT_S)


class TestOverANetwork:
    def test_a_viewer_with_the_token_gets_snapshots(self, remote):
        host, port = remote.address
        found: list[SnapshotSource] = []
        caller = Thread(target=lambda: found.append(call_remote(host, port, TOKEN)))
        caller.start()
        while caller.is_alive():
            remote.serve()
        remote.serve()
        assert found[0].next(LIMIT_S).instances == INSTANCES
        found[0].close()

    def test_a_viewer_with_a_wrong_token_gets_one_error(self, remote):
        host, port = remote.address
        errors: list[str] = []

        def call() -> None:
            with pytest.raises(PopRunError) as raised:
                call_remote(host, port, "another")
            errors.append(str(raised.value))

        caller = Thread(target=call)
        caller.start()
        while caller.is_alive():
            remote.serve()
        assert errors == [f"{host}:{port} has refused our token; set {TOKEN_VARIABLE} to that of the job"]
        assert remote.looks == 0

    def test_a_poprun_without_the_token_is_not_trusted(self):
        own = bytes(RANDOM_BYTES)
        challenge = b"c" * RANDOM_BYTES
        _, content = wire.MessageReader().feed(answer_to(TOKEN, challenge, own))[0]
        welcome = welcome_to(TOKEN, challenge, content)
        assert welcome is not None
        _, proof = wire.MessageReader().feed(welcome)[0]
        assert is_welcome(TOKEN, challenge, own, proof)
        assert not is_welcome("another", challenge, own, proof)
        assert not is_welcome(TOKEN, challenge, own, content[RANDOM_BYTES:]), "our own proof, sent back"

    def test_an_answer_to_another_challenge_is_rejected(self):
        _, content = wire.MessageReader().feed(answer_to(TOKEN, b"c" * RANDOM_BYTES, bytes(RANDOM_BYTES)))[0]
        assert welcome_to(TOKEN, b"d" * RANDOM_BYTES, content) is None
        assert welcome_to(TOKEN, b"c" * RANDOM_BYTES, content[:-1]) is None
        assert welcome_to(TOKEN, b"c" * RANDOM_BYTES, b"") is None

    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            wire.pack(ANSWER, bytes(48)),
            wire.pack(ANSWER, b""),
            wire.pack(SEEN, b"{}"),
            b"\xff" * 2000,
        ],
    )
    def test_invalid_greetings_are_rejected(self, remote, said):
        with remote.call() as stranger:
            message(stranger)
            stranger.sendall(said)
            remote.serve()
            assert remote.count == 0
            assert is_over(stranger)
        assert remote.looks == 0

    def test_a_silent_caller_is_dropped_after_the_greeting_limit(self, remote):
        with remote.call() as stranger:
            message(stranger)
            remote.now_s += GREETING_LIMIT_S
            remote.serve()
            assert is_over(stranger)

    def test_many_unidentified_callers_do_not_keep_out_a_viewer_with_the_token(self, remote):
        strangers = [remote.call() for _ in range(2 * MOST_VIEWERS)]
        with remote.call() as viewer:
            seen = SnapshotSource(viewer, "job")
            _, challenge = seen.next_message(LIMIT_S)
            viewer.sendall(answer_to(TOKEN, challenge, bytes(RANDOM_BYTES)))
            remote.serve()
            assert [seen.next_message(LIMIT_S)[0], seen.next_message(LIMIT_S)[0]] == [98, SEEN]
            assert remote.count == MOST_VIEWERS
        first = SnapshotSource(strangers[0], "job")
        assert [first.next_message(LIMIT_S)[0], first.next_message(LIMIT_S)[0]] == [96, FULL]
        for each in strangers:
            each.close()

    def test_a_refused_connection_gives_one_error(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            with pytest.raises(PopRunError, match=f"127.0.0.1:{port} cannot be reached: Connection refused; start"):
                call_remote("127.0.0.1", port, TOKEN)

    @pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH\r\n", wire.pack(SEEN, b"{}"), b""])
    def test_a_foreign_server_gives_one_error(self, greeting):
        with listening() as server:
            host, port = server.getsockname()

            def answer() -> None:
                server.setblocking(True)
                connection = server.accept()[0]
                connection.sendall(greeting)
                connection.shutdown(socket.SHUT_WR)
                connection.close()

            thread = Thread(target=answer)
            thread.start()
            with pytest.raises(PopRunError, match=f"^{host}:{port} .*; check the address$"):
                call_remote(host, port, TOKEN)
            thread.join(LIMIT_S)


class TestDoors:
    def test_doors_of_the_same_user_are_found_by_name(self):
        found = open_doors(None, {}, Log())
        try:
            (door,) = found
            name = door.socket.getsockname()[1:].decode()
            with open("/proc/net/unix", errors="replace") as listed:
                assert (os.getpid(), name) in doors_in(listed.read(), os.geteuid())
            with connect(name):
                pass
        finally:
            for each in found:
                each.socket.close()

    def test_doors_of_other_users_are_ignored(self):
        listed = (
            "Num RefCount Protocol Flags Type St Inode Path\n"
            "0: 00000002 00000000 00010000 0001 01 11 @poprun-top-1000-42-0123456789ab\n"
            "0: 00000002 00000000 00010000 0001 01 12 @poprun-top-0-43-0123456789ab\n"
            "0: 00000002 00000000 00010000 0001 01 13 @poprun-top-1000-41-ba9876543210\n"
            "0: 00000003 00000000 00000000 0001 03 14 @poprun-top-1000-41-ba9876543210\n"
            "0: 00000002 00000000 00010000 0001 01 15 @poprun-44-0123456789ab\n"
            "0: 00000002 00000000 00010000 0001 01 16 /tmp/@poprun-top-1000-45-0123456789ab\n"
        )
        assert doors_in(listed, 1000) == [
            (41, "poprun-top-1000-41-ba9876543210"),
            (42, "poprun-top-1000-42-0123456789ab"),
        ]

    def test_a_network_door_needs_the_token(self):
        with pytest.raises(UsageError, match=f"--top-address .* {TOKEN_VARIABLE} is not set; set it"):
            open_doors("127.0.0.1:0", {TOKEN_VARIABLE: " "}, Log())
        assert token_from({TOKEN_VARIABLE: "secret"}, "--address") == "secret"

    def test_an_address_in_use_is_refused(self):
        with listening() as taken:
            place = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(
                PopRunError, match=f"--top-address {place}: poprun cannot listen there: Address already"
            ):
                open_doors(place, {TOKEN_VARIABLE: TOKEN}, Log())

    def test_only_the_network_door_asks_for_the_token(self):
        found = open_doors("127.0.0.1:0", {TOKEN_VARIABLE: TOKEN}, Log())
        assert [each.token for each in found] == [TOKEN, ""]
        for each in found:
            each.socket.close()

    @pytest.mark.parametrize(
        ("text", "address"),
        [("node0:7070", ("node0", 7070)), ("[::1]:1", ("::1", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
    )
    def test_addresses_are_parsed(self, text, address):
        assert read_address(text, "--address") == address

    @pytest.mark.parametrize("text", ["node0", ":7070", "::1:7070", "node0:", "node0:65536", "node0:x", "[::1]"])
    def test_an_invalid_address_is_refused(self, text):
        with pytest.raises(UsageError, match="; write HOST:PORT or"):
            read_address(text, "--address")

    def test_a_shortage_of_descriptors_delays_admission(self, local):
        import resource

        with socket.socket(local.family) as caller:
            caller.connect(local.address)
            (_, _, serve), *_ = local.viewers.handlers(local.now_s)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                serve()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert list(local.viewers.handlers(local.now_s)) == []
            local.now_s += PAUSE_S
            local.serve()
            assert local.count == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_rejected(local):
    with socket.socket(local.family) as stranger:
        os.seteuid(65534)
        try:
            stranger.connect(local.address)
        finally:
            os.seteuid(0)
        local.serve()
        assert (local.count, is_over(stranger)) == (0, True)


class TestResizeRequests:
    REQUEST = ResizeRequest(3, ("node1",))

    def test_a_process_of_the_same_user_on_the_machine_may_ask_once_and_gets_the_answer(self, local):
        asker, viewer = local.call(), local.call()
        asker.sendall(wire.pack(RESIZE, self.REQUEST.pack()))
        local.serve()
        [(number, request)] = local.viewers.take_requests()
        assert request == self.REQUEST
        assert local.viewers.take_requests() == []
        local.viewers.answer(number, ResizeAnswer(True, "2 -> 3 instances"))
        source = SnapshotSource(asker, "job")
        assert source.next_message(LIMIT_S)[0] == message(viewer)[0] == SEEN
        kind, content = source.next_message(LIMIT_S)
        assert (kind, ResizeAnswer.unpack(content)) == (RESIZED, ResizeAnswer(True, "2 -> 3 instances"))
        asker.sendall(wire.pack(RESIZE, self.REQUEST.pack()))
        local.serve()
        assert is_over(asker)
        local.viewers.answer(number, ResizeAnswer(True, "nobody is there"))
        asker.close()
        viewer.close()

    @pytest.mark.parametrize(
        "words",
        [wire.pack(RESIZE, b"3"), wire.pack(SEEN, REQUEST.pack()), 2 * wire.pack(RESIZE, REQUEST.pack())],
        ids=["no request", "another kind", "two"],
    )
    def test_an_asker_that_sends_anything_else_is_disconnected(self, local, words):
        asker = local.call()
        asker.sendall(words)
        assert message(asker)[0] == SEEN
        local.serve()
        assert is_over(asker)
        asker.close()
        assert local.viewers.take_requests() == []

    def test_a_viewer_over_the_network_may_not_ask(self, remote):
        viewer = remote.call()
        _, challenge = message(viewer)
        viewer.sendall(answer_to(TOKEN, challenge, bytes(RANDOM_BYTES)))
        remote.serve()
        viewer.sendall(wire.pack(RESIZE, self.REQUEST.pack()))
        remote.serve()
        assert remote.viewers.take_requests() == []
        assert remote.count == 0
        viewer.close()
