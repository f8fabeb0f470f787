"""Ports on which ranks meet."""

from __future__ import annotations

import socket

import pytest

from rlsys.errors import ConfigError
from tests.processes import free_port
from workers.ray.node_network import listen, take_listener

HOST = "127.0.0.1"


def test_two_groups_with_one_range_of_ports_get_different_ones():
    first = free_port()
    ports = (first, first + 20)
    own, other = listen(HOST, ports), listen(HOST, ports)
    assert own != other
    with take_listener(HOST, own) as one, take_listener(HOST, other) as two:
        assert [one.getsockname(), two.getsockname()] == [(HOST, own), (HOST, other)]
        with socket.create_connection((HOST, own)):
            assert one.accept()[1][0] == HOST


def test_a_range_of_which_no_port_is_free_is_named():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"train\.network\.ports: none of \({port}, {port}\) is free"):
            listen(HOST, (port, port))


def test_an_address_where_nobody_listens_yet_gets_a_listener():
    port = free_port()
    with take_listener(HOST, port) as listener:
        assert listener.getsockname() == (HOST, port)
