from __future__ import annotations

import socket

import pytest

from poprun import wire
from poprun.control import Member
from poprun.guard import NEW_PAGE
from poprun.members import Members
from poprun.standard_input import Source

TOKEN = bytes(16)


@pytest.fixture
def shim():
    """The shim's end of the connection of the only instance."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.pack_hello(0, 77, 1.5, TOKEN, "node0"))
        yield theirs, Member(ours, TOKEN, shares_clock=True)


def test_whoever_has_not_answered_every_question_is_still_asked(shim):
    theirs, member = shim
    members = Members(1, lambda *_: None, Source())
    members.take(member)
    assert not members.are_asked
    members.ask()
    members.ask()
    for is_asked in (True, False):
        theirs.sendall(wire.pack_progress(2.0, NEW_PAGE))
        members.take(member)
        assert members.are_asked == is_asked
    members.ask()
    theirs.sendall(wire.pack_ended(False, False, False, 0, 3.0))
    members.take(member)
    assert not members.are_asked
