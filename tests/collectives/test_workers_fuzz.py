"""Random input from the network, which must not end, stop or bloat a worker; messages of an untrusted peer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import http2
import numpy as np
import pytest
from complete_tier import is_complete
from grpc_jobs import socket_addresses
from mpi_jobs import in_a_job
from strangers import answer_at, answer_to, channel_to, good_hello, proven
from workers import (
    LIMIT_S,
    Job,
    Worker,
    assert_end_well,
    assert_still_right,
    disposed_of,
    last_line,
    mebibytes_of,
    port_addresses,
    running,
    threads_of,
    until_few_threads,
    until_listening,
)

from collectives import Limits
from collectives.calls import Call
from collectives.network.addresses import Address
from collectives.network.hello import PROTOCOL, Hello
from collectives.network.node import Node
from collectives.network.security import Security
from collectives.network.wire import CONTROL_METHOD, HELLO, LANE_METHOD, MESSAGE_BYTES

pytestmark = pytest.mark.long

MEBIBYTES = 64
THREADS = 32
LINES = 300
LINE_LENGTH = 9000
FOUR_GIB = (1 << 32) - 1
BILLION_BYTES = b"\x7f" + b"\xff" * 4 + b"\x04"  # the announced length of a string in a header field
ORDINARY_LINE = re.compile(r"(WARNING rank \d at |begins|has met|round 1 was|report: |all \d+ rounds)")

# If many streams end at once, gRPC may see the reset of a stream before its reason.
REFUSALS = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.CANCELLED}

ROUNDS = pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.complete) for turn in range(1, 4))])


def chance_of(seed: int, turn: int) -> random.Random:
    """Return the random numbers of one turn of a test."""
    return random.Random(f"{seed} {turn}")


@dataclass(frozen=True)
class Target:
    """A pair of workers that reduce repeatedly; the first one gets the random input.

    Attributes:
        job: The job of both workers.
        workers: Both workers.
        is_measured: Whether the memory and the threads of the first one are checked, in the complete tier.
    """

    job: Job
    workers: Sequence[Worker]
    is_measured: bool

    @property
    def address(self) -> str:
        return self.job.addresses[0]

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Assert that after the block the sums are right and the worker has not grown."""
        victim = self.workers[0]
        mebibytes, threads = mebibytes_of(victim), threads_of(victim)
        yield
        assert_still_right(self.workers)
        if self.is_measured:
            assert mebibytes_of(victim) <= mebibytes + MEBIBYTES
            until_few_threads(victim, threads + THREADS)


@pytest.fixture(scope="module")
def is_measured(pytestconfig: pytest.Config) -> bool:
    """Return whether the memory of the workers is checked, which other tests on the machine may change."""
    return is_complete(pytestconfig, Path(__file__))


@pytest.fixture(scope="module")
def target(is_measured: bool) -> Iterator[Target]:
    """Provide running workers, and assert at the end that the job completes with a short log without foreign lines."""
    job = Job(port_addresses(2), ["--pause-s", "0.2"])  # without one the workers take two cores for a minute
    with running(job, "rounds") as workers:
        for worker in workers:
            worker.wait_for("round 1 was right")
        before = mebibytes_of(workers[0])
        yield Target(job, workers, is_measured)
        assert not is_measured or mebibytes_of(workers[0]) <= before + MEBIBYTES
        assert_end_well(workers)
        lines = [line for line in workers[0].lines if not line.startswith("report: ")]
        assert [line for line in lines if not ORDINARY_LINE.match(line)][:5] == []
        assert len(lines) <= LINES
        assert max(map(len, lines)) <= LINE_LENGTH


# ---- bytes


@in_a_job
@ROUNDS
def test_random_bytes_do_no_harm(target: Target, seed: int, turn: int) -> None:
    chance = chance_of(seed, turn)
    with target.unharmed():
        for _ in range(30):
            http2.throw(target.address, chance.randbytes(chance.choice([1, 24, 1000, 100_000])))


