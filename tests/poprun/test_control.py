"""The socket at which agents report: admission of agents, their messages, and the orders to them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import struct

import pytest
from job_scripts import (
    ASK,
    CLOSED,
    EXAMINE,
    EXAMINED,
    LOST,
    NOTICED,
    ORPHANED,
    PASS_ON,
    RELEASE,
    STOP,
    TOLD,
    WANT_ACTIVE,
)

from popdist.records.progress import PAGE_BYTES, Made, ProgressRecord, State
from poprun.agent.guard import NEW_PAGE
from poprun.ipc import wire
from poprun.ipc.facts import Ending, EndKind
from poprun.ipc.sockets import connect, open_socket
from poprun.supervisor.control import InputWanted, read_reports
from poprun.supervisor.job_events import (
    AgentOrder,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    OutputPiece,
    ProgressCame,
)
from poprun.supervisor.reception import (
    GREETING_LIMIT_S,
    MOST_STRANGERS,
    PAUSE_S,
    Member,
    Reception,
    strangers_to_leave,
)


@pytest.fixture
def reception():
    reception = Reception()
    yield reception
    reception.close()


def name_of(reception: Reception) -> str:
    scheme, _, name = reception.contact.split()[0].partition(":")
    assert scheme == "unix"
    return name


def test_an_agent_with_the_token_is_admitted(reception):
    token = bytes.fromhex(reception.contact.split()[1])
    with connect(name_of(reception)) as agent:
        member = reception.accept(0.0)
        agent.sendall(wire.pack_hello(1, 77, 1.5, token, "node0"))
        [(kind, content)] = member.receive()
        assert (kind, member.meet(content, 2), member.index) == (wire.HELLO, (77, "node0"), 1)
        member.close()


def test_an_agent_with_a_wrong_token_is_rejected(reception):
    with connect(name_of(reception)) as stranger:
        member = reception.accept(0.0)
        stranger.sendall(wire.pack_hello(1, 77, 1.5, bytes(16), "node0"))
        [(_, content)] = member.receive()
        assert member.meet(content, 2) is None
        assert not member.is_open
        member.close()


def test_a_closed_reception_admits_nobody(reception):
    name = name_of(reception)
    reception.close()
    with pytest.raises(ConnectionRefusedError):
        connect(name)


def test_a_caller_that_hangs_up_at_once_does_no_harm(reception):
    connect(name_of(reception)).close()
    member = reception.accept(0.0)
    assert member.receive() == []
    assert not member.is_open
    member.close()
    assert reception.accept(0.0) is None  # nobody is there
    assert not reception.shortage


def test_a_shortage_of_descriptors_delays_admission_by_a_pause(reception):
    with connect(name_of(reception)):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            assert reception.accept(10.0) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert reception.shortage == os.strerror(errno.EMFILE)
        assert not reception.is_ready(10.0)
        assert reception.is_ready(10.0 + PAUSE_S)
        member = reception.accept(11.0)
        assert member is not None
        member.close()
        assert not reception.shortage


class TestStrangers:
    @pytest.fixture
    def members(self):
        """Return an identified member and 100 unidentified ones, in the order of their calls."""
        pairs = [socket.socketpair() for _ in range(101)]
        members = [Member(ours, bytes(16), shares_clock=True) for ours, _ in pairs]
        for at_s, member in enumerate(members):
            member.called_at_s = float(at_s)
        members[0].index = 0
        yield members
        for each in (*members, *(theirs for _, theirs in pairs)):
            each.close()

    def test_unidentified_callers_are_dropped_after_the_greeting_limit(self, members):
        assert strangers_to_leave(members[:3], 2, GREETING_LIMIT_S + 0.9) == []
        assert strangers_to_leave(members[:3], 2, GREETING_LIMIT_S + 1.0) == [members[1]]
        assert strangers_to_leave(members[:3], 2, GREETING_LIMIT_S + 2.0) == members[1:3]

    def test_the_oldest_unidentified_callers_make_room_for_new_ones(self, members):
        assert strangers_to_leave(members, 2, 0.0) == members[1 : 101 - MOST_STRANGERS - 2]
        assert strangers_to_leave(members[: 1 + MOST_STRANGERS + 2], 2, 0.0) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
class TestAnotherUser:
    @pytest.fixture
    def nobody(self):
        os.seteuid(65534)
        yield
        os.seteuid(0)

    def test_another_user_is_rejected(self, reception, nobody):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name_of(reception)}")
            os.seteuid(0)
            assert reception.accept(0.0) is None
            assert stranger.recv(1) == b""

    def test_the_socket_of_another_user_is_not_taken_for_popruns(self, nobody):
        listening, name = open_socket()
        listening.listen()
        os.seteuid(0)
        with listening, pytest.raises(ConnectionRefusedError, match="another user's"):
            connect(name)


TOKEN = bytes(16)
HELLO = wire.pack_hello(0, 77, 1.5, TOKEN, "node0")


@pytest.fixture
def pair():
    """Return the agent's end of the connection of the only instance, and poprun's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, Member(ours, TOKEN, shares_clock=True)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (wire.pack(wire.STDOUT, b"out\n"), OutputPiece(0, 1, b"out\n")),
        (wire.pack(wire.STDERR, b"err\n"), OutputPiece(0, 2, b"err\n")),
        (wire.pack_number(wire.TOLD, signal.SIGTERM), InstanceChanged(0, TOLD)),
        (wire.pack_number(wire.TOLD, wire.ORPHANED), InstanceChanged(0, ORPHANED)),
        (wire.pack(wire.EXAMINED, b"Tstack"), InstanceChanged(0, EXAMINED, "Tstack")),
        (wire.pack(wire.WANT), InputWanted()),
        (wire.pack(wire.NOTICED), InstanceChanged(0, NOTICED)),
        (wire.pack(wire.CLOSED), InstanceChanged(0, CLOSED)),
        (wire.pack_ended(False, False, False, 3, 5.0), InstanceEnded(0, Ending(EndKind.EXIT, 3, 5.0))),
        (
            wire.pack_ended(True, True, True, 9, 5.0),
            InstanceEnded(0, Ending(EndKind.SIGNAL, 9, 5.0, told=True, lacked_memory=True)),
        ),
    ],
)
def test_each_message_becomes_an_event(pair, message, event):
    theirs, member = pair
    theirs.sendall(HELLO + message)
    assert list(read_reports(member, 1)) == [MemberConnected(0, 77, "node0"), event]


