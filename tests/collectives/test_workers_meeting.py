"""The meeting of gRPC workers: in any order, at all kinds of addresses, and never at a wrong one."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import http2
import pytest
from grpc_jobs import socket_addresses
from grpc_threads import WorkerThreads, connect
from mpi_jobs import in_a_job
from watching import watched
from workers import (
    Job,
    Worker,
    assert_end_well,
    disposed_of,
    free_ports,
    last_line,
    port_addresses,
    running,
    until_listening,
)

from collectives import CollectiveTimeoutError, PeerRefusedError
from collectives.clock import FakeClock
from collectives.network import meeting, wire
from collectives.network.addresses import Address
from collectives.network.security import Security

LONG_S = 1e6


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with socket_addresses(2) as addresses:
        yield addresses


# ---- threads


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_reversed", [False, True], ids=["first rank first", "last rank first"])
def test_workers_start_in_any_order(size: int, is_reversed: bool) -> None:
    with socket_addresses(size) as addresses:
        group, workers = WorkerThreads(addresses), []
        for rank in sorted(range(size), reverse=is_reversed):
            workers.append(group.join(rank))
            until_listening(addresses[rank])
        group.assert_end_well(workers)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_workers_meet_at_ports(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback interface")
    group = WorkerThreads(port_addresses(2, host))
    group.assert_end_well([group.join(rank) for rank in range(2)])


def test_addresses_of_different_kinds_may_be_mixed(addresses: Sequence[str]) -> None:
    mixed = [addresses[0].replace("unix:", "unix://"), *port_addresses(1), *port_addresses(1, "localhost")]
    group = WorkerThreads(mixed)
    group.assert_end_well([group.join(rank) for rank in range(3)])


def test_waiting_workers_name_the_absent_one() -> None:
    with socket_addresses(3) as addresses, watched() as warnings:
        group = WorkerThreads(addresses)
        clock = FakeClock(tick_s=0.001)
        workers = [group.join(rank, connect_timeout_s=float("inf"), clock=clock) for rank in (0, 2)]
        for rank in (0, 2):
            words = (f"rank {rank} at {addresses[rank]} has waited", f"s for rank 1 at {addresses[1]} (no such file")
            warnings.wait_for(1, *words)
        group.assert_end_well([*workers, group.join(1)])


@pytest.mark.parametrize("kind", ["port", "socket"])
def test_an_address_in_use_is_an_error(addresses: Sequence[str], kind: str) -> None:
    if kind == "port":
        addresses = port_addresses(2)
    with listening_at(addresses[1]), pytest.raises(PeerRefusedError) as caught:
        connect(addresses, 1)
    assert str(caught.value).startswith(f"rank 1 at {addresses[1]} cannot listen there")
    assert re.search("in use|another process listens", str(caught.value))


def test_a_name_with_one_address_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener at the IPv6 address of `localhost` would be taken for this worker."""
    (port,) = free_ports(1)
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    with listening_at(f"127.0.0.2:{port}"), pytest.raises(PeerRefusedError, match="cannot listen there: .*in use"):
        connect([f"two-places:{port}", "unix:/nowhere/1"], 0)


def test_a_stale_socket_file_does_not_matter(addresses: Sequence[str]) -> None:
    with listening_at(addresses[0]):
        pass
    assert Path(addresses[0].removeprefix("unix:")).is_socket()
    group = WorkerThreads(addresses)
    group.assert_end_well([group.join(rank) for rank in range(2)])


def test_a_worker_that_gave_up_in_this_process_may_try_again(addresses: Sequence[str]) -> None:
    with pytest.raises(CollectiveTimeoutError):
        connect(addresses, 0)
    group = WorkerThreads(addresses)
    group.assert_end_well([group.join(rank) for rank in range(2)])


@pytest.mark.parametrize("kind", ["port", "socket"])
def test_a_second_claim_on_an_address_leaves_the_first_alone(addresses: Sequence[str], kind: str) -> None:
    group = WorkerThreads(addresses if kind == "socket" else port_addresses(2))
    workers = [group.join(rank) for rank in range(2)]
    group.assert_reduce(workers)
    with pytest.raises(PeerRefusedError, match="rank 0 at"):
        group.connect(0)
    group.assert_end_well(workers)


# ---- processes


