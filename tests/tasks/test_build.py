"""Dockerfiles carried out on the local backend: every instruction, the cache, and errors with their line."""

import tarfile
import tempfile

import pytest

from rollyard.core.errors import CommandFailed, ConfigError, Error, Unsupported
from rollyard.core.limits import Deadline
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Site
from rollyard.images.build import build
from rollyard.images.build_types import BuildOptions, Built, FileCache
from rollyard.runs.rollout.provision import Provision

pytestmark = pytest.mark.anyio


@pytest.fixture
def make(backend, folders, tmp_path):
    """`await make(dockerfile, {name: text}, **options)` builds and returns what came out."""
    cache = FileCache(tmp_path / "cache")

    async def run(dockerfile, files=None, **options):
        root = folders.write(tmp_path / "context", {"Dockerfile": dockerfile, **(files or {})})
        return await build(root, backend, backend.images, cache, BuildOptions(**{"timeout_s": 60, **options}))

    return run


async def look(backend, built, command):
    spec = SandboxSpec(image=built.image, env=built.env, workdir=built.workdir, user=built.user)
    async with backend.open(spec) as sandbox:
        done = await sandbox.exec(command, timeout=20)
        assert done.ok, done.text
        return done.stdout.decode()


async def test_settings_and_files_are_as_the_file_says(backend, make):
    built = await make(
        "ARG WHO=world\n"
        "FROM host\n"
        "ARG WHO\n"
        'ENV GREETING="hello ${WHO}" PLAIN=1\n'
        "WORKDIR /srv\n"
        "WORKDIR app\n"
        "COPY a.txt b.txt ./\n"
        "COPY a.txt renamed\n"
        "COPY folder /data\n"
        "COPY --chmod=750 --chown=1000:1000 a.txt /data/owned\n"
        'RUN echo "$GREETING $WHO" > said && pwd >> said\n'
        'RUN ["sh", "-c", "id -un > who"]\n'
        'SHELL ["/bin/bash", "-c"]\n'
        "RUN [[ -n $BASH ]] && echo bash > shell\n"
        "RUN <<EOF\n"
        "echo one > here\n"
        "echo two >> here\n"
        "EOF\n"
        "COPY <<-'END' <<OTHER /etc/conf/\n"
        "\t$LITERAL\n"
        "\tEND\n"
        "v=$PLAIN\n"
        "OTHER\n"
        "EXPOSE 80 443/tcp\n"
        "LABEL a=b\n"
        "VOLUME /vol\n"
        "STOPSIGNAL SIGINT\n"
        "HEALTHCHECK --interval=5s CMD true\n"
        "USER 1000\n"
        "RUN id -u > /tmp/uid\n"
        'ENTRYPOINT ["run"]\n'
        'CMD ["now"]\n',
        {"a.txt": "a\n", "b.txt": "b\n", "folder/x": "x\n", "folder/deep/y": "y\n"},
    )
    assert (built.workdir, built.user, built.env["GREETING"]) == ("/srv/app", "1000", "hello world")
    assert (built.entrypoint, built.cmd, built.expose) == (("run",), ("now",), ("80", "443/tcp"))
    assert (built.labels, built.volumes, built.stop_signal) == ({"a": "b"}, ("/vol",), "SIGINT")
    assert built.healthcheck == "--interval=5s CMD true"
    assert await look(backend, built, "cat said who shell here a.txt b.txt renamed") == (
        "hello world world\n/srv/app\nroot\nbash\none\ntwo\na\nb\na\n"
    )
    assert (
        await look(backend, built, "cat /data/x /data/deep/y /etc/conf/END /etc/conf/OTHER") == "x\ny\n$LITERAL\nv=1\n"
    )
    assert (await look(backend, built, "cat /tmp/uid; stat -c '%a %u:%g' /data/owned")).split() == [
        "1000",
        "750",
        "1000:1000",
    ]


async def test_the_second_build_runs_nothing_and_a_change_runs_what_follows(backend, make):
    text = "FROM host\nWORKDIR /w\nRUN date +%N > stamp\nCOPY f .\nRUN cat f stamp > both\n"
    first = await make(text, {"f": "1\n"})
    assert (first.ran, first.cached) == (4, 0)
    again = await make(text, {"f": "1\n"})
    assert (again.ran, again.cached, again.image) == (0, 4, first.image)
    stamp = await look(backend, first, "cat stamp")
    changed = await make(text, {"f": "2\n"})
    assert (changed.ran, changed.cached) == (2, 2)
    assert await look(backend, changed, "cat both") == f"2\n{stamp}"
    assert (await make(text.replace("both", "all"), {"f": "2\n"})).ran == 1


