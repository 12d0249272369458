"""A server's socket takes connections before its ready line is said."""

import socket

import pytest

from rollyard.core.errors import CannotListen, ConfigError
from rollyard.net.binding import listen


def test_a_client_that_is_told_the_port_is_never_refused():
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname(), timeout=5) as client:
        assert client.getpeername() == sock.getsockname()


def test_a_taken_port_is_refused_by_name():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(CannotListen, match=f"{port}.*another program.*another port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_number_that_is_no_port_is_refused_by_name(port):
    with pytest.raises(ConfigError, match=str(port)):
        listen("127.0.0.1", port)