@in_a_job
@ROUNDS
def test_random_frames_do_no_harm(target: Target, seed: int, turn: int) -> None:
    chance = chance_of(seed, turn)
    with target.unharmed():
        for _ in range(30):
            http2.throw(target.address, http2.opening() + http2.random_frames(chance, 50))


@in_a_job
@ROUNDS
def test_a_valid_call_with_flipped_bits_does_no_harm(target: Target, seed: int, turn: int) -> None:
    chance = chance_of(seed, turn)
    good = good_call(target)
    with target.unharmed():
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(chance.choice([1, 2, 10])):
                bad[chance.randrange(24, len(bad))] ^= 1 << chance.randrange(8)
            http2.throw(target.address, bytes(bad))


@in_a_job
def test_a_truncated_valid_call_does_no_harm(target: Target) -> None:
    good = good_call(target)
    with target.unharmed():
        for length in range(0, len(good), 7):
            http2.throw(target.address, good[:length])


def good_call(target: Target) -> bytes:
    hello = good_hello(target.job.addresses, "lane").encode()
    return http2.opening() + http2.call(LANE_METHOD, [(HELLO, hello)], http2.message(b"x" * 64))


@in_a_job
def test_other_protocols_do_no_harm(target: Target) -> None:
    with target.unharmed():
        for words in (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.9\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(508),  # the beginning of TLS
            b"\0" * 1000,
            b"\n" * 1000,
        ):
            http2.throw(target.address, words)


ABSURD = {
    "a frame of 16 MiB": http2.frame(http2.DATA, 0, 1, b"x", http2.LONGEST_FRAME),
    "settings of 16 MiB": http2.frame(http2.SETTINGS, 0, 0, b"", http2.LONGEST_FRAME),
    "header fields of 16 MiB": http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"", http2.LONGEST_FRAME),
    "a name of a billion bytes": http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\0" + BILLION_BYTES),
    "a value of a billion bytes": http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\0\1a" + BILLION_BYTES),
    "a table of a billion bytes": http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x3f" + b"\xff" * 4 + b"\x03"),
    "windows of 2 GiB": http2.frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 2,
    "a message of 4 GiB": http2.call(LANE_METHOD, [], http2.message(b"x", FOUR_GIB)),
    "compressed nothing of 4 GiB": http2.call(LANE_METHOD, [], b"\1\xff\xff\xff\xff"),
}


@in_a_job
@pytest.mark.parametrize("words", ABSURD.values(), ids=list(ABSURD))
def test_absurd_lengths_do_no_harm(target: Target, words: bytes) -> None:
    with target.unharmed(), contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(http2.connected(target.address))
            connection.sendall(http2.opening() + words)
        assert_still_right(target.workers)


FLOODS = {
    "settings": http2.frame(http2.SETTINGS, 0, 0, bytes([0, 4, 0, 1, 0, 0])) * 5000,
    "pings": http2.frame(http2.PING, 0, 0, bytes(8)) * 5000,
    "resets": b"".join(
        http2.call(LANE_METHOD, stream=stream) + http2.frame(http2.RST_STREAM, 0, stream, bytes(4))
        for stream in range(1, 4001, 2)
    ),
    "calls": b"".join(http2.call(LANE_METHOD, stream=stream) for stream in range(1, 4001, 2)),
    "header fields without end": http2.frame(http2.HEADERS, 0, 1, http2.request(LANE_METHOD))
    + http2.frame(http2.CONTINUATION, 0, 1, http2.field("x" * 100, "y" * 8000)) * 1000,
    "many header fields": http2.call(LANE_METHOD, [(f"x-{number}", "y") for number in range(1000)]),
}


@in_a_job
@pytest.mark.parametrize("words", FLOODS.values(), ids=list(FLOODS))
def test_floods_do_no_harm(target: Target, words: bytes) -> None:
    with target.unharmed():
        http2.throw(target.address, http2.opening() + words)