async def test_a_known_state_is_found_without_copying_the_build_folder(make, tmp_path, folders, monkeypatch):
    text = "FROM host\nADD pack.tar.gz /un/\nCOPY . /all\n"
    folders.write(tmp_path / "context", {"in/file": "inside\n"})
    with tarfile.open(tmp_path / "context" / "pack.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "context" / "in", "in")
    first = await make(text)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    again = await make(text)
    assert (again.ran, again.cached, again.image) == (0, 2, first.image)


async def test_a_cached_state_that_was_cleaned_away_is_built_again(backend, make):
    text = "FROM host\nRUN echo x > /x\n"
    first = await make(text)
    await backend.images.remove(first.image)
    again = await make(text)
    assert again.ran == 1
    assert await look(backend, again, "cat /x") == "x\n"


async def test_stages_copy_from_each_other_and_unneeded_ones_are_not_built(backend, make):
    built = await make(
        "FROM host AS tools\nRUN mkdir -p /out/d && echo t > /out/t && echo u > /out/d/u && chmod 755 /out/t\n"
        "FROM host AS broken\nRUN exit 1\n"
        "FROM host\nWORKDIR /app\nCOPY --from=tools /out/t /usr/local/bin/t\n"
        "COPY --from=0 /out/ ./all/\nCOPY --from=tools /out/d/* .\n"
    )
    assert (
        await look(backend, built, "cat /usr/local/bin/t all/t all/d/u u; stat -c %a /usr/local/bin/t")
        == "t\nt\nu\nu\n755\n"
    )
    named = await make("FROM host AS a\nRUN echo a > /a\nFROM host AS b\nRUN exit 1\n", target="a")
    assert await look(backend, named, "cat /a") == "a\n"


async def test_add_unpacks_local_archives(backend, make, tmp_path, folders):
    folders.write(tmp_path / "context", {"in/file": "inside\n"})
    with tarfile.open(tmp_path / "context" / "pack.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "context" / "in", "in")
    built = await make("FROM host\nADD pack.tar.gz /un/\nADD in/file /plain\nCOPY pack.tar.gz /kept.tgz\n")
    assert await look(backend, built, "cat /un/in/file /plain; test -f /kept.tgz") == "inside\ninside\n"


async def test_a_file_goes_into_a_folder_that_is_there(backend, make):
    built = await make("FROM host\nRUN mkdir /there\nCOPY f /there\nCOPY f /not/there\n", {"f": "f\n"})
    assert await look(backend, built, "cat /there/f /not/there") == "f\nf\n"


async def test_ignored_files_are_not_copied(backend, make):
    built = await make(
        "FROM host\nCOPY . /all\n", {".dockerignore": "*.log\nsecret\n", "a.log": "x", "secret/s": "x", "b": "b"}
    )
    assert (await look(backend, built, "cd /all && find . -type f | sort")).split() == [
        "./.dockerignore",
        "./Dockerfile",
        "./b",
    ]


async def test_a_cache_mount_is_there_for_run_only(backend, make):
    built = await make("FROM host\nRUN --mount=type=cache,target=/var/cache/x touch /var/cache/x/y && echo ok > /ok\n")
    assert await look(backend, built, "cat /ok; ls /var/cache | grep -c '^x$' || true") == "ok\n0\n"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            "FROM host\nRUN true\nRUN echo oops >&2; exit 7\n",
            CommandFailed,
            r"Dockerfile:3: RUN .*exited with 7:\noops",
        ),
        ("FROM host\nADD https://example.com/x /x\n", ConfigError, r"Dockerfile:2: ADD: .*remote sources"),
        ("FROM host\nCOPY absent /x\n", ConfigError, r"Dockerfile:2: COPY: 'absent' is not in the build folder"),
        ("FROM host\nCOPY ../x /x\n", ConfigError, "Dockerfile:2"),
        ("FROM no-such-image:1\n", ConfigError, r"Dockerfile:1: FROM no-such-image:1: no image"),
        ("FROM scratch\n", ConfigError, "Dockerfile:1: FROM scratch"),
        ("FROM host\nRUN --mount=type=secret,id=x true\n", ConfigError, r"Dockerfile:2: RUN: RUN --mount=type=secret"),
        ("FROM host\nCOPY --from=nowhere /a /b\n", ConfigError, "Dockerfile:2"),
        ("FROM host\nCOPY --from=0 /absent /b\n", ConfigError, "Dockerfile:2"),
        ("FROM host\nENV A\n", ConfigError, "Dockerfile:2: ENV"),
        ("FROM host\nCOPY a\n", ConfigError, "Dockerfile:2: COPY"),
        ("FROM host\nCOPY --chmod=u+x Dockerfile /x\n", ConfigError, "octal"),
        ("FROM host\nSHELL bash\n", ConfigError, "Dockerfile:2: SHELL"),
    ],
)
async def test_what_cannot_be_honoured_names_its_line(make, text, kind, said):
    with pytest.raises(kind, match=said):
        await make(text)


async def test_a_build_ends_with_its_time(make):
    with pytest.raises(Error, match="build_timeout_sec|ran out of time"):
        await make("FROM host\nRUN sleep 30\n", timeout_s=2.0)


