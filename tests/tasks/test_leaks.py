"""Ways by which an agent could read the answer: each is open in a repository or an image made here, and closed or told after."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Task
from rollyard.inside import leak_probe
from rollyard.runs.rollout.provision import Provision
from rollyard.tasks.harbor.load import load_folder
from rollyard.testing.leaks import find_leaks, make_needles
from tests.sandbox.test_images_open import BUSYBOX, add, needs_busybox

SEAL = Path(ry.__file__).parent / "inside" / "seal_repository.sh"
ANSWER = "def widget(): return 'the answer of a later commit'\n"
ROUTES = {}


def git(place, *words, check=True, **more):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "protocol.file.allow=always"]
    env = {**os.environ, "GIT_NO_REPLACE_OBJECTS": "1"}
    done = subprocess.run(
        ["git", *who, *words], cwd=place, env=env, capture_output=True, text=True, timeout=60, check=False, **more
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout.strip()


def commit(place, text, name="widget.py"):
    (place / name).write_text(text)
    git(place, "add", "-A")
    git(place, "commit", "-qm", f"says {len(text)}")
    return git(place, "rev-parse", "HEAD")


def route(plant):
    ROUTES[plant.__name__] = plant
    return plant


def later(repo):
    """A commit with the answer, which nothing names any more."""
    found = commit(repo, ANSWER)
    git(repo, "reset", "-q", "--hard", "HEAD~1")
    forget(repo)
    return found


def forget(repo):
    shutil.rmtree(repo / ".git" / "logs")
    (repo / ".git" / "ORIG_HEAD").unlink(missing_ok=True)


@route
def a_branch_beyond_a_detached_head(repo):
    commit(repo, ANSWER)
    git(repo, "checkout", "-q", "--detach", "HEAD~1")
    forget(repo)


@route
def another_branch(repo):
    git(repo, "branch", "fix", later(repo))


@route
def a_remote_branch(repo):
    git(repo, "update-ref", "refs/remotes/origin/main", later(repo))


@route
def a_pull_request(repo):
    git(repo, "update-ref", "refs/pull/7/head", later(repo))


@route
def a_tag(repo):
    git(repo, "tag", "v2", later(repo))


@route
def an_annotated_tag(repo):
    git(repo, "tag", "-a", "v2", "-m", "two", later(repo))


@route
def a_tag_of_a_file(repo):
    git(repo, "tag", "answer", git(repo, "hash-object", "-w", "--stdin", input=ANSWER))


@route
def packed_refs(repo):
    git(repo, "tag", "v2", later(repo))
    git(repo, "pack-refs", "--all")


@route
def a_stash(repo):
    (repo / "widget.py").write_text(ANSWER)
    git(repo, "stash")


@route
def a_reflog(repo):
    commit(repo, ANSWER)
    git(repo, "reset", "-q", "--hard", "HEAD~1")
    (repo / ".git" / "ORIG_HEAD").unlink()


@route
def orig_head(repo):
    commit(repo, ANSWER)
    git(repo, "reset", "-q", "--hard", "HEAD~1")
    shutil.rmtree(repo / ".git" / "logs")


@route
def fetch_head(repo):
    other = repo.parent / "other"
    git(repo.parent, "clone", "-q", str(repo), "other")
    commit(other, ANSWER)
    git(repo, "fetch", "-q", str(other))
    shutil.rmtree(other)


@route
def notes(repo):
    git(repo, "notes", "add", "-m", ANSWER)


@route
def a_replacement(repo):
    git(repo, "replace", git(repo, "rev-parse", "HEAD"), later(repo))


@route
def a_loose_object(repo):
    later(repo)


@route
def a_pack(repo):
    git(repo, "tag", "v2", later(repo))
    git(repo, "gc", "-q")
    git(repo, "tag", "-d", "v2")


@route
def a_kept_pack(repo):
    a_pack(repo)
    (pack,) = (repo / ".git/objects/pack").glob("*.pack")
    pack.with_suffix(".keep").touch()


@route
def a_cruft_pack(repo):
    later(repo)
    git(repo, "gc", "-q", "--cruft")


@route
def lost_and_found(repo):
    git(repo, "hash-object", "-w", "--stdin", input=ANSWER)
    git(repo, "fsck", "--lost-found")
    git(repo, "prune", "--expire=now")


@route
def an_alternate(repo):
    other = repo.parent / "other"
    git(repo.parent, "clone", "-q", str(repo), "other")
    git(repo, "tag", "v2", commit(other, ANSWER), check=False)
    (repo / ".git/objects/info/alternates").write_text(f"{other}/.git/objects\n")


@route
def a_second_worktree(repo):
    git(repo, "worktree", "add", "-q", "--detach", str(repo.parent / "second"))
    commit(repo.parent / "second", ANSWER)
    shutil.rmtree(repo.parent / "second")


@route
def a_rebase_under_way(repo):
    folder = repo / ".git" / "rebase-apply"
    folder.mkdir()
    (folder / "0001").write_text(f"From: a\n+{ANSWER}")


@route
def a_merge_that_was_resolved(repo):
    git(repo, "checkout", "-qb", "fix")
    commit(repo, ANSWER)
    git(repo, "checkout", "-q", "main")
    commit(repo, "def widget(): return 'mine'\n")
    git(repo, "merge", "-q", "fix", check=False)
    (repo / "widget.py").write_text("def widget(): return 'mine'\n")
    git(repo, "add", "widget.py")


@route
def a_bundle_beside_the_objects(repo):
    git(repo, "tag", "v2", later(repo))
    git(repo, "bundle", "create", "-q", ".git/backup.bundle", "v2")
    git(repo, "tag", "-d", "v2")
    git(repo, "prune", "--expire=now")


@route
def the_message_of_a_commit_under_way(repo):
    (repo / ".git" / "MERGE_MSG").write_text(ANSWER)


@route
def a_large_file_of_a_later_commit(repo):
    folder = repo / ".git/lfs/objects/ab/cd"
    folder.mkdir(parents=True)
    (folder / ("ab" * 32)).write_text(ANSWER)


@route
def a_submodule(repo):
    inner = repo.parent / "inner"
    inner.mkdir()
    git(inner, "init", "-qb", "main")
    commit(inner, "fault\n")
    git(repo, "submodule", "--quiet", "add", str(inner), "vendor")
    git(repo, "commit", "-qm", "vendor")
    commit(inner, ANSWER)
    git(repo / "vendor", "fetch", "-q")
    shutil.rmtree(inner)


@route
def a_clone_inside_the_tree(repo):
    inner = repo / "vendor"
    inner.mkdir()
    git(inner, "init", "-qb", "main")
    commit(inner, "fault\n")
    later(inner)


@route
def a_remote_on_this_disk(repo):
    git(repo, "remote", "add", "origin", f"/srv/{ANSWER.split()[1]}.git")


SIGNS = {"a_remote_on_this_disk": b"/srv/widget()", "a_bundle_beside_the_objects": b"git bundle"}


@pytest.fixture
def repo(tmp_path):
    place = tmp_path / "testbed"
    place.mkdir()
    git(place, "init", "-qb", "main")
    commit(place, "before\n")
    git(place, "tag", "-a", "v1", "-m", "one")
    commit(place, "fault\n")
    return place


def test_a_repository_that_the_folder_is_a_part_of_is_sealed(repo):
    part = repo / "packages" / "one"
    part.mkdir(parents=True)
    later(repo)
    secret = ANSWER.split("'")[1].encode()
    assert secret in what_is_kept(repo)
    assert seal(part).returncode == 0
    assert secret not in what_is_kept(repo)


def what_is_kept(repo):
    """All that lies in the git directories of a tree: files as they are, and every object that git can reach by its id."""
    found = []
    for folder in {path.parent for path in repo.rglob("HEAD") if (path.parent / "objects").is_dir()}:
        found += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        objects = ["git", f"--git-dir={folder}", "cat-file", "--batch-all-objects", "--batch", "--unordered"]
        found.append(subprocess.run(objects, capture_output=True, timeout=60, check=False).stdout)
    return b"\n".join(found)


def seal(repo):
    return subprocess.run(["sh", str(SEAL), str(repo)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ROUTES)
def test_no_later_commit_is_left_by_any_route(repo, name):
    ROUTES[name](repo)
    secret = SIGNS.get(name, ANSWER.split("'")[1].encode())
    assert secret in what_is_kept(repo)
    before = (git(repo, "rev-parse", "HEAD"), git(repo, "log", "--format=%H", "HEAD"), git(repo, "status", "--short"))
    branch = git(repo, "branch", "--show-current")
    done = seal(repo)
    assert done.returncode == 0, done.stderr
    assert secret not in what_is_kept(repo)
    after = (git(repo, "rev-parse", "HEAD"), git(repo, "log", "--format=%H", "HEAD"), git(repo, "status", "--short"))
    assert after == before and git(repo, "branch", "--show-current") == branch
    assert git(repo, "describe", "--tags").startswith("v1")
    assert "missing" not in git(repo, "fsck", "--full")
    commit(repo, "the agent's own\n")


def test_there_are_enough_routes():
    assert len(ROUTES) >= 25


TASK = '[metadata.rollyard]\ngrade = "sealed"\n{extra}\n[environment]\n{place}\nworkdir = "/app"\n'
PATCH = "--- a/w.py\n+++ b/w.py\n@@ -1 +1,4 @@\n-fault\n" + "".join(
    f"+    share_number_{n} = share_of(part_number_{n})\n" for n in range(4)
)
FIXED = "def whole(share_of):\n" + "".join(f"    share_number_{n} = share_of(part_number_{n})\n" for n in range(4))
SOLVE = "#!/bin/sh\n# all that it takes to do it\necho done > /app/out.txt\n"
WRITTEN = [f"line {n} of a file that the solution writes" for n in range(4)]
SCRIPT = "#!/bin/sh\ncat > /app/h.txt <<'END'\n" + "\n".join(WRITTEN) + "\nEND\n"
HIDDEN = "import subprocess\n\n\ndef test_it():\n    assert subprocess.run(['./w']).returncode == 0\n"
SECRET = "the-value-of-the-solution-alone"
GIT = "git -c user.name=a -c user.email=a@example.com"
OPEN = {
    "the solution in the image": ("COPY s.sh /app/notes.txt", {"s.sh": SOLVE}, "its answer: /app/notes.txt is solution/solve.sh"),
    "the solution under another name": ("COPY s.sh /var/cache/x.bin", {"s.sh": SOLVE}, "its answer: /var/cache/x.bin"),
    "tests in the image": ("COPY t.py /app/t.py", {"t.py": HIDDEN}, "a test that it is judged by"),
    "the gold patch": ("COPY p /app/.p", {"p": PATCH}, "its answer: /app/.p is solution/gold.patch"),
    "the fixed file as a backup": ("COPY f /app/w.py.orig", {"f": FIXED}, "its answer: /app/w.py.orig"),
    "the fixed package installed": ("COPY f /opt/lib/w.py", {"f": FIXED}, "its answer: /opt/lib/w.py"),
    "a compressed folder of tests": ("RUN mkdir /tests && echo x > /tests/t", {}, "where it is judged: /tests"),
    "a reward of before": ("RUN mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt", {}, "/logs/verifier"),
    "a value of the solution": (f"ENV HINT={SECRET}", {}, "its answer: $HINT is a value"),
    "a wheel in pip's cache": (
        "COPY f /opt/new/w.py\nRUN mkdir -p /root/.cache/pip/http && cd /opt/new"
        " && python3 -m zipfile -c /root/.cache/pip/http/a1b2.body w.py && rm w.py",
        {"f": FIXED}, "its answer: /root/.cache/pip/http/a1b2.body has w.py",
    ),
    "a source archive": (
        "COPY f /opt/src/w/w.py\nRUN cd /opt/src && tar czf w-2.0.tar.gz w && rm -r w",
        {"f": FIXED}, "its answer: /opt/src/w-2.0.tar.gz has w/w.py",
    ),
    "a compressed solution": (
        "COPY s.sh /srv/s\nRUN gzip -n /srv/s && mv /srv/s.gz /srv/x", {"s.sh": SOLVE}, "its answer: /srv/x has its content",
    ),
    "compiled code of the fixed package": (
        "COPY f /opt/env/lib/site-packages/w.py\nRUN cd /opt/env/lib/site-packages && python3 -m compileall -q -b . && rm w.py",
        {"f": FIXED}, "its answer: /opt/env/lib/site-packages/w.pyc is compiled",
    ),
    "compiled code beside another source": (
        "RUN mkdir /opt/m && cd /opt/m && echo 'x = 1' > m.py && python3 -m compileall -q . && echo 'x = 1000' > m.py",
        {}, "compiled code of another version: /opt/m/__pycache__",
    ),
    "a shell's history": (
        "RUN mkdir -p /root && echo 'echo done > /app/out.txt' > /root/.bash_history", {}, "its answer: /root/.bash_history",
    ),
    "an editor's swap file": (
        "RUN printf 'b0VIM 9.0\\0\\0    share_number_2 = share_of(part_number_2)\\0' > /app/.w.py.swp", {},
        "its answer: /app/.w.py.swp",
    ),
    "a core dump": (
        "RUN printf '\\177ELF\\2\\1\\1\\0\\0\\0\\0\\0\\0\\0\\0\\0\\4\\0 share_number_1 = share_of(part_number_1)' > /var/dump",
        {}, "its answer: /var/dump",
    ),
    "lines in a variable": (
        "ENV FIX='" + ";".join(f"share_number_{n} = share_of(part_number_{n})" for n in range(4)) + "'", {},
        "its answer: $FIX has lines",
    ),
    "a copy of a script's file": (
        "COPY h /var/lib/h.txt", {"h": "\n".join(WRITTEN) + "\n# a line more\n"}, "its answer: /var/lib/h.txt",
    ),
    "later commits": (
        f"RUN git init -q /app && cd /app && {GIT} commit -q --allow-empty -m 1 && {GIT} commit -q --allow-empty -m 2"
        " && git reset -q --hard HEAD~1", {}, "later commits: /app/.git 1 commits that HEAD did not grow from",
    ),
    "a mirror elsewhere": (
        f"RUN git init -q --bare /srv/m.git && cd /srv/m.git && c=$({GIT} commit-tree -m 1 $(git mktree </dev/null))"
        " && git tag v2 $c", {}, "later commits: /srv/m.git 1 commits",
    ),
    "the fixed file in a repository, not committed": (
        f"COPY f /srv/q/like.py\nRUN cd /srv/q && git init -q . && {GIT} commit -q --allow-empty -m 1", {"f": FIXED},
        "its answer: /srv/q/like.py has 4 of the 4 lines",
    ),
    "the fixed file over a committed one": (
        f"COPY f /srv/o/like.py\nRUN cd /srv/o && git init -q . && mv like.py x && echo 1 > like.py && git add like.py"
        f" && {GIT} commit -q -m 1 && mv x like.py", {"f": FIXED}, "its answer: /srv/o/like.py has 4 of the 4 lines",
    ),
    "a bundle": (
        f"RUN git init -q /tmp/r && cd /tmp/r && {GIT} commit -q --allow-empty -m 1 && git bundle create -q /app/b.bundle HEAD"
        " && rm -rf /tmp/r", {}, "later commits: /app/b.bundle is a bundle",
    ),
}  # fmt: skip
SHUT = {
    "nothing": ("RUN true", {}),
    "a file that a later layer removes": ("COPY s.sh /app/s.sh\nRUN rm /app/s.sh", {"s.sh": SOLVE}),
    "a build folder's file that is not copied": ("RUN true", {"s.sh": SOLVE, "p": PATCH}),
    "a repository of one commit": (f"RUN git init -q /srv/r && cd /srv/r && {GIT} commit -q --allow-empty -m 1", {}),
    "a committed file that has the patch's lines too": (
        f"COPY f /srv/p/like.py\nRUN cd /srv/p && git init -q . && git add -A && {GIT} commit -q -m 1", {"f": FIXED},
    ),
    "compiled code of another module with the same words": (
        "COPY f /opt/o/other.py\nRUN cd /opt/o && python3 -m compileall -q -b . && rm other.py", {"f": FIXED},
    ),
}  # fmt: skip


async def leaks_of(folders, backend, root, dockerfile, files):
    extra = f'[solution]\nenv = {{ KEY = "{SECRET}" }}\n'
    lines = f"FROM host\nWORKDIR /app\n{dockerfile}\n"
    solution = {"solution/solve.sh": SOLVE, "solution/gold.patch": PATCH, "solution/write.sh": SCRIPT}
    given = {f"environment/{name}": text for name, text in files.items()}
    folder = folders.simple(
        root / "task", TASK.format(extra="", place="") + extra,
        **{"environment/Dockerfile": lines}, **solution, **given, **{"tests/test_hidden.py": HIDDEN},
    )  # fmt: skip
    task = load_folder(folder)
    return await find_leaks(
        task, backend, Provision.of(backend), network="none", build_network=None, allow_unsafe=False
    )


@pytest.mark.anyio
async def test_what_an_agent_could_read_is_told(folders, backend, tmp_path):
    lines, files, said = zip(*OPEN.values(), strict=True)
    given = {name: text for one in files for name, text in one.items()}
    found = await leaks_of(folders, backend, tmp_path, "\n".join(lines), given)
    messages = [finding.message for finding in found]
    assert [part for part in said if not any(part in message for message in messages)] == []
    assert len(messages) == len(OPEN), "\n".join(messages)
    assert {finding.level for finding in found if "its answer" in finding.message} == {"error"}


@pytest.mark.anyio
async def test_what_no_agent_can_read_is_not(folders, backend, tmp_path):
    lines, files = zip(*SHUT.values(), strict=True)
    given = {name: text for one in files for name, text in one.items()}
    assert await leaks_of(folders, backend, tmp_path, "\n".join(lines), given) == []


@needs_busybox
@pytest.mark.anyio
async def test_of_an_image_no_layer_that_is_covered_and_no_setting_but_its_variables_reaches_the_agent(
    backend, tmp_path
):
    """An archive as `docker save` writes it: layers, and a config with labels, history and arguments of the build."""
    layers = [
        {
            "bin/busybox": Path(os.path.realpath(BUSYBOX)).read_bytes(),
            "root/answer": SECRET,
            "app/answer": SECRET,
            "opt/a/b": SECRET,
        },
        {"root/.wh.answer": "", "app/answer": "another", "opt/.wh.a": "", "app/seen": "seen"},
    ]
    config = {
        "Env": ["PATH=/bin", "GIVEN=given"],
        "WorkingDir": "/app",
        "Labels": {"answer": SECRET},
        "Cmd": ["echo", SECRET],
    }
    more = {"history": [{"created_by": f"ARG KEY={SECRET}", "comment": SECRET}], "author": SECRET}
    image = save_image(tmp_path, layers, config, more)
    looks = "busybox env; busybox find / -xdev -type f ! -path '/proc/*' ! -path '/sys/*' ! -path '/dev/*' -exec busybox cat {} +"
    async with backend.open(SandboxSpec(image=str(image))) as box:
        seen = await box.exec(["busybox", "sh", "-c", looks], timeout=60, max_output=64 * 2**20)
    assert b"seen" in seen.stdout and b"GIVEN=given" in seen.stdout
    assert SECRET.encode() not in seen.stdout


def save_image(place, layers, config, more):
    packed = []
    for files in layers:
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as archive:
            for name, data in files.items():
                add(archive, name, data if isinstance(data, bytes) else data.encode(), mode=0o755)
        packed.append(held.getvalue())
    digests = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in packed]
    written = json.dumps({"config": config, "rootfs": {"diff_ids": digests}, **more}).encode()
    names = [f"{number}/layer.tar" for number in range(len(packed))]
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["leak:test"], "Layers": names}]).encode()
    with tarfile.open(place / "save.tar", "w") as archive:
        for name, data in [*zip(names, packed, strict=True), ("c.json", written), ("manifest.json", manifest)]:
            add(archive, name, data)
    return place / "save.tar"


def test_what_the_question_shows_is_no_answer(tmp_path):
    """A stub that the agent is to complete stands in the question, in the agent's file and in the solution."""
    shown = "def how_many_letters(text: str) -> int:"
    (tmp_path / "solution.py").write_text(f"{shown}\n    return len(set(text.lower()))  # the answer\n")
    task = Task(id="t", instruction=f"Complete it:\n\n    {shown}\n", solution=str(tmp_path))
    assert make_needles(task)["groups"] == [["return len(set(text.lower()))  # the answer"]]


