"""Templates, snapshots, users, watchers and refusals of the E2B server, by the real SDK, with local sandboxes underneath."""

import asyncio
import time
from datetime import timedelta

import aiohttp
import pytest

from rollyard.core.errors import UnknownName
from rollyard.sandbox.local.backend import LocalBackend
from tests.plane.e2b_server import serving
from tests.plane.served import serving as serving_plane

e2b = pytest.importorskip("e2b", reason="the e2b SDK is not installed")
pytestmark = pytest.mark.anyio
KEY = "e2b_" + "0" * 40


@pytest.fixture
async def backend(tmp_path):
    async with LocalBackend(root=tmp_path / "home") as made:
        yield made


@pytest.fixture
async def url(backend):
    async with serving(backend) as address:
        yield address


def account(url):
    return {"api_key": KEY, "api_url": url}


def opened(url, *template, **options):
    return e2b.AsyncSandbox.create(*template, sandbox_url=url, timeout=120, **account(url), **options)


async def test_a_template_is_built_opened_by_name_listed_and_removed_with_its_image(backend, url, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.txt").write_text("copied")
    steps = (
        e2b.AsyncTemplate(file_context_path=str(tmp_path))
        .from_base_image()
        .copy("app/", "/srv/app/", user="root", mode=0o640)
        .set_envs({"COLOUR": "blue"})
        .set_workdir("/srv/app")
        .run_cmd("whoami > /tmp/who")
        .set_start_cmd("echo started > /tmp/started; sleep 100", "test -e /tmp/started")
    )
    assert not await e2b.AsyncTemplate.exists("mine", **account(url))
    made = await e2b.AsyncTemplate.build(steps, "mine:v1", **account(url))
    assert await e2b.AsyncTemplate.exists("mine:v1", **account(url))
    box = await opened(url, "mine:v1")
    done = await box.commands.run(
        "cat a.txt /tmp/who /tmp/started; echo $COLOUR; pwd; stat -c '%U %a' a.txt", user="root"
    )
    assert done.stdout.split("\n")[:-1] == ["copieduser", "started", "blue", "/srv/app", "root 640"]
    info = await box.get_info()
    assert info.template_id == made.template_id
    tagged = await e2b.AsyncTemplate.assign_tags("mine:v1", ["stable"], **account(url))
    assert (tagged.build_id, tagged.tags) == (made.build_id, ["stable"])
    (image,) = {found.image for found in await backend.list()}
    async with aiohttp.ClientSession(url, headers={"X-API-KEY": KEY}) as client:
        async with client.get("/templates") as answer:
            (listed,) = await answer.json()
            assert (listed["names"], listed["buildStatus"]) == (["mine"], "ready")
        await box.kill()
        async with client.delete(f"/templates/{made.template_id}") as answer:
            assert answer.status == 204
    assert not await e2b.AsyncTemplate.exists("mine:v1", **account(url))
    with pytest.raises(UnknownName):
        await backend.images.resolve(image)


async def test_a_build_that_fails_says_which_step_and_why(url):
    steps = e2b.AsyncTemplate().from_base_image().run_cmd("echo first").run_cmd("echo oh no; exit 3")
    with pytest.raises(e2b.BuildException, match="exit status 3: oh no"):
        await e2b.AsyncTemplate.build(steps, "broken", **account(url))
    assert not await e2b.AsyncTemplate.exists("broken", **account(url))


async def test_a_snapshot_has_a_name_a_list_and_an_end(url):
    box = await opened(url)
    await box.files.write("/home/user/kept", "kept")
    taken = await box.create_snapshot("state", **account(url))
    copy = await opened(url, "state")
    assert await copy.files.read("kept") == "kept"
    found = await e2b.AsyncSandbox.list_snapshots(box.sandbox_id, **account(url)).next_items()
    assert [one.snapshot_id for one in found] == [taken.snapshot_id]
    assert await e2b.AsyncSandbox.delete_snapshot(taken.snapshot_id, **account(url))
    assert not await e2b.AsyncSandbox.delete_snapshot(taken.snapshot_id, **account(url))


@pytest.mark.parametrize(
    "asked",
    [
        {"network": {"deny_out": ["10.0.0.1"]}},
        {"network": {"allow_public_traffic": False}},
        {"network": {"mask_request_host": "localhost"}},
    ],
    ids=["deny", "private", "mask"],
)
async def test_what_is_not_done_is_refused_by_name_and_nothing_is_opened(backend, url, asked):
    with pytest.raises(e2b.SandboxException, match="is not served here"):
        await opened(url, **asked)
    assert await backend.list() == []


async def test_what_is_not_served_is_said_as_json(url):
    async with aiohttp.ClientSession(url, headers={"X-API-KEY": KEY}) as client:
        for path in ("/sandboxes/x/logs", "/v2/sandboxes/x/logs", "/volumes/v1", "/secrets", "/v2/templates/x/unknown"):
            async with client.get(path) as answer:
                told = await answer.json()
                assert (answer.status, told["code"]) == (501, 501), path


async def test_lists_are_filtered_as_asked(url):
    box = await opened(url)
    info = await box.get_info()

    async def found(**query):
        pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(**query), **account(url))
        return [one.sandbox_id for one in await pages.next_items()]

    assert await found(template="base") == [box.sandbox_id]
    assert await found(template="another") == []
    assert await found(started_after=info.started_at) == [box.sandbox_id]
    assert await found(started_after=info.started_at + timedelta(seconds=1)) == []


