"""Admission of gRPC workers: certificates, the job token, and the settings that all must share."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import http2
import pytest
from certificates import SERVER, Authority, Files
from grpc_jobs import environ_with, socket_addresses
from grpc_threads import WorkerThreads, connect
from mpi_jobs import in_a_job
from strangers import LIMIT_S, answer_at, channel_to, good_hello, proven
from watching import Warnings, watched
from workers import (
    Job,
    Worker,
    assert_end_well,
    assert_still_right,
    disposed_of,
    free_ports,
    is_root,
    last_line,
    port_addresses,
    running,
    until_listening,
)

from collectives import Communicator, PeerRefusedError, SecurityError
from collectives.clock import FakeClock
from collectives.network.addresses import Address, Endpoint
from collectives.network.hello import CONTROL
from collectives.network.security import (
    AUTHORITY,
    CERTIFICATE,
    INSECURE,
    KEY,
    TLS_VARIABLES,
    TOKEN,
    Certificates,
    Security,
)
from collectives.network.wire import CONTROL_METHOD, HELLO, PROOF, WELCOME, Room, open_server
from collectives.plans.network import Network

ELSEWHERE = "192.0.2.1:3737"  # in TEST-NET-1, which has no hosts
RIGHT_TOKEN = "the-right-token"
PATIENCE = ["--connect-timeout-s", "50"]  # for wrong workers that are not refused


# ---- plaintext


@pytest.mark.parametrize("rank", [0, 1])
def test_plaintext_does_not_leave_the_local_machine(rank: int) -> None:
    """A worker that tried to listen would fail at the address in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        addresses = [taken, ELSEWHERE] if rank == 0 else [ELSEWHERE, taken]
        with pytest.raises(SecurityError) as caught:
            connect(addresses, rank)
    text = str(caught.value)
    assert f"{ELSEWHERE} is not on this machine" in text
    assert all(name in text for name in (*TLS_VARIABLES, f"{INSECURE}=1"))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[2001:db8::1]", "no-such-host.invalid"])
def test_only_loopback_addresses_count_as_the_local_machine(host: str) -> None:
    with pytest.raises(SecurityError, match="not on this machine"):
        connect([f"{host}:3737", "127.0.0.1:3738"], 0)


def test_a_public_address_of_the_local_machine_is_not_a_loopback_address() -> None:
    addresses = own_addresses()
    with pytest.raises(SecurityError, match=f"{addresses[0]}, {addresses[1]} are not on this machine"):
        connect(addresses, 0)


def test_plaintext_between_machines_needs_permission_and_gets_a_warning() -> None:
    addresses = own_addresses()
    with watched() as warnings:
        group = WorkerThreads(addresses, Security.from_environ({INSECURE: "1"}))
        group.assert_end_well([group.join(rank) for rank in range(2)])
    assert len(warnings.containing(f"{INSECURE}=1", *addresses)) == 2


@contextlib.contextmanager
def somebody_else() -> Iterator[str]:
    """Provide a process of another user of this machine, and yield the user's name."""
    if not is_root():
        pytest.skip("becoming another user needs root")
    sleeper = subprocess.Popen(["sleep", "1000"], user=OTHER_USER)
    try:
        yield f"user {OTHER_USER}"
    finally:
        sleeper.kill()
        sleeper.wait()


OTHER_USER = 43_210
LISTENS = "listens where other users of this machine ("


def test_workers_without_token_warn_once_each_if_others_use_the_machine() -> None:
    with somebody_else(), watched() as warnings:
        group = WorkerThreads(port_addresses(2))
        group.assert_end_well([group.join(rank) for rank in range(2)])
    for rank in range(2):
        (line,) = warnings.containing(f"rank {rank} at {group.addresses[rank]} {LISTENS}")
        assert line.endswith(f"set {TOKEN} to the same secret in all workers")


def test_workers_with_a_token_or_private_sockets_do_not_warn() -> None:
    with somebody_else(), watched() as warnings, socket_addresses(2) as sockets:
        for group in (WorkerThreads(port_addresses(2), Security(token=RIGHT_TOKEN)), WorkerThreads(sockets)):
            group.assert_end_well([group.join(rank) for rank in range(2)])
    assert warnings.containing(LISTENS) == []


