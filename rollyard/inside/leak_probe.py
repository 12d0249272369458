"""What of the answer an agent could read: run in its sandbox, as it, before it. Prints one JSON line of findings.

    leak_probe.py NEEDLES.json

NEEDLES: `files`, {sha256: name} of tests and solution, and their `sizes`; `lines`, those that a solution adds; `values`, of the
solution's environment. Runs under whatever Python a sandbox has; imports nothing of ours.
"""

import hashlib
import json
import os
import subprocess
import sys
import time

_SKIP = {"/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/boot"}
_ALSO = ("/usr/local", "/usr/src")
_JUDGES = ("/tests", "/logs/verifier", "/solution", "/oracle")
_MOST_FILES = 200000
_MOST_SECONDS = 30.0
_TEXT = 2 * 2**20
_SHARE = 0.8
_FEWEST_LINES = 3


def lent_trees():
    """Read-only mounts: trees of the machine itself, or layers of tools, which no task's author wrote."""
    try:
        with open("/proc/self/mountinfo") as file:
            rows = [line.split() for line in file]
    except OSError:
        return set()
    return {row[4] for row in rows if row[4] != "/" and "ro" in row[5].split(",")}


def walk(own):
    begun, count = time.monotonic(), 0
    skip = _SKIP | lent_trees() | {own}
    for start in ["/"] + [path for path in _ALSO if "/usr" not in skip - _SKIP]:
        for root, folders, files in os.walk(start):
            folders[:] = [name for name in folders if os.path.join(root, name) not in skip]
            yield root, folders, files
            count += len(files)
            if count > _MOST_FILES or time.monotonic() - begun > _MOST_SECONDS:
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
    if size in sizes:
        name = needles["files"].get(hashlib.sha256(read(path, size)).hexdigest())
        if name is not None:
            yield name.split("/")[0], path, "is " + name
            return
    if path.endswith((".bundle", ".bdl")) and read(path, _TEXT).startswith((b"# v2 git bundle", b"# v3 git bundle")):
        yield "history", path, "is a bundle of commits"
    lines = needles["lines"]
    if len(lines) >= _FEWEST_LINES and size >= sum(map(len, lines)) * _SHARE:
        data = read(path, _TEXT)
        hits = sum(line.encode() in data for line in lines)
        if hits >= _SHARE * len(lines):
            yield "solution", path, "has %d of the %d lines that the solution adds" % (hits, len(lines))


def look(needles, own):
    for name, value in os.environ.items():
        if value in needles["values"] and len(value) > 3:
            yield "solution", "$" + name, "is a value that only the solution is given"
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
