from __future__ import annotations

import os
import socket

import pytest

from poprun import wire
from poprun.control import Reception
from poprun.local_sockets import connect, open_socket


@pytest.fixture
def reception():
    reception = Reception()
    yield reception
    reception.close()


def name_of(reception: Reception) -> str:
    scheme, _, name = reception.contact.split()[0].partition(":")
    assert scheme == "unix"
    return name


def test_a_shim_that_has_the_token_is_let_in(reception):
    token = bytes.fromhex(reception.contact.split()[1])
    with connect(name_of(reception)) as shim:
        member = reception.accept()
        shim.sendall(wire.pack_hello(1, 77, 1.5, token, "node0"))
        [(kind, content)] = member.receive()
        assert (kind, member.meet(content, 2), member.index) == (wire.HELLO, (77, "node0"), 1)
        member.close()


def test_one_that_has_not_is_not(reception):
    with connect(name_of(reception)) as stranger:
        member = reception.accept()
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
            assert reception.accept() is None
            assert stranger.recv(1) == b""

    def test_is_not_taken_for_poprun(self, nobody):
        listening, name = open_socket()
        listening.listen()
        os.seteuid(0)
        with listening, pytest.raises(ConnectionRefusedError, match="another user's"):
            connect(name)
