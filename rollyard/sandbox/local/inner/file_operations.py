"""Files of a sandbox, as its supervisor is asked for them: short ones at once, trees in a worker."""

from __future__ import annotations

import os
import stat

from rollyard.core import folders
from rollyard.images import tree_pipe
from rollyard.sandbox.local.inner import files, protocol, users
from rollyard.sandbox.local.inner.path_view import PathView
from rollyard.sandbox.local.inner.protocol import Message
from rollyard.sandbox.local.inner.requests import Request, Work


class FileOperations:
    """`path` of each request is a path for this process: the supervisor has translated it by `outside`."""

    def __init__(self, view: PathView | None, work: Work) -> None:
        self._view, self._work = view, work
        self._proc_dev = os.stat("/proc").st_dev if os.path.exists("/proc/self") else None

    def outside(self, path: str) -> str:
        """Where a path of the sandbox is for this process."""
        return path if self._view is None else os.fsdecode(self._view.outside(os.fsencode(path)))

    def inside(self, path: str) -> str:
        return path if self._view is None else os.fsdecode(self._view.inside(os.fsencode(path)))

    def op_open(self, asked: Request) -> Message:
        fd = files.open_file(
            asked.message["path"],
            write=asked.message["write"],
            mode=asked.message.get("mode"),
            owner=users.find(asked.message.get("user")),
            proc_dev=self._proc_dev,
        )
        return {"fds": (fd,), "size": os.fstat(fd).st_size}

    def op_stat(self, asked: Request) -> Message:
        return self._describe(files.look(asked.message["path"]))

    def op_exists(self, asked: Request) -> Message:
        return {"exists": os.path.exists(asked.message["path"])}

    def op_list(self, asked: Request) -> Message:
        return {"entries": [self._describe(entry) for entry in files.listing(asked.message["path"])]}

    def op_mkdir(self, asked: Request) -> Message:
        files.make_dirs(asked.message["path"], asked.message["mode"], users.find(asked.message.get("user")))
        return {}

    def op_remove(self, asked: Request) -> Message | None:
        path: str = asked.message["path"]
        folder = stat.S_ISDIR(os.lstat(path).st_mode)

        def remove(anyones: bool) -> Message:
            at, name = files.open_parent(path, follow=False, anyones=anyones)
            folders.remove(path if anyones or self._proc_dev is None else f"/proc/self/fd/{at}/{name}")
            os.close(at)
            return {}

        def task() -> Message:
            return files.as_link_owner(remove)

        return self._work(asked, task) if folder and not _is_small(path) else task()

    def op_unpack(self, asked: Request) -> Message | None:
        user = users.find(asked.message.get("user"))
        path: str = asked.message["path"]
        files.make_dirs(path, 0o755, user)

        def unpack(anyones: bool) -> Message:
            at, name = files.open_parent(path, follow=True, anyones=anyones)
            where = path if anyones or self._proc_dev is None else f"/proc/self/fd/{at}/{name}"
            owner = (user.uid, user.gid) if (user.uid or user.gid) and not anyones else None
            with open(asked.fds[0], "rb", closefd=False) as source:
                tree_pipe.unpack(source, where, owner=owner, link=self.outside)
            os.close(at)
            return {}

        def task() -> Message:
            return files.as_link_owner(unpack)

        return task() if asked.message["small"] else self._work(asked, task)

    def op_pack_small(self, asked: Request) -> Message:
        """A directory's stream at once, if it is small."""
        stream = tree_pipe.pack_small(asked.message["path"], max_bytes=asked.message["max_bytes"], link=self.inside)
        return {} if stream is None else {"fds": (protocol.memory_file(stream),)}

    def op_pack(self, asked: Request) -> Message | None:
        def pack() -> Message:
            with open(asked.fds[0], "wb", closefd=False) as out:
                tree_pipe.pack(asked.message["path"], out, max_bytes=asked.message["max_bytes"], link=self.inside)
            return {}

        return self._work(asked, pack)

    def _describe(self, entry: Message) -> Message:
        target = entry["target"]
        return {
            **entry,
            "path": self.inside(entry["path"]),
            "target": target if target is None else self.inside(target),
        }


def _is_small(path: str) -> bool:
    try:
        return tree_pipe.is_small(path)
    except OSError:  # a directory closed to its owner: to remove it is long work
        return False
