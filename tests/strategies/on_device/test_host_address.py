"""Address at which another host reaches an instance."""

import socket

from strategies.exchange.window_path import own_address_towards


def test_a_machine_reaches_itself_through_loopback():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"


def test_an_unknown_host_is_given_the_name_of_this_machine():
    assert own_address_towards("no-such-host.invalid") == socket.gethostname()