# ---- connections


@in_a_job
def test_a_port_scanner_does_no_harm(target: Target) -> None:
    with target.unharmed():
        for _ in range(500):
            http2.connected(target.address).close()


@in_a_job
def test_nearly_silent_connections_do_no_harm(target: Target) -> None:
    good = good_call(target)
    with target.unharmed(), contextlib.ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(http2.connected(target.address))
            connection.sendall(good[: number * 3])
        assert_still_right(target.workers)


@in_a_job
def test_many_streams_at_once_do_no_harm(target: Target) -> None:
    with target.unharmed(), channel_to(target.address) as channel:
        calls = [channel.stream_unary(LANE_METHOD).future(iter([b"x" * 100]), timeout=LIMIT_S) for _ in range(300)]
        codes = {call.exception(LIMIT_S).code() for call in calls}
    assert codes <= REFUSALS | {grpc.StatusCode.RESOURCE_EXHAUSTED}


# ---- hellos


def hello_with(**changes: object) -> str:
    return json.dumps({**asdict(good_hello(["unix:/a", "unix:/b"])), **changes})


HELLOS = {
    "nothing": "",
    "no JSON": "hello?",
    "a number": "7",
    "a list": "[1, 2, 3]",
    "a text": '"popdist"',
    "an empty object": "{}",
    "deep lists": "[" * 3000,
    "deep objects": '{"a":' * 1000,
    "not a number": hello_with(source=float("nan")),
    "a number with 4000 digits": hello_with(protocol=0).replace('"protocol": 0', f'"protocol": {"9" * 4000}'),
    "a number with 5000 digits": hello_with(protocol=0).replace('"protocol": 0', f'"protocol": {"9" * 5000}'),
    "a fraction": hello_with(source=1.0),
    "a truth": hello_with(source=True),
    "a huge rank": hello_with(source=1 << 200),
    "a negative rank": hello_with(source=-(1 << 200)),
    "a rank that is a text": hello_with(source="1"),
    "a rank that is a list": hello_with(source=[1]),
    "no incarnation": hello_with(incarnation=None),
    "a lane of slashes": hello_with(lane="/" * 1000),
    "a lane of dots": hello_with(lane="../../../etc/passwd"),
    "a lane of zeros": hello_with(lane="\0" * 100),
    "a long lane": hello_with(lane="x" * 7000),
    "unknown keys": hello_with(**{"x" * 3000: 1}),
    "an unpaired surrogate": hello_with(**{"\ud800": 1}),
    "an unpaired surrogate in a text": hello_with(cluster="\ud800"),
    "lines of a log": hello_with(**{"\nWARNING all is well\n": 1}),
    "colours of a terminal": hello_with(**{"\x1b[2J": 1}),
    "formats": hello_with(**{"%s%s%n{0}": 1}),
}


@in_a_job
@pytest.mark.parametrize("method", ["control", "lane"])
def test_an_invalid_hello_is_refused(target: Target, method: str, subtests: pytest.Subtests) -> None:
    with channel_to(target.address) as channel:
        for kind, hello in HELLOS.items():
            with subtests.test(hello=kind):
                code, details = answer_to(channel, [(HELLO, hello)], method, [b"x" * 100])
                assert code is grpc.StatusCode.PERMISSION_DENIED, details
                assert details
    assert target.workers[0].process.poll() is None


@in_a_job
def test_a_hello_that_is_too_long_is_refused(target: Target) -> None:
    refusals = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    with target.unharmed():
        for length in (8000, 16_000, 100_000, 900_000):
            code, details = answer_at(target.address, [(HELLO, "[" * length)])
            assert code in refusals, (length, details)


