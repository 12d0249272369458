"""The page's tables of a control plane are the same on every storage, also where there is no store of runs."""

import re

import aiohttp
import msgspec
import pytest

from rollyard.core.errors import ConfigError, PlaneUnauthorized
from rollyard.core.plane import EnvSpec
from rollyard.core.plane_tables import TableQuery
from rollyard.page.app import plane_page_app
from rollyard.page.planes import PlaneTables
from rollyard.plane.server.operator import PlaneOperator
from rollyard.plane.service.access import NewKey
from rollyard.plane.service.create_request import CreateInstance
from rollyard.testing.serve import serve_app
from tests.plane.conftest import OWNER

pytestmark = pytest.mark.anyio


async def filled(plane):
    """Three instances of two owners, one of which is gone, and an environment."""
    await plane.hub.create("weather", "1.0", EnvSpec(image="host", description="Oslo"), by=OWNER)
    made = []
    for owner, run_id in (("ann", "run_1"), ("bob", None), ("ann", None)):
        asked = CreateInstance(image="host", run_id=run_id, labels={"team": owner})
        made.append(await plane.instances.create(asked, owner=owner))
        plane.clock.now += 1.0
    await plane.instances.delete(made[0].id)
    await plane.access.issue(NewKey(role="trainer", owner="carl"))
    await plane.store.set_terms("bob", quota=7)
    await plane.sweeper.once()
    return [one.id for one in made]


async def test_rows_are_searched_sorted_and_paged(plane):
    first, second, third = await filled(plane)

    async def ids(**look):
        found, total = await plane.store.instances_page(TableQuery(**{"sort": "created_at", **look}))
        return [one.id for one in found], total

    assert await ids() == ([first, second, third], 3)
    assert await ids(descending=True, limit=1) == ([third], 3)
    assert await ids(descending=True, limit=1, offset=2) == ([first], 3)
    assert await ids(same={"state": "running", "owner": "ann"}) == ([third], 1)
    assert await ids(search="BOB") == ([second], 1)
    assert await ids(search="run_1") == ([first], 1)
    assert (await ids(sort="env", same={"owner": "bob"}))[0] == [second]
    found, total = await plane.store.envs_page(TableQuery(sort="name", search="oslo"))
    assert ([one.id for one in found], total) == (["weather@1.0"], 1)
    owners, _ = await plane.store.owners_page(TableQuery(sort="owner"))
    assert {(one.owner, one.used, one.quota) for one in owners} >= {("ann", 1, None), ("bob", 1, 7)}
    assert await plane.store.count_states() == {("noop", "deleted"): 1, ("noop", "running"): 2}
    assert (await plane.store.sweep_lease()).fence == 1 and await plane.store.in_use()


async def test_the_tables_are_shown_where_there_are_no_runs(plane):
    first, _, third = await filled(plane)
    app = plane_page_app(PlaneTables(plane.store, plane.instances.engines, plane.sweeper, 40), "key".__eq__)
    key = {"Authorization": "Bearer key"}
    async with serve_app(app) as url, aiohttp.ClientSession(url) as http:

        async def shown(path, **headers):
            async with http.get(path, headers=headers) as answer:
                return answer.status, await answer.text()

        status, text = await shown("/")
        assert (status, "Control plane" in text, "Compare" in text) == (200, True, False)
        assert (await shown("/plane/instances"))[0] == 401
        status, text = await shown("/plane/instances?sort=created_at", **key)
        assert status == 200 and first in text and third in text
        status, text = await shown(f"/plane/instances/{first}", **key)
        assert status == 200 and "deleted" in text and "/runs/" not in text
        for path, words in (("/plane/hub", "weather"), ("/plane/quotas", "bob")):
            status, text = await shown(path, **key)
            assert status == 200 and words in text
        assert (await shown("/plane/instances/inst_none", **key))[0] == 404


async def test_keys_and_quotas_are_changed_by_forms_of_this_page_and_with_the_admin_key_alone(plane):
    await filled(plane)
    operator = PlaneOperator(plane.store, plane.access, "key")
    app = plane_page_app(PlaneTables(plane.store, plane.instances.engines, plane.sweeper, 40), "key".__eq__, operator)
    async with serve_app(app) as url, aiohttp.ClientSession(url) as http:

        async def sent(path, key="key", token=operator.form_token, **form):
            headers = {"Authorization": f"Bearer {key}"}
            asked = http.post(path, data={**form, "token": token}, headers=headers, allow_redirects=False)
            async with asked as answer:
                return answer.status, await answer.text()

        trainer = {"role": "trainer", "owner": "dora"}
        before = await plane.store.list_keys()
        assert (await sent("/plane/keys", key="other", **trainer))[0] == 401
        assert (await sent("/plane/keys", token="guess", **trainer))[0] == 403
        assert (await sent("/plane/quotas", token="", owner="bob", quota="1"))[0] == 403
        assert await plane.store.list_keys() == before and (await plane.store.usage("bob")).quota == 7
        status, text = await sent("/plane/keys", role="king", owner="dora")
        assert status == 400 and "is no role of a key: it is one of admin, owner" in text
        status, text = await sent("/plane/keys", **trainer)
        made = re.search(r"ryk-[\w-]+", text)[0]
        assert status == 200 and (await plane.access.caller(f"Bearer {made}")).owner == "dora"
        (key,) = [one for one in await plane.store.list_keys() if one.owner == "dora"]
        assert (await sent(f"/plane/keys/{key.id}/revoke", token="guess"))[0] == 403
        assert (await sent(f"/plane/keys/{key.id}/revoke"))[0] == 303
        with pytest.raises(PlaneUnauthorized):
            await plane.access.caller(f"Bearer {made}")
        async with http.get("/plane/keys", headers={"Authorization": "Bearer key"}) as answer:
            assert made not in await answer.text()  # it was shown once
        assert (await sent("/plane/quotas", owner="bob", quota="3", rate="0.5"))[0] == 303
        assert msgspec.structs.astuple(await plane.store.usage("bob"))[-2:] == (3, 0.5)
        for bad, words in (
            ({"quota": "many"}, "is no whole number"), ({"quota": "-1"}, "numbers from 0"), ({"rate": "nan"}, "numbers from 0")
        ):  # fmt: skip
            status, text = await sent("/plane/quotas", owner="bob", **bad)
            assert status == 400 and words in text
        assert (await plane.store.usage("bob")).quota == 3


async def test_forms_without_a_key_that_opens_them_are_refused():
    with pytest.raises(ConfigError):
        plane_page_app(PlaneTables(None), None, PlaneOperator(None, None, "key"))