def test_times_of_another_host_are_converted_to_popruns_clock(pair):
    theirs, member = pair
    page = bytearray(NEW_PAGE)
    page[16:24] = State.IN_COLLECTIVE.to_bytes(8, "little")
    page[40:48] = (2_000_000_000).to_bytes(8, "little")
    page[136:152] = 2 * (1_000_000_000).to_bytes(8, "little")  # the steps, from and to
    theirs.sendall(
        HELLO + wire.pack_progress(2.0, bytes(page), memory=(5, 6)) + wire.pack_ended(False, False, False, 0, 3.0)
    )
    reports = read_reports(member, 1)
    next(reports)
    member.lag_s = 100.0
    progress, ended = reports
    record = ProgressRecord(state=State.IN_COLLECTIVE, since_s=102.0, made=Made(from_s=101.0, to_s=101.0))
    assert progress == ProgressCame(0, record, memory_bytes=5, peak_memory_bytes=6)
    assert ended == InstanceEnded(0, Ending(EndKind.EXIT, 0, 103.0))


def test_an_instance_that_has_begun_nothing_has_no_start_time(pair):
    theirs, member = pair
    theirs.sendall(HELLO + wire.pack_progress(2.0, NEW_PAGE))
    _, progress = read_reports(member, 1)
    assert progress == ProgressCame(0, ProgressRecord())
    assert len(NEW_PAGE) == PAGE_BYTES


