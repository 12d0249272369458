"""Terminals, and metadata of files, of the E2B-compatible server, with the real SDK and local sandboxes underneath."""

import pytest

from rollyard.sandbox.local.backend import LocalBackend
from tests.plane.e2b_server import serving

e2b = pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
KEY = "e2b_" + "0" * 40


@pytest.fixture
async def box(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as local, serving(local) as url:
        made = await e2b.AsyncSandbox.create(api_url=url, sandbox_url=url, api_key=KEY)
        yield made
        await made.kill()


class Screen:
    def __init__(self) -> None:
        self.data = b""

    async def __call__(self, data: bytes) -> None:
        self.data += data


async def test_a_program_has_a_terminal_of_its_size_which_can_be_changed(box):
    screen = Screen()
    size = e2b.PtySize(cols=81, rows=25)
    terminal = await box.pty.create(size, screen, cwd="/", envs={"COLOUR": "blue", "PS1": ""})
    await box.pty.send_stdin(terminal.pid, b"stty size; tty; echo is-$COLOUR\n")
    await box.pty.send_stdin(terminal.pid, b"read line; stty size; exit 7\n")
    await box.pty.resize(terminal.pid, e2b.PtySize(cols=120, rows=40))
    await box.pty.send_stdin(terminal.pid, b"go on\n")
    with pytest.raises(e2b.CommandExitException) as ended:
        await terminal.wait()
    assert ended.value.exit_code == 7
    assert b"\r\n40 120\r\n" in screen.data
    assert b"/dev/pts/" in screen.data and b"is-blue\r\n" in screen.data


async def test_a_terminal_is_left_and_joined_again_and_killed(box):
    left = await box.pty.create(e2b.PtySize(80, 24), Screen())
    await left.disconnect()
    screen = Screen()
    joined = await box.pty.connect(left.pid, screen)
    await box.pty.send_stdin(left.pid, b"echo he''ard; exit\n")
    assert (await joined.wait()).exit_code == 0 and b"heard" in screen.data
    other = await box.pty.create(e2b.PtySize(80, 24), Screen())
    assert await box.pty.kill(other.pid)
    assert not await box.pty.kill(other.pid)


async def test_metadata_is_kept_with_a_file_and_replaced_by_the_next_upload(box):
    said = {"author": "somebody", "purpose": "a test, 100%"}
    assert (await box.files.write("notes/a.txt", "one", metadata=said)).metadata == said
    assert (await box.files.get_info("notes/a.txt")).metadata == said
    (listed,) = await box.files.list("notes")
    assert listed.metadata == said
    assert (await box.files.rename("notes/a.txt", "notes/b.txt")).metadata == said
    await box.files.write("notes/b.txt", "two", metadata={"purpose": "again"})
    assert (await box.files.get_info("notes/b.txt")).metadata == {"purpose": "again"}
    await box.files.write("notes/b.txt", "three")
    assert (await box.files.get_info("notes/b.txt")).metadata is None


async def test_metadata_that_no_file_can_keep_is_refused_and_nothing_is_written(box):
    with pytest.raises(e2b.InvalidArgumentException):
        await box.files.write("large.txt", "x", metadata={"much": "y" * 5000})
    assert not await box.files.exists("large.txt")