@in_a_job
def test_invalid_metadata_are_refused(target: Target) -> None:
    metadata: list[list[tuple[str, str | bytes]]] = [
        [(f"{HELLO}-bin", bytes(range(256)))],
        [(HELLO, hello_with()), (HELLO, "{}")],
        [(HELLO, hello_with()), ("popdist-proof", "x" * 5000)],
        [(f"popdist-{number}", "x") for number in range(100)],
        [("grpc-timeout", "99999999999H"), (HELLO, "{}")],
    ]
    with target.unharmed():
        for pairs in metadata:
            code, _ = answer_at(target.address, pairs)
            assert code is not grpc.StatusCode.OK


@in_a_job
def test_many_reasons_give_few_log_lines(target: Target) -> None:
    with target.unharmed(), channel_to(target.address) as channel:
        for number in range(150):
            hello = good_hello(target.job.addresses, protocol=1000 + number).encode()
            code, _ = answer_to(channel, proven(hello, ""))
            assert code is grpc.StatusCode.PERMISSION_DENIED


# ---- an impostor in the place of an awaited worker


@pytest.fixture
def lonely() -> Iterator[tuple[Job, Worker]]:
    """Provide the first of two workers, which waits for the second."""
    with socket_addresses(2) as addresses, disposed_of() as workers:
        job = Job(addresses)
        workers.append(job.start("rounds", 0, "--timeout-s", "100"))
        until_listening(addresses[0])
        yield job, workers[0]


@in_a_job
@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 1000,
        *(
            pytest.param(words, marks=pytest.mark.complete)
            for words in (
                http2.message(b"x", FOUR_GIB),
                http2.message(b"x", MESSAGE_BYTES * 2) + b"x" * MESSAGE_BYTES,
                b"\1" + http2.message(b"x" * 1000)[1:],
                b"\0\0",
            )
        ),
    ],
    ids=["garbage", "4 GiB announced", "4 MiB", "compressed", "half a prefix"],
)
def test_a_first_stream_with_garbage_does_not_keep_the_right_worker_away(
    lonely: tuple[Job, Worker], is_measured: bool, words: bytes
) -> None:
    job, worker = lonely
    before = mebibytes_of(worker)
    hello = good_hello(job.addresses).encode()
    frames = [words[start : start + 16_000] for start in range(0, len(words), 16_000)]
    http2.throw(job.addresses[0], http2.opening() + http2.call(CONTROL_METHOD, [(HELLO, hello)], *frames))
    right = job.start("rounds", 1)
    with disposed_of() as others:
        others.append(right)
        right.wait_for("round 1 was right")
        assert not is_measured or mebibytes_of(worker) <= before + MEBIBYTES
        assert_end_well([worker, right])


@in_a_job
def test_a_worker_that_leaves_at_once_frees_its_rank(lonely: tuple[Job, Worker]) -> None:
    job, worker = lonely
    for number in range(100):
        hello = good_hello(job.addresses, incarnation=str(number)).encode()
        http2.throw(job.addresses[0], http2.opening() + http2.call(CONTROL_METHOD, [(HELLO, hello)]))
    with disposed_of() as others:
        others.append(job.start("rounds", 1))
        others[0].wait_for("round 1 was right")
        assert_end_well([worker, *others])


@dataclass(frozen=True)
class Impostor:
    """A stranger that the worker takes for its peer."""

    node: Node
    worker: Worker
    channel: grpc.Channel
    mebibytes: float  # of the worker, before the first message
    is_measured: bool
    calls: list[grpc.Future] = field(default_factory=list)  # gRPC cancels unreferenced calls

    def begin(self, lane: str, messages: Iterator[bytes]) -> grpc.Future:
        """Send messages on a lane, without a limit on this side."""
        peer = self.node.peers[0]
        words = Hello(PROTOCOL, self.node.cluster, 1, 0, peer.drawn, lane, peer.claim.incarnation, user_id=os.getuid())
        hello = words.encode()
        call = self.channel.stream_unary(LANE_METHOD).future(messages, metadata=proven(hello, ""), timeout=LIMIT_S)
        self.calls.append(call)
        return call

    def assert_has_not_grown(self, mebibytes: float = MEBIBYTES) -> None:
        """Assert that the worker has not allocated much memory for the messages."""
        if self.is_measured:
            with contextlib.suppress(FileNotFoundError, KeyError):  # it has ended already
                assert mebibytes_of(self.worker) <= self.mebibytes + mebibytes

    def answer(self, lane: str, *messages: bytes) -> grpc.StatusCode:
        """Return the status at the end of the worker's stream."""
        call = self.begin(lane, iter(messages))
        call.exception(LIMIT_S)
        return call.code()