def test_a_file_with_a_gap_does_not_hold_its_answer(tmp_path):
    """The agent's file has most lines of its repair, which has the same name."""
    same = "".join(f"the_value_of_number_{number} = {number} * {number}\n" for number in range(5))
    for name, text in (("solution/fix/calc.py", f"{same}the_answer_of_all = 42 + 0\n"), ("environment/calc.py", same)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    task = Task(id="t", instruction="x", solution=str(tmp_path / "solution"), build=str(tmp_path / "environment"))
    assert make_needles(task)["groups"] == [["the_answer_of_all = 42 + 0"]]


@pytest.mark.parametrize(("given", "told"), [(5, ["the_answer_of_all = 42 + 0"]), (6, None)])
def test_a_faulty_file_of_another_name_does_not_hold_its_answer_and_a_copy_does(tmp_path, given, told):
    lines = [f"the_value_of_number_{number} = {number} * {number}" for number in range(5)] + [
        "the_answer_of_all = 42 + 0"
    ]
    for name, text in (("solution/fixed.py", lines), ("environment/faulty.py", lines[:given])):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("\n".join(text) + "\n")
    task = Task(id="t", instruction="x", solution=str(tmp_path / "solution"), build=str(tmp_path / "environment"))
    assert make_needles(task)["groups"] == [told or sorted(lines)]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/venv/lib/pkg/__pycache__/__init__.cpython-311.pyc", True),
        ("/venv/lib/pkg/__init__.pyc", True),
        ("/usr/lib/python3.11/importlib/metadata/__pycache__/__init__.cpython-311.pyc", False),
        ("/venv/lib/pkg/__pycache__/other.cpython-311.pyc", False),
    ],
)
def test_compiled_packages_are_told_by_their_own_name(path, told):
    """A solution that changes a package's `__init__.py` is not in the compiled file of every other package."""
    words = [f"word_number_{n}" for n in range(8)]
    found = leak_probe.look_at_compiled(path, " ".join(words).encode(), {"words": words, "modules": ["pkg"]})
    assert (found is not None) is told
