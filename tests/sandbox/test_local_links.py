"""Links that a program of another user left: the host changes nothing through them that their owner could not."""

import pytest

import rollyard as ry
from rollyard.core.errors import PathError

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


@pytest.fixture
async def box(backend):
    async with backend.open(ry.SandboxSpec()) as box:
        if not box.capabilities.users:
            pytest.skip("this machine gives a sandbox one user id only")
        await box.exec("mkdir -p /work /secret && chown 1000:1000 /work && echo root > /secret/file", timeout=10)
        yield box


async def plant(box, script):
    done = await box.exec(["sh", "-ec", script], user="1000", cwd="/work", timeout=10)
    assert done.ok, done.text


async def content(box):
    return (await box.exec("cat /secret/file; ls -A /secret; stat -c %u:%a /secret /secret/file", timeout=10)).text


@pytest.mark.parametrize("user", [None, "1000"])
@pytest.mark.parametrize(
    ("link", "path"),
    [
        ("ln -s /secret/file link", "/work/link"),
        ("ln -s /secret/new link", "/work/link"),
        ("ln -s /secret link", "/work/link/new"),
        ("ln -s /secret link", "/work/link/deep/new"),
        ("ln -s b link; ln -s ../secret b", "/work/link/file"),
    ],
)
async def test_a_write_does_not_follow_them_as_root(box, link, path, user):
    before = await content(box)
    await plant(box, link)
    with pytest.raises(PathError):
        await box.write(path, b"forged", mode=0o777, user=user)
    assert await content(box) == before


@pytest.mark.parametrize("user", [None, "1000"])
async def test_neither_do_directories_uploads_and_removals(box, tmp_path, user):
    before = await content(box)
    (tmp_path / "file").write_text("forged")
    await plant(box, "ln -s /secret link")
    with pytest.raises(PathError):
        await box.mkdir("/work/link/made", user=user)
    with pytest.raises(PathError):
        await box.upload_dir(str(tmp_path), "/work/link", user=user)
    with pytest.raises(PathError):
        await box.remove("/work/link/file")
    assert await content(box) == before
    await box.remove("/work/link")
    assert await content(box) == before


@pytest.mark.parametrize("user", [None, "1000"])
async def test_links_to_what_their_owner_may_write_work(box, tmp_path, user):
    (tmp_path / "up").write_text("up")
    await plant(box, "mkdir own; ln -s own link; ln -s own/file name")
    await box.write("/work/link/a", b"a", user=user)
    await box.write("/work/name", b"b", user=user)
    await box.mkdir("/work/link/d/e", user=user)
    await box.upload_dir(str(tmp_path), "/work/link/d", user=user)
    assert (await box.exec("cat own/a own/file own/d/up", cwd="/work", timeout=10)).text == "abup"
    await box.remove("/work/link/a")
    assert not await box.exists("/work/own/a")


async def test_links_of_root_are_followed_as_ever(box, tmp_path):
    (tmp_path / "up").write_text("up")
    await box.exec("ln -s /secret /srv/link; ln -s /secret/file /srv/name", timeout=10)
    await box.write("/srv/link/x", b"x", user="1000")
    await box.write("/srv/name", b"new")
    await box.mkdir("/srv/link/d", user="1000")
    await box.upload_dir(str(tmp_path), "/srv/link/d", user="1000")
    done = await box.exec("cat /secret/x /secret/file /secret/d/up; stat -c :%u /secret/x /secret/d/up", timeout=10)
    assert done.text == "xnewup:1000\n:1000\n"


async def test_the_host_has_its_own_rights_again_afterwards(box):
    await plant(box, "mkdir own; ln -s own link")
    await box.write("/work/link/a", b"a")
    await box.write("/secret/again", b"x")
    assert (await box.stat("/secret/again")).size == 1
