"""An instance knows the address at which another host reaches it."""

import socket

from strategies.exchange.host_address import own_address_towards


def test_this_machine_is_reached_by_itself_through_loopback():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"


def test_a_host_that_nobody_knows_is_given_the_name_of_this_one():
    assert own_address_towards("no-such-host.invalid") == socket.gethostname()
