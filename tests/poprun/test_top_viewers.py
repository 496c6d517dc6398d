"""Viewers of a job: discovery, other users, and their isolation from the job."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from poprun.cli.log import Level, Log
from poprun.errors import PopRunError
from poprun.ipc import wire
from poprun.ipc.resizes import RESIZE, RESIZED, ResizeAnswer, ResizeRequest
from poprun.monitor.listener import (
    FULL,
    SEEN,
    SnapshotSource,
    check_private,
    close_listener,
    connect_to_job,
    find_jobs,
    open_listener,
)
from poprun.monitor.snapshot import Seen, Snapshot
from poprun.monitor.viewers import INTERVAL_S, MOST_VIEWERS, PAUSE_S, UNREAD_LIMIT_S, Viewers

LIMIT_S = 10.0
INSTANCES = (Seen(0, "node0"), Seen(1, "node1"))


@dataclass
class Job:
    """poprun's end, on a clock that stands still unless a test moves it."""

    viewers: Viewers
    path: str
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
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        self.serve()
        return connection

    @property
    def count(self) -> int:
        """Return the number of connected viewers."""
        return len(list(self.viewers.handlers(self.now_s))) - 1


@pytest.fixture
def folder() -> Iterator[Path]:
    """Provide a folder for sockets, whose paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made, "poprun")


def path_in(folder: Path) -> str:
    return f"{folder}/{os.uname().nodename}-{os.getpid()}"


@pytest.fixture
def local(folder: Path) -> Iterator[Job]:
    job = Job(Viewers(), path_in(folder))
    job.viewers = Viewers(open_listener(Log(), str(folder)), ("train.py",), lambda: job.now_s)
    yield job
    job.viewers.close()


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
        with pytest.raises(
            PopRunError, match=r"^job has too many viewers \(poprun top\) already; close one of them, and try again$"
        ):
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

    @pytest.mark.parametrize("data", [wire.pack(SEEN, b"{}"), wire.pack(FULL + 1, b"{}"), b"\xff" * 100])
    def test_an_unknown_message_gives_one_error(self, data):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            with pytest.raises(PopRunError, match="^job 7: .*; use the version of poprun that runs the job"):
                SnapshotSource(ours, "job 7").next(LIMIT_S)


class TestListener:
    def test_jobs_of_the_same_user_are_found_and_leave_nothing(self, folder):
        listener = open_listener(Log(), str(folder))
        assert find_jobs(str(folder)) == [os.getpid()]
        assert (folder.stat().st_mode & 0o777, len(list(folder.iterdir()))) == (0o700, 1)
        connect_to_job(str(folder), os.getpid()).close()
        close_listener(listener)
        assert (find_jobs(str(folder)), list(folder.iterdir())) == ([], [])
        with pytest.raises(PopRunError, match=f"^job {os.getpid()} has ended, or is another user's; poprun top lists"):
            connect_to_job(str(folder), os.getpid())

    def test_the_socket_of_a_killed_job_is_removed(self, folder):
        open_listener(Log(), str(folder)).close()
        assert len(list(folder.iterdir())) == 1
        assert (find_jobs(str(folder)), list(folder.iterdir())) == ([], [])

    def test_the_next_job_removes_the_socket_of_a_killed_one(self, folder):
        open_listener(Log(), str(folder)).close()
        killed = Path(path_in(folder)).rename(folder / f"{os.uname().nodename}-1")
        listener = open_listener(Log(), str(folder))
        assert not killed.exists()
        close_listener(listener)

    def test_sockets_of_other_hosts_are_left_alone(self, folder):
        folder.mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(f"{folder}/{os.uname().nodename}x-42")
        assert (find_jobs(str(folder)), len(list(folder.iterdir()))) == ([], 1)

    def test_no_folder_means_no_job(self, folder):
        assert find_jobs(str(folder)) == []

    def test_a_job_that_is_stopped_with_a_full_queue_is_found_but_not_waited_for(self, folder):
        listener = open_listener(Log(), str(folder))
        waiting = []
        with suppress(BlockingIOError):
            while True:
                caller = socket.socket(socket.AF_UNIX)
                waiting.append(caller)
                caller.setblocking(False)
                caller.connect(path_in(folder))
        assert find_jobs(str(folder)) == [os.getpid()]
        with pytest.raises(
            PopRunError, match="does not answer: its poprun may have been stopped; look at its terminal"
        ):
            connect_to_job(str(folder), os.getpid())
        close_listener(listener)
        for caller in waiting:
            caller.close()

    def test_a_shortage_of_descriptors_delays_admission(self, local):
        import resource

        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(local.path)
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


def made_by_another(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 65534, -1)


def readable_by_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def link_to_a_folder(folder: Path) -> None:
    folder.symlink_to(folder.parent)


MADE = [
    pytest.param(made_by_another, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")),
    readable_by_others,
    link_to_a_folder,
]


class TestOtherUsers:
    """No other user of the host may see or change a job."""

    @pytest.mark.parametrize("make", MADE)
    def test_a_folder_that_others_can_enter_or_have_made_is_not_used(self, folder: Path, make, capfd):
        make(folder)
        with pytest.raises(PermissionError):
            check_private(str(folder))
        log = Log(Level.INFO)
        assert open_listener(log, str(folder)) is None
        assert f"poprun top will not find this job: {folder} is no folder of yours" in capfd.readouterr().err
        with pytest.raises(PopRunError, match=f"^jobs of yours cannot be found safely: {folder} is no folder of yours"):
            find_jobs(str(folder))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
    def test_the_kernel_lets_no_other_user_into_the_folder(self, local):
        os.chmod(Path(local.path).parent.parent, 0o755)
        with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(PermissionError):
            as_another_user(lambda: stranger.connect(local.path))
        with pytest.raises(PermissionError):
            as_another_user(lambda: os.listdir(os.path.dirname(local.path)))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
    def test_a_process_of_another_user_inside_of_the_folder_is_hung_up_on(self, local):
        """Even if others can enter the folder, the kernel tells poprun who calls."""
        for path in (Path(local.path).parent.parent, Path(local.path).parent, Path(local.path)):
            path.chmod(0o777)
        with socket.socket(socket.AF_UNIX) as stranger:
            as_another_user(lambda: stranger.connect(local.path))
            stranger.sendall(wire.pack(RESIZE, ResizeRequest(1).pack()))
            local.serve()
            local.serve()
            assert (local.count, local.looks, is_over(stranger)) == (0, 0, True)
            assert local.viewers.take_requests() == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
    def test_a_socket_that_another_user_listens_at_is_not_a_job(self, folder):
        folder.mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as false:
            false.bind(path_in(folder))
            as_another_user(lambda: false.listen(1))  # the kernel stores the user of this call
            assert find_jobs(str(folder)) == []
            with pytest.raises(PopRunError, match="has ended, or is another user's"):
                connect_to_job(str(folder), os.getpid())


def as_another_user(act: Callable[[], object]) -> None:
    os.seteuid(65534)
    try:
        act()
    finally:
        os.seteuid(0)


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