@in_a_job
@pytest.mark.complete
@pytest.mark.parametrize(("size", "is_reversed"), [(2, True), (3, False), (4, True)])
def test_processes_start_in_any_order(size: int, is_reversed: bool) -> None:
    with socket_addresses(size) as addresses, disposed_of() as workers:
        for rank in sorted(range(size), reverse=is_reversed):
            workers.append(Job(addresses).start("rounds", rank))
            workers[-1].wait_for("begins")
        assert_end_well(workers)


@in_a_job
@pytest.mark.complete
def test_waiting_workers_name_the_absent_one_and_meet_it_seconds_later() -> None:
    with socket_addresses(3) as addresses, disposed_of() as workers:
        job = Job(addresses)
        workers.extend(job.start("rounds", rank) for rank in (0, 2))
        for rank, worker in zip((0, 2), workers, strict=True):
            words = ("WARNING", f"rank {rank} at {addresses[rank]} has waited", "s for")
            line = worker.wait_for(*words, without=f"rank {2 - rank}")
            assert f"rank 1 at {addresses[1]} (no such file or directory)" in line
        workers.append(job.start("rounds", 1))
        assert_end_well(workers)


@in_a_job
@pytest.mark.complete
def test_the_error_after_the_limit_names_the_addresses() -> None:
    addresses = port_addresses(3)
    with disposed_of() as workers:
        workers.append(Job(addresses).start("rounds", 1))
        until_listening(addresses[1])
        workers.append(Job(addresses).start("rounds", 0, "--connect-timeout-s", "15"))
        assert workers[1].end() == 1
        error = last_line(workers[1])
        assert error.startswith(f"collectives.errors.CollectiveTimeoutError: rank 0 at {addresses[0]} has waited")
        assert f"for rank 2 at {addresses[2]} (connection refused): gave up after connect_timeout_s = 15" in error
        assert addresses[1] not in error


@in_a_job
@pytest.mark.complete
@pytest.mark.parametrize("kind", ["port", "socket"])
def test_an_address_in_use_gives_one_clear_error(addresses: Sequence[str], kind: str) -> None:
    if kind == "port":
        addresses = port_addresses(2)
    with listening_at(addresses[1]), disposed_of() as workers:
        workers.append(Job(addresses).start("rounds", 1))
        assert workers[0].end() == 1
        error = last_line(workers[0])
        assert error.startswith(f"collectives.errors.PeerRefusedError: rank 1 at {addresses[1]} cannot listen there")
        assert "in use" in error or "another process listens" in error
        assert len(workers[0].containing("cannot listen there")) == 1


@in_a_job
@pytest.mark.complete
def test_workers_that_die_while_others_are_awaited_may_come_again() -> None:
    """One worker uses a port, the other one a socket whose file it leaves behind."""
    with socket_addresses(2) as sockets, disposed_of() as workers:
        job = Job([*sockets, *port_addresses(2)])
        workers += [job.start("rounds", rank) for rank in range(3)]
        for worker in workers:
            worker.wait_for("s for rank 3 at")  # these three have met
        first, *victims = workers
        for victim in victims:
            victim.kill()
        again = [job.start("rounds", rank) for rank in (1, 2, 3)]
        workers += again
        assert_end_well([first, *again])


@in_a_job
@pytest.mark.complete
def test_a_worker_that_gives_up_may_come_again(addresses: Sequence[str]) -> None:
    with disposed_of() as workers:
        job = Job(addresses)
        hasty = job.start("rounds", 0, "--connect-timeout-s", "0.2")
        workers.append(hasty)
        assert hasty.end() == 1
        patient = [job.start("rounds", rank) for rank in (1, 0)]
        workers += patient
        assert_end_well(patient)


@in_a_job
@pytest.mark.complete
@pytest.mark.parametrize("kind", ["port", "socket"])
def test_a_second_process_leaves_the_first_alone(addresses: Sequence[str], kind: str) -> None:
    job = Job(addresses if kind == "socket" else port_addresses(2))
    with running(job, "rounds") as pair, disposed_of() as others:
        pair[0].wait_for("round 1 was right")
        others.append(job.start("rounds", 0))
        assert others[0].end() == 1
        assert "PeerRefusedError: rank 0 at" in last_line(others[0])
        assert_end_well(pair)


@in_a_job
def test_workers_listen_only_at_their_addresses() -> None:
    addresses = port_addresses(2)
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    with running(Job(addresses, ["--pause-s", "0.05"]), "rounds") as workers:
        for worker, port in zip(workers, ports, strict=True):
            worker.wait_for("round 1 was right")
            assert listening_places(worker) == {("127.0.0.1", port)}
        assert_end_well(workers)