async def test_a_sandbox_past_its_end_is_gone_before_it_is_swept(tmp_path):
    async with serving_plane(tmp_path, engine="local") as env:
        options = {"api_key": env["E2B_API_KEY"], "api_url": env["E2B_API_URL"]}
        box = await e2b.AsyncSandbox.create(timeout=120, sandbox_url=env["E2B_API_URL"], **options)
        await box.set_timeout(1)
        end = time.time() + 1.0
        while time.time() <= end:
            await asyncio.sleep(0.1)
        assert not await box.is_running()
        with pytest.raises(e2b.SandboxNotFoundException):
            await box.get_info()
        assert await e2b.AsyncSandbox.list(**options).next_items() == []


async def test_programs_and_files_are_the_user_s_with_its_home(url):
    box = await opened(url)
    done = await box.commands.run("whoami; pwd; echo $HOME")
    assert done.stdout.split() == ["user", "/home/user", "/home/user"]
    written = await box.files.write("notes/a.txt", "text")
    assert written.path == "/home/user/notes/a.txt"
    await box.commands.run("ln -s a.txt notes/link")
    entry = await box.files.get_info("notes/link")
    assert (entry.type, entry.symlink_target, entry.owner) == (e2b.FileType.FILE, written.path, "user")
    assert (await box.commands.run("whoami", user="root")).stdout == "root\n"
    with pytest.raises(e2b.AuthenticationException, match="invalid username: 'nobody-here'"):
        await box.commands.run("whoami", user="nobody-here")


async def test_a_signed_url_leads_to_its_own_sandbox_until_its_end(url):
    boxes = [await opened(url), await opened(url)]
    for number, box in enumerate(boxes):
        await box.files.write("/tmp/mine", str(number))
    async with aiohttp.ClientSession() as client:
        for number, box in enumerate(boxes):
            async with client.get(box.download_url("/tmp/mine", "user", 60)) as answer:
                assert await answer.text() == str(number)
        async with client.get(boxes[0].download_url("/tmp/mine", "user", -60)) as answer:
            assert await answer.json() == {"code": 401, "message": "signature is already expired"}
        async with client.get(boxes[0].download_url("/tmp/mine", "user", 60).replace("mine", "other")) as answer:
            assert answer.status == 401


async def test_a_directory_is_watched_as_a_stream(url):
    box, events = await opened(url), asyncio.Queue()
    await box.files.make_dir("seen")
    watch = await box.files.watch_dir("seen", on_event=events.put_nowait, recursive=True)
    await box.files.write("seen/a", "1")
    async with asyncio.timeout(30):
        assert [(await events.get()).type.value, (await events.get()).type.value] == ["create", "write"]
        await box.files.rename("seen/a", "seen/b")
        found = [await events.get() for _ in range(3)]
        assert [(one.name, one.type.value) for one in found] == [("a", "rename"), ("b", "create"), ("b", "write")]
        await box.files.remove("seen/b")
        assert (await events.get()).type.value == "remove"
    await watch.stop()
    with pytest.raises(e2b.FileNotFoundException):
        await box.files.watch_dir("nowhere", on_event=events.put_nowait)


@pytest.mark.adversarial
async def test_files_that_another_owner_sent_under_a_hash_are_in_no_build_of_yours(tmp_path):
    """A client names its files by a hash of its own making, which nobody can check against the archive."""
    digest = "a" * 64
    async with serving_plane(tmp_path, engine="noop") as env:
        url, admin = env["E2B_API_URL"], {"Authorization": f"Bearer {env['ROLLYARD_KEY']}"}
        async with aiohttp.ClientSession() as client:

            async def link(owner):
                asked = {"role": "owner", "owner": owner}
                async with client.post(f"{env['ROLLYARD_URL']}/v1/keys", json=asked, headers=admin) as answer:
                    own = {"X-API-KEY": (await answer.json())["key"]}
                async with client.post(f"{url}/v3/templates", json={"name": "mine"}, headers=own) as answer:
                    template = (await answer.json())["templateID"]
                where = f"{url}/templates/{template}/files/{digest}"
                async with client.get(where, headers=own) as answer:
                    assert answer.status == 201
                    found = await answer.json()
                return found, where, own

            bobs, where, own = await link("bob")
            async with client.put(bobs["url"], data=b"evil") as answer:
                assert answer.status == 200
            async with client.get(where, headers=own) as answer:
                assert (await answer.json())["present"]
            anns, _, _ = await link("ann")
            assert not anns["present"]


@pytest.mark.adversarial
async def test_a_folder_of_the_server_is_no_template(url, tmp_path):
    for name in (str(tmp_path), "~", "./x", "../x"):
        with pytest.raises(e2b.SandboxException, match="an image has a name"):
            await opened(url, name)
