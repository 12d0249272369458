"""What of the answer an agent could read: run in its sandbox, as it, before it. Prints one JSON line of findings.

    leak_probe.py NEEDLES.json

NEEDLES: `files`, {sha256: name} of tests and solution, and their `sizes`; `groups`, of the lines of one solution's file or patch
each, and which of them are of `patches`; `words`, that a patch brings in and compiled code keeps, and the `modules` it changes;
`values`, of the solution's environment. Looks into archives and compressed files, too. Runs under whatever Python a sandbox has;
imports nothing of ours.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib

_SKIP = {"/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/boot"}
_ALSO = ("/usr/local", "/usr/src", "/usr/lib/python3/dist-packages")
_JUDGES = ("/tests", "/logs/verifier", "/solution", "/oracle")
_MOST_FILES = 200000
_MOST_SECONDS = 30.0  # of CPU: a busy machine looks at as much
_TEXT = 2 * 2**20
_SHARE = 0.8
_FEWEST_LINES = 3
_FEWEST_WORDS = 3
_UNPACKED = 64 * 2**20  # of one archive
_MEMBERS = 5000
_REMAINS = re.compile(
    r"^\.\w*(?:history|hist)$|^\.(?:viminfo|lesshst)$|\.sw[a-p]$|^core(?:\.\d+)?$|^\.#|^#.*#$|~$|\.(?:orig|rej|bak|old|save|dmp)$|^nohup\.out$"
)


def lent_trees():
    """Read-only mounts: trees of the machine itself, or layers of tools, which no task's author wrote."""
    try:
        with open("/proc/self/mountinfo") as file:
            rows = [line.split() for line in file]
    except OSError:
        return set()
    return {row[4] for row in rows if row[4] != "/" and "ro" in row[5].split(",")}


def walk(own):
    begun, count = time.process_time(), 0
    skip = _SKIP | lent_trees() | {own}
    for start in ["/"] + [path for path in _ALSO if "/usr" not in skip - _SKIP]:
        for root, folders, files in os.walk(start):
            folders[:] = [name for name in folders if os.path.join(root, name) not in skip]
            yield root, folders, files
            count += len(files)
            if count > _MOST_FILES or time.process_time() - begun > _MOST_SECONDS:
                print(json.dumps({"cut": count}), flush=True)
                return


