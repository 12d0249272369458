"""What an agent left: the patch, the kept copy, the artifacts; bounded, and never following a link out."""

import pytest

import rollyard as ry
from rollyard.runs.rollout import collect

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(backend):
    async with backend.open(ry.SandboxSpec()) as opened:
        await opened.mkdir("/place")
        yield opened


async def test_a_patch_shows_new_changed_and_deleted_files_and_names_binary_ones(box):
    await box.exec("printf 'a\\n' > kept; printf 'x' > gone; printf '\\377' > bin; mkdir .git d; echo g > .git/c; echo d > d/e",
                   cwd="/place", timeout=5)  # fmt: skip
    before = await collect.copy_out(box, "/place", pack=False)
    assert before.tar is None and before.files == (await collect.copy_out(box, "/place")).files
    await box.exec("printf 'b\\n' > kept; rm gone; echo new > new; printf '\\376' > bin; echo h > .git/c",
                   cwd="/place", timeout=5)  # fmt: skip
    text = collect.patch(before, await collect.copy_out(box, "/place"))
    assert "--- a/kept\n+++ b/kept\n@@ -1 +1 @@\n-a\n+b\n" in text
    assert "--- a/gone\n+++ /dev/null" in text
    assert "--- /dev/null\n+++ b/new" in text
    assert "Binary file bin differs" in text
    assert ".git" not in text


async def test_a_link_to_the_hosts_files_brings_nothing_of_the_host_along(box, tmp_path):
    await box.exec("ln -s /etc/passwd link; ln -s / root; echo x > file", cwd="/place", timeout=5)
    copy = await collect.copy_out(box, "/place")
    assert set(copy.files) == {"file"}
    collect.unpack(copy.tar, tmp_path)
    assert (tmp_path / "file").read_text() == "x\n"


async def test_a_directory_over_the_bound_is_not_kept_and_the_patch_says_so(box):
    await box.exec(f"head -c {collect.MAX_WORKDIR + 1} /dev/zero > big", cwd="/place", timeout=20)
    copy = await collect.copy_out(box, "/place")
    assert copy.tar is None
    assert "no patch" in collect.patch(collect.DirectoryCopy(), copy)


async def test_artifacts_match_files_folders_and_globs_and_miss_quietly(box):
    await box.exec("mkdir -p d/e; echo 1 > d/a.log; echo 2 > d/e/b.log; echo 3 > c.txt", cwd="/place", timeout=5)
    found = await collect.artifacts(box, ["/place/c.txt", "/place/d/*.log", "/none/*", "/place/nothing"])
    assert found == {"/place/c.txt": b"3\n", "/place/d/a.log": b"1\n", "/place/d/e/b.log": b"2\n"}
