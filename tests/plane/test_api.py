"""The native API: role by route, one status for each kind of refusal, idempotency, sizes, the OpenAPI document."""

import re

import httpx
import pytest

from rollyard.core.plane import ROLES
from rollyard.plane.api.routes import ROUTES
from rollyard.plane.service.access import NewKey

pytestmark = pytest.mark.anyio
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
async def served(plane):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=plane.app), base_url="http://plane") as client:
        yield client


async def bearer(plane, role, owner="ann", **narrowed):
    _, text = await plane.access.issue(NewKey(role=role, owner=owner, **narrowed))
    return {"Authorization": f"Bearer {text}"}


def told(response):
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("plane_url", ["sqlite"], indirect=True)
async def test_every_role_on_every_route_is_let_in_or_refused_as_the_table_says(plane, served):
    """The request bodies are nonsense: who is let in gets another refusal or an answer, who is not gets 403."""
    plane.drain.stopping.set()  # a stream that never ends would never be answered here
    keys = {role: await bearer(plane, role) for role in ROLES}
    for entry in ROUTES:
        path = re.sub(r"{\w+}", "nothing", entry.path)
        assert told(await served.request(entry.method, path)) == (401, "unauthorized"), entry
        wrong = await served.request(entry.method, path, headers={"Authorization": "Bearer ryk-wrong"})
        assert told(wrong) == (401, "unauthorized"), entry
        for role in ROLES:
            got = await served.request(entry.method, path, headers=keys[role], content=b"[]")
            if role in entry.roles:
                assert got.status_code not in (401, 403, 500), (entry, role)
            else:
                assert told(got) == (403, "forbidden"), (entry, role)


async def test_an_instance_from_its_creation_to_its_history(plane, served):
    ann = await bearer(plane, "owner")
    made = await served.post("/v1/envs", headers=ann, json={"name": "e", "version": "1", "spec": {"image": "python"}})
    assert made.status_code == 201 and RFC3339.fullmatch(made.json()["created_at"])
    headers = ann | {"Idempotency-Key": "once"}
    first = await served.post("/v1/instances", headers=headers, json={"env": "e@1", "labels": {"a": "b"}})
    again = await served.post("/v1/instances", headers=headers, json={"env": "e@1", "labels": {"a": "b"}})
    assert first.status_code == 201 and first.json() == again.json()
    where = f"/v1/instances/{first.json()['id']}"
    assert {"ref", "plan"}.isdisjoint(first.json())
    shown = {name: value for name, value in first.json().items() if name != "token"}
    assert (await served.get("/v1/instances?label=a=b", headers=ann)).json()["items"] == [shown]
    assert (await served.post(f"{where}/extend", headers=ann, json={"ttl_s": 60})).status_code == 200
    batch = await served.post("/v1/instances/delete", headers=ann, json={"labels": {"a": "b"}, "ids": ["inst_x"]})
    assert batch.json()["outcomes"] == {first.json()["id"]: "deleted", "inst_x": "not_found"}
    history = (await served.get(f"{where}/history", headers=ann)).json()["history"]
    assert [line["state"] for line in history] == ["creating", "running", "deleting", "deleted"]
    assert all(RFC3339.fullmatch(line["at"]) for line in history)


