"""A server's socket takes connections before its ready line is said."""

import socket

import pytest

from rollyard.core.errors import CannotListen, ConfigError
from rollyard.net.binding import listen, listen_unix


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


def test_a_socket_that_another_program_listens_on_is_left_alone(tmp_path):
    path = str(tmp_path / "gate.sock")
    with listen_unix(path) as first:
        with pytest.raises(CannotListen, match=r"gate\.sock: another program listens there.*another path"):
            listen_unix(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            first.accept()[0].close()
    with listen_unix(path) as again, socket.socket(socket.AF_UNIX) as client:
        client.connect(path)  # what the first left behind is replaced
        again.accept()[0].close()


def test_a_path_that_cannot_be_a_socket_is_said(tmp_path):
    (tmp_path / "notes").write_text("kept")
    for path, error, words in (
        (tmp_path / "notes", ConfigError, "no socket"),
        (tmp_path, ConfigError, "no socket"),
        (tmp_path / "none" / "gate.sock", CannotListen, "No such file"),
        (tmp_path / ("long" * 40), CannotListen, "too long"),
    ):
        with pytest.raises(error, match=words):
            listen_unix(str(path))
    assert (tmp_path / "notes").read_text() == "kept"
