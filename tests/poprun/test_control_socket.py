from __future__ import annotations

import errno
import os
import resource
import socket

import pytest

from poprun.ipc import wire
from poprun.ipc.sockets import connect, open_socket
from poprun.supervisor.control import GREETING_LIMIT_S, MOST_STRANGERS, PAUSE_S, Member, Reception, strangers_to_leave


@pytest.fixture
def reception():
    reception = Reception()
    yield reception
    reception.close()


def name_of(reception: Reception) -> str:
    scheme, _, name = reception.contact.split()[0].partition(":")
    assert scheme == "unix"
    return name


def test_an_agent_that_has_the_token_is_let_in(reception):
    token = bytes.fromhex(reception.contact.split()[1])
    with connect(name_of(reception)) as agent:
        member = reception.accept(0.0)
        agent.sendall(wire.pack_hello(1, 77, 1.5, token, "node0"))
        [(kind, content)] = member.receive()
        assert (kind, member.meet(content, 2), member.index) == (wire.HELLO, (77, "node0"), 1)
        member.close()


def test_one_that_has_not_is_not(reception):
    with connect(name_of(reception)) as stranger:
        member = reception.accept(0.0)
        stranger.sendall(wire.pack_hello(1, 77, 1.5, bytes(16), "node0"))
        [(_, content)] = member.receive()
        assert member.meet(content, 2) is None
        assert not member.is_open
        member.close()


def test_nobody_is_let_in_any_more_after_the_end(reception):
    name = name_of(reception)
    reception.close()
    with pytest.raises(ConnectionRefusedError):
        connect(name)


def test_whoever_calls_and_goes_at_once_does_no_harm(reception):
    connect(name_of(reception)).close()
    member = reception.accept(0.0)
    assert member.receive() == []
    assert not member.is_open
    member.close()
    assert reception.accept(0.0) is None  # nobody is there
    assert not reception.shortage


def test_while_descriptors_are_lacking_nobody_is_let_in_and_it_is_tried_again_after_a_pause(reception):
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
        """One that has said who it is, and 100 that have not, in the order in which they have called."""
        pairs = [socket.socketpair() for _ in range(101)]
        members = [Member(ours, bytes(16), shares_clock=True) for ours, _ in pairs]
        for at_s, member in enumerate(members):
            member.called_at_s = float(at_s)
        members[0].index = 0
        yield members
        for each in (*members, *(theirs for _, theirs in pairs)):
            each.close()

    def test_have_some_time_to_say_who_they_are(self, members):
        assert strangers_to_leave(members[:3], 2, GREETING_LIMIT_S + 0.9) == []
        assert strangers_to_leave(members[:3], 2, GREETING_LIMIT_S + 1.0) == [members[1]]
        assert strangers_to_leave(members[:3], 2, GREETING_LIMIT_S + 2.0) == members[1:3]

    def test_that_have_called_first_make_room_for_others(self, members):
        assert strangers_to_leave(members, 2, 0.0) == members[1 : 101 - MOST_STRANGERS - 2]
        assert strangers_to_leave(members[: 1 + MOST_STRANGERS + 2], 2, 0.0) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
class TestAnotherUser:
    @pytest.fixture
    def nobody(self):
        os.seteuid(65534)
        yield
        os.seteuid(0)

    def test_is_turned_away(self, reception, nobody):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name_of(reception)}")
            os.seteuid(0)
            assert reception.accept(0.0) is None
            assert stranger.recv(1) == b""

    def test_is_not_taken_for_poprun(self, nobody):
        listening, name = open_socket()
        listening.listen()
        os.seteuid(0)
        with listening, pytest.raises(ConnectionRefusedError, match="another user's"):
            connect(name)