async def test_each_kind_of_refusal_has_its_own_status_and_an_id(plane, served):
    ann, admin = await bearer(plane, "owner"), await bearer(plane, "admin", "root")
    made = (await served.post("/v1/instances", headers=ann, json={"image": "host"})).json()["id"]
    gone = (await served.post("/v1/instances", headers=ann, json={"image": "host"})).json()["id"]
    assert (await served.delete(f"/v1/instances/{gone}", headers=ann)).status_code == 204
    await served.put("/v1/owners/ann", headers=admin, json={"quota": 1})
    await served.post("/v1/envs", headers=ann, json={"name": "e", "version": "1"})
    cases = {
        400: await served.post("/v1/instances", headers=ann, json={"image": "host", "colour": "red"}),
        401: await served.get("/v1/envs"),
        403: await served.get("/v1/keys", headers=ann),
        404: await served.get(f"/v1/instances/{gone}", headers=ann),
        409: await served.post("/v1/envs", headers=ann, json={"name": "e", "version": "1"}),
        410: await served.post(f"/v1/instances/{gone}/heartbeat", headers=ann),
        413: await served.post("/v1/envs", headers=ann, content=b"x" * (2**20 + 1)),
        429: await served.post("/v1/instances", headers=ann, json={"image": "host"}),
        501: await served.post(f"/v1/instances/{made}/exec", headers=ann, json={"command": "true"}),
    }
    assert {status: answer.status_code for status, answer in cases.items()} == {status: status for status in cases}
    errors = [answer.json()["error"] for answer in cases.values()]
    assert len({error["code"] for error in errors}) == len({error["id"] for error in errors}) == len(cases)


async def test_another_owners_instance_does_not_exist(plane, served):
    ann, bob = await bearer(plane, "owner"), await bearer(plane, "owner", "bob")
    first, second = [
        (await served.post("/v1/instances", headers=ann, json={"image": "host"})).json()["id"] for _ in range(2)
    ]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/heartbeat"), ("GET", "/history"), ("POST", "/exec")):
        assert (await served.request(method, f"/v1/instances/{first}{path}", headers=bob)).status_code == 404
    assert (await served.get("/v1/instances", headers=bob)).json()["items"] == []
    swept = await served.post("/v1/instances/delete", headers=bob, json={"ids": [first]})
    assert swept.json()["outcomes"] == {first: "not_found"}
    acting = await served.post("/v1/instances", headers=bob, json={"image": "host", "owner": "ann"})
    assert told(acting) == (403, "forbidden")
    agent = await bearer(plane, "agent", instance_id=first)
    assert (await served.get(f"/v1/instances/{first}", headers=agent)).status_code == 200
    assert (await served.get(f"/v1/instances/{second}", headers=agent)).status_code == 404


async def test_keys_are_kept_as_hashes_and_end_when_revoked(plane, served):
    admin = await bearer(plane, "admin", "root")
    made = (await served.post("/v1/keys", headers=admin, json={"role": "trainer", "owner": "ann"})).json()
    listing = await served.get("/v1/keys", headers=admin)
    assert made["key"] not in listing.text and "digest" not in listing.text
    trainer = {"Authorization": f"Bearer {made['key']}"}
    assert (await served.get("/v1/usage", headers=trainer)).status_code == 200
    assert (await served.delete(f"/v1/keys/{made['id']}", headers=admin)).status_code == 204
    assert (await served.get("/v1/usage", headers=trainer)).status_code == 401


async def test_the_openapi_document_has_every_route(served):
    found = (await served.get("/openapi.json")).json()
    assert {(m.upper(), p) for p, ms in found["paths"].items() for m in ms} == {(e.method, e.path) for e in ROUTES}
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', (await served.get("/openapi.json")).text))
    assert refs <= set(found["components"]["schemas"])


@pytest.mark.parametrize("plane_url", ["sqlite"], indirect=True)
async def test_an_owners_rate_is_429_with_the_time_to_wait_and_another_code_than_the_quota(plane, served):
    ann, admin = await bearer(plane, "owner"), await bearer(plane, "admin", "root")
    terms = await served.put("/v1/owners/ann", headers=admin, json={"rate": 0.5})
    assert (terms.json()["rate"], terms.json()["quota"]) == (0.5, None)
    assert (await served.post("/v1/instances", headers=ann, json={"image": "host"})).status_code == 201
    refused = await served.post("/v1/instances", headers=ann, json={"image": "host"})
    assert told(refused) == (429, "rate_limited") and refused.headers["retry-after"] == "2"
    plane.clock.now += 2
    assert (await served.post("/v1/instances", headers=ann, json={"image": "host"})).status_code == 201
    for body in ({}, {"rate": -1}, {"quota": -1}, {"rate": "fast"}):
        assert (await served.put("/v1/owners/ann", headers=admin, json=body)).status_code == 400
