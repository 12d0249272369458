"""A server's socket takes connections before its ready line is said."""

import socket

import pytest

from rollyard.core.errors import ConfigError
from rollyard.plane.listening import listening


def test_a_client_that_is_told_the_port_is_never_refused():
    with listening("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname(), timeout=5) as client:
        assert client.getpeername() == sock.getsockname()


def test_a_taken_port_is_refused_by_name():
    with listening("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            listening("127.0.0.1", port)
