"""A program in a terminal of its own, for a client that has no terminal: `terminal.py COLUMNS ROWS PROGRAM ARGUMENT...`.

Frames come on stdin: a letter, four bytes of length, and that many bytes. `i` is typed input; `r` is a new size, as two
numbers of two bytes. What the terminal shows goes to stdout. It ends with its program, as that ended.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios

CHUNK = 65536


def set_size(terminal, columns, rows):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def write_all(to, data):
    while data:
        data = data[os.write(to, data) :]


def take_frames(terminal, pending):
    """Do what whole frames say; what is left over."""
    while len(pending) >= 5:
        size = struct.unpack(">I", pending[1:5])[0]
        if len(pending) < 5 + size:
            break
        kind, body, pending = pending[:1], pending[5 : 5 + size], pending[5 + size :]
        if kind == b"r":
            set_size(terminal, *struct.unpack(">HH", body))
        else:
            write_all(terminal, body)
    return pending


def become(inner, argv):
    """The program, with this terminal as its own."""
    os.setsid()
    fcntl.ioctl(inner, termios.TIOCSCTTY, 0)
    for number in (0, 1, 2):
        os.dup2(inner, number)
    os.closerange(3, 256)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, (argv[0] + ": " + str(error) + "\n").encode())
        os._exit(127)


def main():
    columns, rows, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    terminal, inner = pty.openpty()
    set_size(terminal, columns, rows)  # before a client can ask for another
    child = os.fork()
    if child == 0:
        become(inner, argv)
    os.close(inner)
    heard, pending = [0, terminal], b""
    while True:
        ready = select.select(heard, [], [])[0]
        if terminal in ready:
            try:
                shown = os.read(terminal, CHUNK)
            except OSError:  # no process has it open any more
                break
            if not shown:
                break
            write_all(1, shown)
        if 0 in ready:
            typed = os.read(0, CHUNK)
            if not typed:
                heard.remove(0)
            pending = take_frames(terminal, pending + typed)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))


main()