@in_a_job
@pytest.mark.complete
def test_workers_at_sockets_listen_at_no_port(addresses: Sequence[str]) -> None:
    with running(Job(addresses), "rounds") as workers:
        for worker in workers:
            worker.wait_for("round 1 was right")
            assert listening_places(worker) == set()
        assert_end_well(workers)
    assert not Path(addresses[0].removeprefix("unix:")).exists()


# ---- arguments


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_without_an_address_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}, but there are 2 addresses; ranks are 0 to 1"):
        connect(["unix:/nowhere/0", "unix:/nowhere/1"], rank)


@pytest.mark.parametrize("twice", [["localhost:3737"] * 2, ["unix:/nowhere/0"] * 2])
def test_workers_have_different_addresses(twice: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="twice"):
        connect(twice, 0)


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("localhost", "is not host:port"),
        ("", "is not host:port"),
        (":3737", "is not host:port"),
        ("localhost:", "is not host:port"),
        ("localhost:http", "is not host:port"),
        ("localhost:-1", "is not host:port"),
        ("localhost:٣٧", "is not host:port"),
        ("::1:3737", "is not host:port"),
        ("localhost:0", "ports are 1 to 65535"),
        ("localhost:65536", "ports are 1 to 65535"),
        ("unix:relative", "no absolute path"),
        ("unix:", "no absolute path"),
        ("http://localhost:3737", "is not host:port"),
    ],
)
def test_an_invalid_address_is_quoted(address: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        connect(["unix:/nowhere/0", address], 0)
    assert repr(address) in str(caught.value)


def test_a_socket_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path}/nowhere/{rank}" for rank in range(2)]
    with pytest.raises(PeerRefusedError, match=f"rank 0 at {addresses[0]} cannot listen there"):
        connect(addresses, 0)


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path}/{'x' * 120}{rank}" for rank in range(2)]
    with pytest.raises(PeerRefusedError, match="cannot listen there"):
        connect(addresses, 0)


def test_a_single_worker_needs_no_others(tmp_path: Path) -> None:
    with connect([f"unix:{tmp_path}/0"], 0) as communicator:
        assert (communicator.rank, communicator.size) == (0, 1)


def test_waiting_alone_ends_at_the_limit(addresses: Sequence[str]) -> None:
    with pytest.raises(CollectiveTimeoutError, match=f"for rank 1 at {addresses[1]}.* connect_timeout_s = 0.2"):
        connect(addresses, 0)


# ---- facts about the machine


def has_ipv6() -> bool:
    try:
        free_ports(1, "::1", socket.AF_INET6)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def listening_at(address: str) -> Iterator[None]:
    """Listen at the address in place of a worker."""
    is_unix = address.startswith("unix:")
    with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as listener:
        host, _, port = address.rpartition(":")
        listener.bind(address.removeprefix("unix:") if is_unix else (host, int(port)))
        listener.listen()
        yield