def test_the_end_of_the_connection_means_a_lost_instance(pair):
    theirs, member = pair
    theirs.sendall(HELLO)
    theirs.close()
    assert list(read_reports(member, 1)) == [MemberConnected(0, 77, "node0")]
    assert list(read_reports(member, 1)) == [InstanceChanged(0, LOST)]
    assert not member.is_open


@pytest.mark.parametrize(
    "words",
    [
        wire.pack_hello(0, 77, 1.5, bytes(15) + b"x", "node0"),
        wire.pack_hello(1, 77, 1.5, TOKEN, "node0"),
        wire.pack(wire.HELLO, b"short"),
        wire.pack(wire.STDOUT, b"mine\n"),
    ],
    ids=["another token", "no such instance", "no hello", "without a hello"],
)
def test_an_unidentified_caller_is_rejected_without_an_event(pair, words):
    theirs, member = pair
    theirs.sendall(words + wire.pack(wire.CLOSED))
    assert list(read_reports(member, 1)) == []
    assert not member.is_open


@pytest.mark.parametrize("kind", [wire.HELLO, wire.STDOUT])
def test_an_unidentified_caller_may_send_no_more_than_a_hello(pair, kind):
    theirs, member = pair
    theirs.sendall(struct.pack("!BI", kind, 1 << 32 - 1))
    assert list(read_reports(member, 1)) == []
    assert not member.is_open


def test_long_output_may_follow_the_hello_at_once(pair):
    theirs, member = pair
    output = b"x" * 5000 + b"\n"
    theirs.sendall(HELLO + wire.pack(wire.STDOUT, output))
    assert list(read_reports(member, 1)) == [MemberConnected(0, 77, "node0"), OutputPiece(0, 1, output)]


def test_an_instance_that_announces_an_oversized_message_is_lost_with_the_reason(pair):
    theirs, member = pair
    theirs.sendall(HELLO)
    list(read_reports(member, 1))
    theirs.sendall(struct.pack("!BI", wire.STDOUT, 1 << 31))
    (lost,) = read_reports(member, 1)
    fault = f"a message has {1 << 31} bytes, but at most {wire.MOST_BYTES} are accepted"
    assert lost == InstanceChanged(0, LOST, fault)


@pytest.mark.parametrize(
    ("offset", "value", "what"), [(16, 99, "state"), (16, (1 << 64) - 1, "state"), (176, 9, "role")]
)
def test_a_page_with_an_unknown_state_or_role_yields_only_that_fault(pair, offset, value, what):
    theirs, member = pair
    page = bytearray(NEW_PAGE)
    page[offset : offset + 8] = value.to_bytes(8, "little")
    theirs.sendall(HELLO + wire.pack_progress(2.0, bytes(page)))
    _, progress = read_reports(member, 1)
    assert progress == ProgressCame(0, ProgressRecord(fault=f"its {what} is {value}"))


def test_text_from_a_page_is_one_line_without_terminal_controls(pair):
    theirs, member = pair
    page = bytearray(NEW_PAGE)
    label = b"sum 'a\n\x1b[2J'"
    page[48:56] = len(label).to_bytes(8, "little")
    page[3072 : 3072 + len(label)] = label
    theirs.sendall(HELLO + wire.pack_progress(2.0, bytes(page)))
    _, progress = read_reports(member, 1)
    assert progress.record.label == r"sum 'a\n\x1b[2J'"


def test_each_order_becomes_a_message(pair):
    theirs, member = pair
    for command, number in ((ASK, 0), (EXAMINE, 0), (RELEASE, 2), (WANT_ACTIVE, 77), (PASS_ON, 15), (STOP, 0)):
        member.order(AgentOrder(command, 0, number))
    messages = wire.MessageReader().feed(theirs.recv(1000))
    expected = [wire.REPORT, wire.EXAMINE, wire.RELEASE, wire.WANT_ACTIVE, wire.SIGNAL, wire.STOP]
    assert [kind for kind, _ in messages] == expected
    assert [wire.unpack_number(content) for _, content in messages if content] == [2, 77, 15]
