"""Schemathesis over the plane's own OpenAPI document: whatever fits it, and much that does not, is answered as it says."""

import asyncio
import json
from urllib.parse import quote

import httpx
import pytest

from rollyard.plane.api.routes import ROUTES
from rollyard.plane.service.access import NewKey
from rollyard.testing.serve import serve_app

pytestmark = pytest.mark.anyio
ONE_KIND = pytest.mark.parametrize("plane_url", ["sqlite"], indirect=True)
PER_OPERATION = 2


@pytest.mark.slow
@ONE_KIND
async def test_generated_requests_are_answered_as_the_document_says(plane, tmp_path):
    """Run in a thread of its own, since the generator blocks; the application is asked over real HTTP."""
    plane.drain.stopping.set()  # streams end at once; creations are refused with a status that the document has
    _, key = await plane.access.issue(NewKey(role="admin", owner="ann"))
    async with serve_app(plane.app) as url:
        seen = await asyncio.to_thread(generated, url, key)
    assert len(seen) == len(ROUTES) and all(seen.values())
    assert {200, 400, 404} <= set().union(*seen.values())


def generated(url, key):
    """Statuses by operation; raises at the first answer that is a server's failure or not of a documented shape."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    seen = {}
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
        for result in schema.get_all_operations():
            operation = result.ok()
            name = operation.definition.raw["operationId"]
            check = checking(client, seen.setdefault(name, set()), operation.definition.raw["responses"])
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    strategy = operation.as_strategy(generation_mode=mode)
                    test = settings(
                        max_examples=PER_OPERATION,
                        deadline=None,
                        database=None,
                        phases=[Phase.generate],
                        suppress_health_check=list(HealthCheck),
                    )(given(case=strategy)(check))
                    test()
                except Exception as error:  # two kinds without a public name; the rest is raised
                    if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):
                        raise
    return seen


def checking(client, statuses, documented):
    def check(case):
        answer = client.request(**sent(case))
        status = str(answer.status_code)
        statuses.add(answer.status_code)
        assert status in documented or f"{status[0]}XX" in documented, (case, status, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) >= {"code", "message"}

    return check


def sent(case):
    """A generated case as an HTTP request, whatever is in it."""
    path = case.operation.path
    for name, value in (case.path_parameters or {}).items():
        path = path.replace("{" + name + "}", quote(str(value), safe="") or "%20")
    query = {str(name): str(value) for name, value in (dict(case.query or {})).items()}
    query["wait_s"] = "0" if "wait_s" in query else query.get("wait_s", "0")
    body = case.body
    content = b""
    if body is not None and type(body).__name__ != "NotSet":
        content = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
    return {"method": case.method, "url": path, "params": query, "content": content}