async def test_a_run_that_wants_the_network_says_so(make):
    with pytest.raises(CommandFailed, match=r"Dockerfile:2") as caught:
        await make("FROM host\nRUN python3 -c \"import urllib.request as u; u.urlopen('http://example.invalid')\"\n")
    assert "--build-network allow:HOST" in caught.value.hint
    assert "rollyard image add" in caught.value.hint


async def test_the_way_out_that_a_build_without_network_names_can_be_taken(make, backend, tmp_path, folders):
    """A ready image of the name that task.toml gives is taken in place of the Dockerfile beside it."""
    ready = await make("FROM host\nRUN echo ready > /ready\n")
    await backend.images.add(ready.image, names=["ready-made"])
    environment = folders.write(tmp_path / "environment", {"Dockerfile": "FROM host\nRUN false\n"})
    site = Site(image="ready-made", build=str(environment))
    built = await Provision.of(backend).image(site, backend, Deadline.after(60, "boot"))
    assert await look(backend, built, "cat /ready") == "ready\n"


async def test_a_name_that_was_given_to_another_image_is_built_on_anew(make, backend):
    text = "FROM base-of-ours\nRUN cat /which > /seen\n"
    seen, ran = [], []
    for which in ("one", "two", "two", "one"):
        base = await make(f"FROM host\nRUN echo {which} > /which\n")
        await backend.images.add(base.image, names=["base-of-ours"])
        built = await make(text)
        seen.append(await look(backend, built, "cat /seen /which"))
        ran.append(built.ran)
    assert seen == ["one\none\n", "two\ntwo\n", "two\ntwo\n", "one\none\n"] and ran == [1, 1, 0, 0]


async def test_a_snapshot_is_of_the_image_that_was_opened(make, backend):
    """Whatever its name means by then."""
    one = await make("FROM host\nRUN echo one > /which\n")
    two = await make("FROM host\nRUN echo two > /which\n")
    await backend.images.add(one.image, names=["moved"])
    async with backend.open(SandboxSpec(image="moved")) as sandbox:
        await backend.images.add(two.image, names=["moved"])
        kept = await sandbox.snapshot()
    assert await look(backend, Built(image=kept), "cat /which") == "one\n"


async def test_a_backend_without_snapshots_cannot_build(backend, tmp_path, folders):
    class Frozen:
        name = "frozen"
        capabilities = type("C", (), {"snapshot": False})()

    root = folders.write(tmp_path / "c", {"Dockerfile": "FROM host\n"})
    with pytest.raises(Unsupported, match="frozen"):
        await build(root, Frozen(), backend.images, FileCache(tmp_path / "cache"))


async def test_failed_builds_leave_no_sandbox(make, backend):
    with pytest.raises(CommandFailed):
        await make("FROM host\nRUN exit 1\n")
    assert await backend.list() == []


async def test_each_state_keeps_what_its_instruction_wrote_and_no_process(make, backend):
    known = {record.id for record in backend.images.catalog.records()}
    built = await make(
        "FROM host\n"
        "RUN head -c 3000000 /dev/zero > /srv/large && (sleep 60 & echo $! > /srv/pid)\n"
        "RUN ! grep -qs sleep /proc/$(cat /srv/pid)/comm && echo one > /srv/one\n"
        "RUN echo two > /srv/two\n"
    )
    made = [record for record in backend.images.catalog.records() if record.id not in known]
    assert [record.bytes > 2_000_000 for record in made] == [True, False, False]
    assert await look(backend, built, "cat /srv/one /srv/two; wc -c < /srv/large") == "one\ntwo\n3000000\n"


ATTRIBUTES = """
import os, struct
nobody = 0xFFFFFFFF
entries = [(1, 7, nobody), (2, 6, 1234), (4, 5, nobody), (16, 7, nobody), (32, 0, nobody)]  # user 1234 may read and write
access = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
os.mkdir("/srv/given")
os.setxattr("/srv/given", "system.posix_acl_access", access)
os.setxattr("/srv/given", "system.posix_acl_default", access)
open("/srv/program", "w").close()
os.setxattr("/srv/program", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0))
os.setxattr("/srv/program", "user.note", b"kept")
"""
READ_ATTRIBUTES = """
import os
for path in ("/srv/given", "/srv/program"):
    for name in sorted(os.listxattr(path)):
        print(path, name, os.getxattr(path, name).hex())
"""


async def test_access_lists_capabilities_and_attributes_are_kept(make, backend):
    built = await make(
        "FROM host\nCOPY set.py read.py /\nRUN python3 /set.py && python3 /read.py > /before\nRUN echo > /srv/given/more\n",
        {"set.py": ATTRIBUTES, "read.py": READ_ATTRIBUTES},
    )
    before = await look(backend, built, "cat /before")
    assert before.count("posix_acl") == 2 and "capability" in before and "user.note 6b657074" in before
    assert await look(backend, built, "python3 /read.py") == before