def read(path, most):
    try:
        if os.path.getsize(path) > most or not os.path.isfile(path) or os.path.islink(path):
            return b""
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def git(folder, *words):
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    env = dict(os.environ, GIT_NO_REPLACE_OBJECTS="1", **safe)
    command = ["git", "--git-dir=" + folder, *words]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, timeout=120, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def look_at_repository(folder):
    """Commits that HEAD did not grow from, by whatever name, and stray blobs."""
    everything = git(folder, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    commits = {line[7:] for line in everything.splitlines() if line.startswith("commit ")}
    later = commits - set(git(folder, "rev-list", "HEAD").split())
    if later:
        named = git(folder, "for-each-ref", "--format=%(refname)", "--contains", sorted(later)[0]).split()
        how = "named " + named[0] if named else "that no ref names"
        yield (
            "history",
            folder,
            "%d commits that HEAD did not grow from; one, %s, %s" % (len(later), sorted(later)[0][:12], how),
        )
    for name in ("rebase-apply", "rebase-merge", "lost-found"):
        if os.path.isdir(os.path.join(folder, name)):
            yield "history", os.path.join(folder, name), "what is left of a change that was under way"


def look_at_file(path, needles, sizes):
    try:
        size = os.stat(path).st_size
    except OSError:
        return
    name = os.path.basename(path)
    remains = _REMAINS.search(name) is not None
    data = read(path, _UNPACKED if remains else max(_TEXT, size) if size in sizes else _TEXT)
    found = look_at_bytes(data, needles, path) or look_at_compiled(path, data, needles)
    if found is None and (remains or is_core(data)):
        line = next((line for group in needles["groups"] for line in group if line.encode() in data), None)
        found = line and ("solution", "has a line of the solution: " + line[:60])
    if found is None:
        found = look_into(path, size, needles)
    if found:
        yield found[0], path, found[1]
    elif data.startswith((b"# v2 git bundle", b"# v3 git bundle")):
        yield "history", path, "is a bundle of commits"


def look_at_bytes(data, needles, path=None):
    if len(data) in needles["sizes"]:
        name = needles["files"].get(hashlib.sha256(data).hexdigest())
        if name is not None:
            return name.split("/")[0], "is " + name
    for number, lines in enumerate(needles["groups"]):
        if len(lines) >= _FEWEST_LINES and len(data) >= sum(map(len, lines)) * _SHARE:
            hits = sum(line.encode() in data for line in lines)
            if hits >= _SHARE * len(lines) and not (path and number in needles["patches"] and is_committed(path)):
                return "solution", "has %d of the %d lines of a solution's file" % (hits, len(lines))
    return None


def is_committed(path):
    """Whether it is a file of the project as it was committed: a patch may repeat lines that stand elsewhere in its tree."""
    folder = os.path.dirname(path)
    while not os.path.exists(os.path.join(folder, ".git")):
        if folder in ("", "/"):
            return False
        folder = os.path.dirname(folder)
    name = os.path.relpath(path, folder)
    held = git(os.path.join(folder, ".git"), "rev-parse", "--verify", "--quiet", "HEAD:" + name).strip()
    own = git(os.path.join(folder, ".git"), "--work-tree=" + folder, "hash-object", "--", path).strip()
    return held != "" and held == own


def is_core(data):
    return data[:4] == b"\x7fELF" and data[16:18] in (b"\x04\x00", b"\x00\x04")


def module_of(path):
    """The last part of the name that a compiled file is imported by; of a package's own file, the package's."""
    folder, name = os.path.split(path)
    if name.split(".")[0] != "__init__":
        return name.split(".")[0]
    if os.path.basename(folder) == "__pycache__":
        folder = os.path.dirname(folder)
    return os.path.basename(folder)


def look_at_compiled(path, data, needles):
    """Compiled code keeps names and texts, and the size of the source it was made of."""
    if not path.endswith(".pyc"):
        return None
    words = needles["words"]
    if len(words) >= _FEWEST_WORDS and module_of(path) in needles["modules"]:
        hits = sum(word.encode() in data for word in words)
        if hits >= _SHARE * len(words):
            return "solution", "is compiled, and has %d of the %d words that the solution brings in" % (
                hits,
                len(words),
            )
    source = os.path.join(os.path.dirname(os.path.dirname(path)), os.path.basename(path).split(".")[0] + ".py")
    if os.path.basename(os.path.dirname(path)) != "__pycache__" or len(data) < 16 or not os.path.isfile(source):
        return None
    flags, size = struct.unpack("<I", data[4:8])[0], struct.unpack("<I", data[12:16])[0]
    if flags == 0 and size != os.path.getsize(source) & 0xFFFFFFFF:
        return "compiled", "is compiled from a %s of another size" % os.path.basename(source)
    return None


def look_into(path, size, needles):
    """Members of an archive, or what is compressed: a wheel in a cache, a backup, an old sdist."""
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError:
        return None
    known = head[:4] == b"PK\x03\x04" or head[:2] == b"\x1f\x8b" or head[:3] == b"BZh" or head[:6] == b"\xfd7zXZ\x00"
    if not (known or head[257:262] == b"ustar") or size > _UNPACKED:
        return None
    try:
        for name, data in members(path, head):
            found = look_at_bytes(data, needles)
            if found:
                return found[0], "has %s, which %s" % (name, found[1])
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        zipfile.BadZipFile,
        tarfile.TarError,
        lzma.LZMAError,
        zlib.error,
    ):
        return None
    return None


def members(path, head):
    left = _UNPACKED
    if head[:2] == b"PK":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist()[:_MEMBERS]:
                if info.file_size <= min(_TEXT, left):
                    left -= info.file_size
                    yield info.filename, archive.read(info)
        return
    opened = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}.get(head[:2], open)
    with opened(path, "rb") as file:
        data = file.read(left)
    if data[257:262] != b"ustar":
        yield "its content", data
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for number, info in enumerate(archive):
            if number >= _MEMBERS:
                return
            if info.isfile() and info.size <= _TEXT:
                yield info.name, archive.extractfile(info).read()


def look(needles, own):
    for name, value in os.environ.items():
        if value in needles["values"] and len(value) > 3:
            yield "solution", "$" + name, "is a value that only the solution is given"
        elif look_at_bytes(value.encode("utf-8", "surrogateescape"), needles):
            yield "solution", "$" + name, "has lines of the solution"
    for path in _JUDGES:
        if path != own and os.path.isdir(path) and os.listdir(path):
            yield "judge", path, "is there before the judge is"
    sizes = set(needles["sizes"])
    for root, folders, files in walk(own):
        if "HEAD" in files and "objects" in folders and "refs" in folders:
            for found in look_at_repository(root):
                yield found
            folders[:] = [name for name in folders if name not in ("objects", "refs", "logs")]
        for name in files:
            for found in look_at_file(os.path.join(root, name), needles, sizes):
                yield found


def main():
    with open(sys.argv[1]) as file:
        needles = json.load(file)
    own = os.path.dirname(os.path.abspath(sys.argv[1]))
    for kind, where, message in look(needles, own):
        print(json.dumps({"leak": kind, "where": where, "message": message}), flush=True)
    print(json.dumps({"looked": True}), flush=True)


if __name__ == "__main__":
    main()