def test_the_socket_of_a_worker_is_accessible_only_to_its_user(lonely: Waiting) -> None:
    assert stat.S_IMODE(Path(lonely.address.removeprefix("unix:")).stat().st_mode) == 0o600
    lonely.group.assert_end_well([lonely.first, lonely.group.join(1)])


SEES_MODE = """
import os, stat, sys
import grpc
from collectives.network import wire
from collectives.network.addresses import Address

def see(event, arguments):
    if event == "os.chmod":
        print(oct(stat.S_IMODE(os.stat(arguments[0]).st_mode)))

sys.addaudithook(see)
os.umask(0)
server = wire.open_server(
    Address.parse(sys.argv[1]), None, grpc.method_handlers_generic_handler("none", {}), wire.Room(1, 1)
)
print(oct(os.umask(0)))
"""


def test_the_socket_of_a_worker_was_never_accessible_to_others() -> None:
    with socket_addresses(1) as [address]:
        program = [sys.executable, "-c", SEES_MODE, address]
        done = subprocess.run(program, env=environ_with(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout.split() == ["0o600", "0o0"], done.stderr


def test_workers_that_listen_at_the_same_time_leave_the_umask_as_it_was() -> None:
    def listen(address: str) -> None:
        handler = grpc.method_handlers_generic_handler("none", {})
        open_server(Address.parse(address), None, handler, Room(1, 1)).stop(None)

    before = os.umask(0o022)
    try:
        with socket_addresses(100) as addresses, ThreadPoolExecutor(4) as threads:
            list(threads.map(listen, addresses))
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


SHRINKS_OPENLY = r"other users can connect to {}, and with on_failure='shrink' any of them could take the place"


@pytest.mark.parametrize(
    ("addresses", "ports"),
    [
        (["localhost:3737", "127.0.0.1:3738"], "localhost:3737, 127.0.0.1:3738"),
        (["unix:/tmp/one", "[::1]:3738"], r"\[::1\]:3738"),
        ([ELSEWHERE, "localhost:3737"], f"{ELSEWHERE}, localhost:3737"),
    ],
)
def test_workers_at_ports_go_on_without_a_lost_one_only_with_a_secret(addresses: list[str], ports: str) -> None:
    parsed = [Address.parse(text) for text in addresses]
    for open_to_all in (Security(), Security(allows_plaintext=True)):
        with pytest.raises(SecurityError, match=f"{SHRINKS_OPENLY.format(ports)} of a worker; set {TOKEN} to the same"):
            open_to_all.check_rejoining(parsed)
    Security(token=RIGHT_TOKEN).check_rejoining(parsed)
    Security(Certificates(Path("own.pem"), Path("own.key"), Path("all.pem"))).check_rejoining(parsed)
    Security().check_rejoining(parsed[:1])


def test_a_worker_that_any_user_could_replace_does_not_start() -> None:
    addresses = port_addresses(2)
    with pytest.raises(SecurityError, match=SHRINKS_OPENLY.format(", ".join(addresses))):
        WorkerThreads(addresses).connect(0, shrinks=True)
    with pytest.raises(OSError, match="refused"):
        Address.parse(addresses[0]).reach(1.0)
    with socket_addresses(2) as sockets:
        for group in (WorkerThreads(addresses, Security(token=RIGHT_TOKEN)), WorkerThreads(sockets)):
            group.assert_end_well([group.join(rank, shrinks=True) for rank in range(2)])


def test_a_resolved_local_name_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A different answer could send gradients elsewhere in plaintext."""
    (address,) = Security().check([Address.parse("localhost:3737")])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it is looked up again"))
    assert {endpoint.location[0] for endpoint in address.endpoints()} <= {"127.0.0.1", "::1"}
    assert address.is_loopback()


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_an_unclear_permission_is_refused(value: str) -> None:
    with pytest.raises(SecurityError, match=f"{INSECURE}='{value}'; use 1"):
        Security.from_environ({INSECURE: value})


@pytest.mark.parametrize("value", ["", "0"])
def test_plaintext_can_be_forbidden_explicitly(value: str) -> None:
    assert Security.from_environ({INSECURE: value}) == Security()


def own_addresses() -> list[str]:
    """Return addresses of this machine outside of its loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # nothing is sent
        except OSError as error:
            pytest.skip(f"this machine has no IPv4 address but that of its loopback interface: {error}")
        host = probe.getsockname()[0]
    return [f"{host}:{port}" for port in free_ports(2, host)]


# ---- certificates in files


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("right"), "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("wrong"), "stranger")


@pytest.fixture(scope="module")
def right(authority: Authority) -> Files:
    return authority.issue("right", ["localhost", "127.0.0.1", "::1"])


@pytest.mark.parametrize("named", [[CERTIFICATE], [KEY], [AUTHORITY], [CERTIFICATE, KEY], [KEY, AUTHORITY]])
def test_mutual_tls_needs_all_three_files(right: Files, named: Sequence[str]) -> None:
    missing = [name for name in TLS_VARIABLES if name not in named]
    with pytest.raises(SecurityError) as caught:
        Security.from_environ({name: right.environ[name] for name in named})
    verb = "is" if len(named) == 1 else "are"
    assert f"{', '.join(named)} {verb} set and {', '.join(missing)} not" in str(caught.value)


@pytest.mark.parametrize("name", TLS_VARIABLES)
def test_a_missing_file_is_named(right: Files, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environ(monkeypatch, {**right.environ, name: "/nowhere/at-all.pem"})
    with pytest.raises(SecurityError, match=f"{name}=/nowhere/at-all.pem is not a file"):
        connect(["localhost:3737", "localhost:3738"], 0)


@pytest.mark.parametrize("name", TLS_VARIABLES)
def test_an_invalid_certificate_file_is_named(
    right: Files, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n")
    set_environ(monkeypatch, {**right.environ, name: str(garbage)})
    with pytest.raises(SecurityError, match=f"{name}={garbage}"):
        connect(["localhost:3737", "localhost:3738"], 0)


def test_the_key_must_belong_to_the_certificate(
    authority: Authority, right: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = authority.issue("other", ["localhost"])
    set_environ(monkeypatch, {**right.environ, KEY: str(other.key)})
    with pytest.raises(SecurityError, match=f"{KEY}={other.key} are not a certificate and its key"):
        connect(["localhost:3737", "localhost:3738"], 0)


def set_environ(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_the_token_is_not_shown_with_the_settings() -> None:
    assert RIGHT_TOKEN not in repr(Security.from_environ({TOKEN: RIGHT_TOKEN}))


# ---- certificates of workers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "unix", "this machine's own"])
def test_workers_with_certificates_of_one_authority_meet(authority: Authority, right: Files, host: str) -> None:
    with socket_addresses(2) as sockets, watched() as warnings:
        files = right
        if host == "unix":
            addresses = sockets
        elif host == "this machine's own":
            addresses = own_addresses()
            files = authority.issue("own", [addresses[0].rpartition(":")[0]])
        else:
            addresses = port_addresses(2, host)
        group = WorkerThreads(addresses, Security.from_environ(files.environ))
        group.assert_end_well([group.join(rank) for rank in range(2)])
    assert [text for text in warnings.texts if " has waited " not in text] == []  # the machine may be busy


def test_a_token_and_certificates_may_be_combined(right: Files) -> None:
    group = WorkerThreads(port_addresses(3), Security.from_environ({**right.environ, TOKEN: RIGHT_TOKEN}))
    group.assert_end_well([group.join(rank) for rank in range(3)])


@in_a_job
@pytest.mark.complete
def test_processes_with_a_token_and_certificates_meet(right: Files) -> None:
    environ = {**right.environ, TOKEN: RIGHT_TOKEN}
    with running(Job(port_addresses(3), environ=environ), "rounds") as workers:
        assert_end_well(workers)
        assert not workers[0].containing("WARNING", without=" has waited ")


# ---- wrong workers while a right one waits


@dataclass(frozen=True)
class Waiting:
    """The first of two workers, which waits for the right second one.

    Attributes:
        group: Both workers, with their settings.
        warnings: The warnings of all workers in this process since the first one began.
    """

    group: WorkerThreads
    warnings: Warnings
    first: Future[Communicator]

    @property
    def address(self) -> str:
        """Return the address of the first worker."""
        return self.group.addresses[0]

    def assert_refuses(self, environ: Mapping[str, str], here: str, there: str = "") -> None:
        """Assert that a second worker with other settings ends with the words `here`; the first one logs `there`."""
        self._assert_refuses(here, there, security=Security.from_environ(environ))

    def assert_refuses_with(self, reason: str, **changes: Any) -> None:
        """Assert that a second worker with other arguments is refused."""
        self._assert_refuses(reason, reason, **changes)

    def _assert_refuses(self, here: str, there: str, **changes: Any) -> None:
        clock = FakeClock(SLOWEST_TICK_S if there else SLOW_TICK_S)
        second = self.group.join(1, clock=clock, **changes)
        if there:
            self.warnings.wait_for(1, f"rank 0 at {self.address}", there)
            clock.tick_s = SLOW_TICK_S
        with pytest.raises((PeerRefusedError, SecurityError)) as caught:
            second.result(LIMIT_S)
        error = str(caught.value)
        assert here in error
        if caught.type is PeerRefusedError:
            assert error.startswith("rank 1 at")
            assert f"rank 0 at {self.address}" in error
        assert not self.first.done()


SLOW_TICK_S = 0.001
"""With these ticks, the second for which a refused worker stays takes a fifth of a second."""
SLOWEST_TICK_S = 1e-5
"""With these ticks, a refused worker stays until the first worker has called it, on a busy machine, too."""
LONG_S = 1e6


@contextlib.contextmanager
def first_of(group: WorkerThreads) -> Iterator[Waiting]:
    """Provide the first of two workers, which waits for the second; a failed test ends the wait."""
    nobody = "no such file" if group.addresses[1].startswith("unix:") else "connection refused"
    with watched() as warnings:
        clock = FakeClock(tick_s=0.01)
        first = group.join(0, connect_timeout_s=LONG_S, clock=clock)
        words = f"rank 0 at {group.addresses[0]} has waited", f"for rank 1 at {group.addresses[1]} ({nobody}"
        warnings.wait_for(1, *words)  # it was there first, and knows
        clock.tick_s = SLOW_TICK_S
        try:
            yield Waiting(group, warnings, first)
        finally:
            clock.advance(2 * LONG_S)


def waiting_for_the_right_one(group: WorkerThreads) -> Iterator[Waiting]:
    """Provide a waiting worker, and assert at the end that the right second one can join."""
    with first_of(group) as waiting:
        yield waiting
        group.assert_end_well([waiting.first, group.join(1)])


@pytest.fixture(scope="module")
def with_certificates(right: Files) -> Iterator[Waiting]:
    yield from waiting_for_the_right_one(WorkerThreads(port_addresses(2), Security.from_environ(right.environ)))


@pytest.fixture(scope="module")
def with_token() -> Iterator[Waiting]:
    with socket_addresses(2) as addresses:
        yield from waiting_for_the_right_one(WorkerThreads(addresses, Security(token=RIGHT_TOKEN)))


@pytest.fixture(scope="module")
def without_token() -> Iterator[Waiting]:
    with socket_addresses(2) as addresses:
        yield from waiting_for_the_right_one(WorkerThreads(addresses))


NO_FIT = "certificates do not fit"


@pytest.mark.complete
@in_a_job
def test_a_process_of_another_authority_is_refused_by_a_slow_worker(right: Files, stranger: Authority) -> None:
    """The slow worker was there first, so the wrong one ends and does not wait for another process to take the
    place.
    """
    wrong = stranger.issue("hasty", ["localhost", "127.0.0.1"])
    job = Job(port_addresses(2), environ=right.environ)
    with disposed_of() as workers:
        slow = job.start("rounds", 0)
        workers.append(slow)
        slow.wait_for("has waited", f"for rank 1 at {job.addresses[1]} (connection refused)")  # it was there first
        slow.stop()
        workers.append(job.start("rounds", 1, *PATIENCE, environ=wrong.environ))
        workers[1].wait_for("WARNING", f"s for rank 0 at {job.addresses[0]}", "timed out")
        slow.resume()
        assert workers[1].end() == 1
        assert last_line(workers[1]).startswith("collectives.errors.PeerRefusedError: rank 1 at")
        workers.append(job.start("rounds", 1))
        assert_end_well([slow, workers[-1]])


HERE = ["localhost", "127.0.0.1"]
ELSEWHERE_REASON = "its certificate is for elsewhere.example, 192.0.2.7, and rank 1 is at 127.0.0.1"
WRONG_CERTIFICATES: dict[str, tuple[Callable[[Authority, Authority], Mapping[str, str]], str, str]] = {
    "another authority": (lambda ours, theirs: theirs.issue("stranger", HERE).environ, NO_FIT, NO_FIT),
    "another authority, and it trusts ours": (
        lambda ours, theirs: {**theirs.issue("knows-ours", HERE).environ, AUTHORITY: str(ours.path)},
        "certificate",
        "",
    ),
    "ours, and it trusts another authority": (
        lambda ours, theirs: {**ours.issue("trusts-others", HERE).environ, AUTHORITY: str(theirs.path)},
        "certificate",
        "",
    ),
    "not for clients": (lambda ours, theirs: ours.issue("server-only", HERE, [SERVER]).environ, "certificate", ""),
    "expired": (lambda ours, theirs: ours.issue("expired", HERE, is_expired=True).environ, "certificate", ""),
    # The called worker refuses this, and the caller learns of it; the caller would not accept it either.
    "for another host": (
        lambda ours, theirs: ours.issue("elsewhere", ["elsewhere.example", "192.0.2.7"]).environ,
        ELSEWHERE_REASON,
        ELSEWHERE_REASON,
    ),
}


@pytest.mark.parametrize("case", WRONG_CERTIFICATES)
def test_a_worker_with_a_wrong_certificate_is_refused(
    with_certificates: Waiting, authority: Authority, stranger: Authority, case: str
) -> None:
    environ, here, there = WRONG_CERTIFICATES[case]
    with_certificates.assert_refuses(environ(authority, stranger), here, there)


@pytest.mark.parametrize("method", ["control", "lane"])
def test_a_certificate_for_another_host_gives_no_right_to_a_free_rank(
    with_certificates: Waiting, authority: Authority, method: str
) -> None:
    wrong = authority.issue("elsewhere-too", ["elsewhere.example"])
    hello = good_hello(with_certificates.group.addresses, method).encode()
    code, details = answer_at(with_certificates.address, proven(hello, ""), method, files=wrong)
    assert code is grpc.StatusCode.PERMISSION_DENIED, details
    assert details.startswith("its certificate is for elsewhere.example, and rank 1 is at 127.0.0.1")


@in_a_job
def test_a_worker_without_certificate_is_refused(with_certificates: Waiting) -> None:
    job = Job(with_certificates.group.addresses, environ=dict.fromkeys(TLS_VARIABLES, ""))
    with disposed_of() as workers:
        workers.append(job.start("rounds", 1, *PATIENCE))
        workers[0].wait_for("WARNING", f"s for rank 0 at {job.addresses[0]} (")
        with_certificates.warnings.wait_for(1, f"rank 1 at {job.addresses[1]}", NO_FIT)
        assert workers[0].process.poll() is None


@pytest.mark.parametrize("token", ["another-token", ""], ids=["another", "none"])
def test_a_worker_with_the_wrong_token_is_refused(with_token: Waiting, token: str) -> None:
    reason = "its job token is not ours"
    with_token.assert_refuses({TOKEN: token} if token else {}, reason, reason)


def test_a_worker_with_a_token_does_not_join_workers_without(without_token: Waiting) -> None:
    without_token.assert_refuses({TOKEN: RIGHT_TOKEN}, "does not know our job token", "job token")


@pytest.mark.parametrize("change", ["description", "network", "addresses"])
def test_a_worker_of_another_cluster_is_refused(with_token: Waiting, change: str) -> None:
    """Its description, its costs for the choice of plans, or its addresses differ."""
    addresses = with_token.group.addresses
    value = {
        "description": "8 replicas",
        "network": Network(),
        "addresses": [*addresses, f"{addresses[0]}.more"],
    }[change]
    with_token.assert_refuses_with(f"its cluster is not ours, which is {', '.join(addresses)}", **{change: value})


# ---- strangers while a worker waits without a token


@pytest.fixture
def lonely() -> Iterator[Waiting]:
    """Provide the first of two workers, without token and certificates."""
    with socket_addresses(2) as addresses, first_of(WorkerThreads(addresses)) as waiting:
        yield waiting


def welcomed(channel: grpc.Channel, addresses: Sequence[str]) -> tuple[grpc.Future, str]:
    """Return the call of a stranger that a worker welcomes as rank 1, and the words of welcome."""
    hello = good_hello(addresses, program="rogue.py", user="eve", process=7, host="h1").encode()
    call = channel.stream_unary(CONTROL_METHOD).future(until(threading.Event()), metadata=proven(hello, ""))
    return call, str(dict(call.initial_metadata())[WELCOME])


def until(event: threading.Event) -> Iterator[bytes]:
    yield b""
    event.wait()


def test_a_first_hello_without_a_listener_does_not_keep_the_right_worker_away(lonely: Waiting) -> None:
    with channel_to(lonely.address) as channel:
        call, _ = welcomed(channel, lonely.group.addresses)
        second = lonely.group.join(1)
        lonely.warnings.wait_for(1, "sent a process away: rogue.py of eve, process 7 on h1 said hello as rank 1")
        assert call.exception(LIMIT_S) is not None
        lonely.group.assert_end_well([lonely.first, second])


def test_the_answer_to_a_stranger_does_not_admit_it_at_another_worker(lonely: Waiting) -> None:
    """A stranger that had asked worker 0 could otherwise add messages to its lanes at worker 1."""
    with channel_to(lonely.address) as channel:
        call, welcome = welcomed(channel, lonely.group.addresses)
        call.cancel()
    workers = [lonely.first, lonely.group.join(1)]
    lonely.group.assert_reduce(workers)
    for method, lane in (("control", CONTROL), ("lane", "all/1/1")):
        hello = good_hello(lonely.group.addresses, source=0, to=1, incarnation=welcome, lane=lane)
        code, details = answer_at(lonely.group.addresses[1], proven(hello.encode(), ""), method, [b"x" * 64])
        assert code is grpc.StatusCode.PERMISSION_DENIED, details
        assert "rank 0 is taken by another process" in details
    lonely.group.assert_end_well(workers)


def test_workers_of_two_programs_are_both_named(lonely: Waiting) -> None:
    """They may be two jobs at the same addresses."""
    with channel_to(lonely.address) as channel:
        call, _ = welcomed(channel, lonely.group.addresses)
        first, second = (f"rank {rank} at {lonely.group.addresses[rank]} is " for rank in range(2))
        lonely.warnings.wait_for(1, first, f"process {os.getpid()} on", f"{second}rogue.py of eve", "two programs")
        call.cancel()
    lonely.group.assert_end_well([lonely.first, lonely.group.join(1)])


def test_jobs_of_two_users_at_the_same_addresses_do_not_mix(lonely: Waiting) -> None:
    """One user has worker 0, the other one worker 1; both are named."""
    stranger = good_hello(lonely.group.addresses, user_id=4711, user="eve", program="other.py", process=7, host="h1")
    code, details = answer_at(lonely.address, proven(stranger.encode(), ""))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details.startswith("it is other.py of eve, process 7 on h1, and this worker is ")
    assert f", process {os.getpid()} on " in details
    assert f"take other ones, or set {TOKEN}" in details
    lonely.warnings.wait_for(1, "refused", "other.py of eve", "jobs of two users")
    lonely.group.assert_end_well([lonely.first, lonely.group.join(1)])


def test_a_proof_with_bytes_above_127_is_refused() -> None:
    with socket_addresses(2) as addresses:
        group = WorkerThreads(addresses, Security(token=RIGHT_TOKEN))
        with first_of(group) as waiting, http2.connected(waiting.address) as connection:
            hello = good_hello(addresses).encode()
            metadata = [(HELLO, hello), (PROOF, "\xe9" * 64)]
            connection.sendall(http2.opening() + http2.call(CONTROL_METHOD, metadata, http2.message(b"")))
            waiting.warnings.wait_for(1, "refused", "its job token is not ours")
            group.assert_end_well([waiting.first, group.join(1)])


@pytest.mark.complete
@in_a_job
def test_silent_connections_leave_room_for_the_right_worker() -> None:
    """They exceed the number of files that the worker may open, and all come before the right worker."""
    job = Job(port_addresses(2))
    with disposed_of() as workers, contextlib.ExitStack() as stack:
        workers.append(job.start("rounds", 0, prefix=["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh"]))
        until_listening(job.addresses[0])
        for _ in range(3 * FILES):
            stack.enter_context(http2.connected(job.addresses[0]))
        workers.append(job.start("rounds", 1))
        workers[1].wait_for("round 1 was right")
        assert_end_well(workers)


FILES = 150


# ---- strangers while a job runs


@dataclass(frozen=True)
class Running:
    """Two workers that reduce repeatedly."""

    job: Job
    workers: Sequence[Worker]
    token: str = ""


@pytest.fixture(scope="module")
def pair() -> Iterator[Running]:
    """Provide running workers with a token, and assert at the end that the job completes."""
    with socket_addresses(2) as addresses:
        job = Job(addresses, ["--pause-s", "0.05"], environ={TOKEN: RIGHT_TOKEN})
        with running(job, "rounds") as workers:
            for worker in workers:
                worker.wait_for("round 1 was right")
            yield Running(job, workers, RIGHT_TOKEN)
            assert_end_well(workers)


@pytest.fixture(scope="module")
def secured_pair(right: Files) -> Iterator[Running]:
    """Provide running workers with certificates, and assert at the end that the job completes."""
    job = Job(port_addresses(2, "localhost"), ["--pause-s", "0.05"], environ=right.environ)
    with running(job, "rounds") as workers:
        for worker in workers:
            worker.wait_for("round 1 was right")
        yield Running(job, workers)
        assert_end_well(workers)


METHODS = pytest.mark.parametrize("method", ["control", "lane"])


def assert_refused(pair: Running, answer: tuple[grpc.StatusCode, str], reason: str) -> None:
    """Assert that the stranger learns the reason, the worker logs it, and the job goes on."""
    code, details = answer
    assert code is grpc.StatusCode.PERMISSION_DENIED, details
    assert reason in details
    pair.workers[0].wait_for("WARNING", f"rank 0 at {pair.job.addresses[0]} refused", reason)
    assert_still_right(pair.workers)


@in_a_job
@METHODS
def test_a_stream_without_hello_is_refused(pair: Running, method: str) -> None:
    assert_refused(pair, answer_at(pair.job.addresses[0], (), method), "it sent no hello")


@in_a_job
@METHODS
@pytest.mark.parametrize("token", ["", "another-token", RIGHT_TOKEN[:-1], f"{RIGHT_TOKEN} "])
def test_a_stream_with_the_wrong_token_is_refused(pair: Running, method: str, token: str) -> None:
    hello = good_hello(pair.job.addresses, method).encode()
    answer = answer_at(pair.job.addresses[0], proven(hello, token), method, [b"x" * 64])
    assert_refused(pair, answer, "its job token is not ours")


@in_a_job
@METHODS
def test_a_proof_holds_for_one_hello_only(pair: Running, method: str) -> None:
    hello = good_hello(pair.job.addresses, method)
    (_, proof) = proven(hello.encode(), pair.token)
    other = good_hello(pair.job.addresses, method, incarnation="fedcba9876543210").encode()
    answer = answer_at(pair.job.addresses[0], ((proven(other, "")[0]), proof), method)
    assert_refused(pair, answer, "its job token is not ours")


@in_a_job
@METHODS
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 0}, "it speaks version 0, but we speak 4"),
        ({"protocol": 5}, "it speaks version 5, but we speak 4"),
        ({"cluster": "0" * 16}, "its cluster is not ours"),
        ({"source": 0}, "it is rank 0 and looks for rank 0, but this is rank 0"),
        ({"source": 2}, "it is rank 2 and looks for rank 0, but this is rank 0"),
        ({"source": -1}, "it is rank -1 and looks for rank 0, but this is rank 0"),
        ({"to": 1}, "it is rank 1 and looks for rank 1, but this is rank 0"),
        ({}, "rank 1 is taken by another process"),
        ({"incarnation": ""}, "rank 1 is taken by another process"),
    ],
    ids=str,
)
def test_a_stream_of_the_wrong_worker_is_refused(
    pair: Running, method: str, changes: Mapping[str, object], reason: str
) -> None:
    hello = good_hello(pair.job.addresses, method, **changes).encode()
    answer = answer_at(pair.job.addresses[0], proven(hello, pair.token), method, [b"x" * 64])
    assert_refused(pair, answer, reason)


@in_a_job
@METHODS
def test_a_hello_with_unknown_keys_is_refused(pair: Running, method: str) -> None:
    hello = json.dumps({**asdict(good_hello(pair.job.addresses, method)), "is_admin": True})
    answer = answer_at(pair.job.addresses[0], proven(hello, pair.token), method)
    assert_refused(pair, answer, "its hello cannot be read")


@in_a_job
@pytest.mark.parametrize("method", ["/popdist.Collectives/Anything", "/grpc.health.v1.Health/Check", "/"])
def test_an_unknown_method_is_not_implemented(pair: Running, method: str) -> None:
    code, _ = answer_at(pair.job.addresses[0], (), method)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert_still_right(pair.workers)


@in_a_job
def test_a_token_that_is_invalid_utf_8_is_refused_at_the_start() -> None:
    with pytest.raises(SecurityError, match=f"{TOKEN} is not valid UTF-8; give it a secret of letters and digits"):
        Security.from_environ({TOKEN: os.fsdecode(b"secret\xff")})


def test_the_token_never_appears_in_the_output(pair: Running) -> None:
    assert_still_right(pair.workers)
    assert not any(RIGHT_TOKEN in worker.text for worker in pair.workers)


@in_a_job
def test_clients_without_valid_certificates_reach_nothing(
    secured_pair: Running, authority: Authority, right: Files, stranger: Authority
) -> None:
    address = secured_pair.job.addresses[0]
    wrong = stranger.issue("wrong-client", ["localhost"])
    unknown = Files(wrong.certificate, wrong.key, authority.path)
    server_only = authority.issue("server-only-client", ["localhost"], [SERVER])
    expired = authority.issue("expired-client", ["localhost"], is_expired=True)
    hello = proven(good_hello(secured_pair.job.addresses).encode(), "")
    answers = {
        "plaintext": answer_at(address, hello),
        "no certificate": answer_at(address, hello, files=right, presents_certificate=False),
        "another authority": answer_at(address, hello, files=unknown),
        "a server's certificate": answer_at(address, hello, files=server_only),
        "expired": answer_at(address, hello, files=expired),
    }
    assert {name: code for name, (code, _) in answers.items()} == dict.fromkeys(answers, grpc.StatusCode.UNAVAILABLE)
    assert_still_right(secured_pair.workers)


@pytest.mark.complete
@in_a_job
def test_a_valid_certificate_gives_no_right_to_a_taken_rank(secured_pair: Running, right: Files) -> None:
    hello = good_hello(secured_pair.job.addresses).encode()
    answer = answer_at(secured_pair.job.addresses[0], proven(hello, ""), files=right)
    assert_refused(secured_pair, answer, "rank 1 is taken by another process")


class Reset(Endpoint):
    """An endpoint whose connections the other side has reset at once."""

    def connect(self, timeout_s: float) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            connection = socket.create_connection(server.getsockname(), timeout_s)
            other, _ = server.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        poll = select.poll()
        poll.register(connection, select.POLLHUP)
        poll.poll()
        return connection


def test_a_connection_reset_before_the_handshake_is_closed() -> None:
    """A ResourceWarning about an open connection would fail this test."""
    with pytest.raises(ConnectionError):
        Reset(socket.AF_INET, "").shake_hands(LIMIT_S, ssl.create_default_context(), "localhost")
    gc.collect()


def test_a_handshake_sent_byte_by_byte_is_given_up() -> None:
    """Each byte comes in time, but all of them would take a quarter of an hour."""

    def trickle() -> None:
        other, _ = server.accept()
        with other, contextlib.suppress(OSError):  # the client has left
            other.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KiB
            while True:
                other.sendall(b"\x00")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        trickling = threading.Thread(target=trickle)
        trickling.start()
        with pytest.raises(TimeoutError):
            Endpoint(socket.AF_INET, server.getsockname()).shake_hands(0.5, ssl.create_default_context(), "localhost")
        trickling.join()