@pytest.fixture
def impostor(lonely: tuple[Job, Worker], is_measured: bool) -> Iterator[Impostor]:
    """Provide an impostor that joins as a worker; the worker waits for it in its first all-reduce."""
    job, worker = lonely
    addresses = [Address.parse(address) for address in job.addresses]
    names = [f"rank {rank} at {address.text}" for rank, address in enumerate(addresses)]
    node = Node(addresses, names, 1, "", Security(), Limits(connect_timeout_s=LIMIT_S))
    node.join()
    node.inbox(0, EXCHANGE_LANE).close()  # it ignores messages
    worker.wait_for("has met the others")
    with channel_to(job.addresses[0]) as channel:
        yield Impostor(node, worker, channel, mebibytes_of(worker), is_measured)
    worker.dispose()
    node.leave()


EXCHANGE_LANE = "all/0/0"
FIRST_CALL = Call("all_reduce", "weights", "sum", "float32", (1004,))


def header(fingerprint: int, count: int, nbytes: int) -> bytes:
    """Return the beginning of the message of an exchange."""
    return np.array([fingerprint, count, nbytes, 0, 0, 0, 0, 0], np.uint64).tobytes()


def assert_ends_because_of_its_peer(impostor: Impostor, *words: str) -> None:
    """Assert that the worker ends with an error that names the peer, and has allocated nothing for its announcement."""
    impostor.worker.wait_for("Error: ")
    impostor.assert_has_not_grown()
    assert impostor.worker.end() == 1
    error = last_line(impostor.worker)
    assert error.startswith("collectives.errors."), impostor.worker.text
    assert all(word in error for word in ("rank 1", "all_reduce 'weights'", *words)), error


@in_a_job
def test_a_peer_that_sends_more_than_expected_is_lost(impostor: Impostor) -> None:
    impostor.answer(EXCHANGE_LANE, bytes(MESSAGE_BYTES))
    assert_ends_because_of_its_peer(impostor, "PeerLostError", "is lost", f"{MESSAGE_BYTES} bytes")