def listening_places(worker: Worker) -> set[tuple[str, int]]:
    """Return the addresses and ports at which a process accepts connections, see proc(5)."""
    inodes = set()
    for link in Path(f"/proc/{worker.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
    return {place for inode, place in _listening_sockets() if inode in inodes}


def _listening_sockets() -> Iterator[tuple[str, tuple[str, int]]]:
    is_listening = "0A"
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == is_listening:
                digits, _, port = local.partition(":")
                words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
                host = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")  # IPv4 in IPv6
                yield inode, (host, int(port, 16))


def _abuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """End a stream with a text that would clear a terminal."""
    context.abort(grpc.StatusCode.PERMISSION_DENIED, "\x1b[2J\nerror: all is well\n" * 50)
    return b""


def _welcome_without_the_token(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    context.send_initial_metadata(((wire.WELCOME, "0" * 32), (wire.PROOF, "1" * 64)))
    return b""


def _welcome_with_a_damaged_view(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    context.send_initial_metadata(((wire.WELCOME, "0" * 32), (wire.VIEW, "view [0")))
    return b""


@contextlib.contextmanager
def answering(address: str, answer: Callable[[Iterator[bytes], grpc.ServicerContext], bytes]) -> Iterator[None]:
    """Run a gRPC server that is no worker and gives every stream this answer."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), (Handler(),))
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def test_text_from_a_stranger_is_shown_on_one_short_line(addresses: list[str]) -> None:
    clock = FakeClock(tick_s=0.01)
    words = "the process there does not answer as a worker: \\x1b[2J\\nerror: all is well"
    with watched() as warnings, answering(addresses[0], _abuse):
        worker = WorkerThreads(addresses).join(1, connect_timeout_s=LONG_S, clock=clock)
        (warning, *_) = warnings.wait_for(1, words)
        clock.advance(2 * LONG_S)
        with pytest.raises(CollectiveTimeoutError) as error:
            worker.result(60)
    for text in (warning, str(error.value)):
        assert text.isprintable()
        assert len(text) < 1000


class _Stranger(socketserver.ThreadingTCPServer):
    """A server that answers each connection in a thread until the client has left or the answer is over."""

    allow_reuse_address = True  # a worker may listen there while connections to this one are open
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that only probed the port and left."""
        if not isinstance(sys.exception(), ConnectionError):
            raise


@contextlib.contextmanager
def stranger_at(address: str, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Run a server that is no worker at the address; its accepted connections stay open afterwards."""
    place = tuple(Address.parse(address).endpoints()[0].location)
    with _Stranger(place, lambda connection, *_: answer(connection)) as server:
        listening = threading.Thread(target=server.serve_forever, args=(0.01,))
        listening.start()
        try:
            yield
        finally:
            server.shutdown()
            listening.join()


def test_grpc_does_not_repeat_a_call_by_itself() -> None:
    """gRPC would repeat an unsent call on the same connection endlessly and without a pause."""
    begun: list[int] = []

    def go_away(connection: socket.socket) -> None:
        connection.sendall(http2.frame(http2.SETTINGS, 0, 0))
        for kind, stream in http2.frames_of(connection):
            if kind == http2.HEADERS:
                begun.append(stream)
                connection.sendall(http2.frame(http2.GOAWAY, 0, 0, bytes(8)))  # last stream 0: none
                return

    (address,) = port_addresses(1)
    (endpoint,) = Address.parse(address).endpoints()
    with stranger_at(address, go_away), wire.open_channel(endpoint, Address.parse(address), None) as channel:
        error = channel.stream_unary(wire.CONTROL_METHOD).future(iter([b""])).exception(60)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(begun) == 1


def test_a_successor_of_a_vanished_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request to the vanished host is never answered, and its connection never closed."""
    is_asked = threading.Event()

    def be_silent(connection: socket.socket) -> None:
        connection.sendall(http2.frame(http2.SETTINGS, 0, 0))
        for kind, _ in http2.frames_of(connection):
            if kind == http2.HEADERS:
                is_asked.set()

    group = WorkerThreads(port_addresses(2))
    with watched() as warnings, stranger_at(group.addresses[1], be_silent), monkeypatch.context() as patch:
        patch.setattr(meeting, "_ANSWER_LIMIT_S", 0.5)  # not for the successor, whose answer may take longer
        first = group.join(0, connect_timeout_s=float("inf"), clock=FakeClock(tick_s=0.001))
        assert is_asked.wait(60)
        warnings.wait_for(1, f"for rank 1 at {group.addresses[1]} (the process there has not answered for 0.5 s)")
    group.assert_end_well([first, group.join(1)])


@pytest.mark.parametrize(
    ("answer", "words"),
    [(_abuse, "does not answer as a worker"), (_welcome_without_the_token, "does not know our job token")],
    ids=["refusal", "welcome"],
)
def test_a_wrong_answer_at_an_address_does_not_end_the_wait_for_its_worker(
    addresses: list[str], answer: Callable[[Iterator[bytes], grpc.ServicerContext], bytes], words: str
) -> None:
    group = WorkerThreads(addresses, Security(token="right"))
    with watched() as warnings, answering(addresses[1], answer):
        first = group.join(0, connect_timeout_s=float("inf"), clock=FakeClock(tick_s=0.001))
        warnings.wait_for(1, f"rank 1 at {addresses[1]}", words)
    group.assert_end_well([first, group.join(1)])


def test_a_damaged_view_at_an_address_does_not_end_the_wait_for_its_worker() -> None:
    with socket_addresses(2) as addresses:
        group = WorkerThreads(addresses)
        with watched() as warnings, answering(addresses[1], _welcome_with_a_damaged_view):
            first = group.join(0, shrinks=True, connect_timeout_s=float("inf"), clock=FakeClock(tick_s=0.001))
            warnings.wait_for(1, f"rank 1 at {addresses[1]}", "does not answer as a worker: ")
        group.assert_end_well([first, group.join(1, shrinks=True)])