@in_a_job
def test_messages_of_a_peer_have_a_size_limit(impostor: Impostor) -> None:
    for lane, size in (("all/0/1", MESSAGE_BYTES * 2), ("all/0/2", MESSAGE_BYTES * 50)):
        assert impostor.answer(lane, bytes(size)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    impostor.assert_has_not_grown()
    assert impostor.worker.process.poll() is None


@in_a_job
@pytest.mark.complete
def test_unclaimed_messages_stay_with_their_sender(impostor: Impostor) -> None:
    """The peer sends 1 GiB on unused lanes: a few messages of each are kept, the others wait."""
    large = bytes(MESSAGE_BYTES)
    calls = [impostor.begin(f"all/0/{lane}", (large for _ in range(256))) for lane in (1, 2)]
    for call in calls:
        with pytest.raises(grpc.FutureTimeoutError):
            call.exception(1.0)
    impostor.assert_has_not_grown(2 * MEBIBYTES)
    for call in calls:
        call.cancel()


@in_a_job
@pytest.mark.complete
def test_the_number_of_lanes_of_a_peer_is_limited(impostor: Impostor) -> None:
    refused: list[grpc.Future] = []
    for start in range(0, 1100, 100):
        calls = [impostor.begin(f"x{number}/0/0", iter([])) for number in range(start, start + 100)]
        refused += [call for call in calls if call.exception(LIMIT_S) is not None]
    assert len(refused) == 1100 - 1024
    assert {call.code() for call in refused} <= REFUSALS
    impostor.assert_has_not_grown()
    impostor.worker.wait_for("WARNING", "it opens too many lanes")


@in_a_job
@pytest.mark.parametrize(
    ("lane", "reason"),
    [
        *((lane, "there is no such lane") for lane in ("x", "all/0/3", "all/0/-1", "all/0/00", "all/0/")),
        (f"all+{'1' * 4096}/0/0", "lane has 4104 characters"),
    ],
    ids=["no channel", "fourth", "negative", "two digits", "none", "long"],
)
def test_an_unknown_lane_is_refused(impostor: Impostor, lane: str, reason: str) -> None:
    assert impostor.answer(lane, b"x") in REFUSALS
    impostor.worker.wait_for("WARNING", reason)


@in_a_job
def test_a_lane_has_one_stream(impostor: Impostor) -> None:
    """The messages of two streams would mix."""
    may_end = threading.Event()
    calls = [impostor.begin("all/0/1", until(may_end)) for _ in range(2)]
    impostor.worker.wait_for("WARNING", "rank 1 has begun that lane already")
    may_end.set()
    assert sorted(call.exception(LIMIT_S) is None for call in calls) == [False, True]
    assert impostor.answer("all/0/1", b"x") in REFUSALS


def until(event: threading.Event) -> Iterator[bytes]:
    yield b"x"
    event.wait()


@in_a_job
def test_a_lane_requires_the_nonce_of_its_receiver(impostor: Impostor) -> None:
    """The sender's nonce alone, which sufficed in earlier versions, is refused; the receiver's nonce is required,
    too.
    """
    peer = impostor.node.peers[0]
    for heard in ("", peer.drawn, "0" * 32):
        hello = Hello(PROTOCOL, impostor.node.cluster, 1, 0, peer.drawn, "all/0/1", heard, user_id=os.getuid())
        code, _ = answer_to(impostor.channel, proven(hello.encode(), ""), "lane", [b"x"])
        assert code in REFUSALS
    impostor.worker.wait_for("WARNING", "rank 1 is taken by another process")


@in_a_job
@pytest.mark.parametrize(
    ("count", "nbytes"),
    [
        (2, 8032),
        (1 << 40, 1004),
        *(pytest.param(*case, marks=pytest.mark.complete) for case in ((0, 0), (1 << 20, 8032), ((1 << 64) - 1, 0))),
    ],
)
def test_absurd_numbers_of_a_peer_end_the_collective(impostor: Impostor, count: int, nbytes: int) -> None:
    """The peer sends a truncated contribution, or more contributions than this rank could ever hold."""
    impostor.begin(EXCHANGE_LANE, iter([header(FIRST_CALL.fingerprint, count, nbytes)]))
    assert_ends_because_of_its_peer(impostor)


@in_a_job
def test_a_peer_whose_messages_end_too_early_is_lost(impostor: Impostor) -> None:
    impostor.begin(EXCHANGE_LANE, iter([header(FIRST_CALL.fingerprint, 1, 1004 * 4) + bytes(100)]))
    assert_ends_because_of_its_peer(impostor)


@pytest.mark.complete
@in_a_job
@ROUNDS
def test_a_peer_with_an_invalid_call_gives_an_error(impostor: Impostor, seed: int, turn: int) -> None:
    """Random bytes take the place of the description of a call, and of its text."""
    chance = chance_of(seed, turn)
    garbage = [chance.randbytes(64)]
    text = header(Call("message").fingerprint, 700, 0)
    pieces = [header(Call("message").fingerprint, 1, 512) + chance.randbytes(512) for _ in range(2)]
    impostor.begin(EXCHANGE_LANE, iter([*garbage, text, *pieces]))
    assert_ends_because_of_its_peer(impostor)
