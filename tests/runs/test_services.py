"""Tasks of several services, run: their services are up before the agent, and end as the task says."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import yaml

import rollyard as ry
from rollyard.core.events import Event
from rollyard.core.task import Task, VerifierSpec
from rollyard.sandbox.docker.engine import DockerEngine

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples" / "services"
SERVER = """import http.server, os, sys
class Count(http.server.BaseHTTPRequestHandler):
    calls = 0
    def do_GET(self):
        Count.calls += 1
        self.send_response(200); self.end_headers()
        self.wfile.write(f'{os.environ["GREETING"]} {Count.calls}'.encode())
http.server.HTTPServer(('127.0.0.1', 9000), Count).serve_forever()
"""
ASK = "python3 -c \"import urllib.request; print(urllib.request.urlopen('http://counter:9000', timeout=5).read().decode())\""
HEALTH = {
    "test": ["CMD", "python3", "-c", "import socket; socket.create_connection(('counter', 9000))"],
    "interval": "10s",
}
COUNTER = {"command": ["python3", "-c", SERVER], "environment": {"GREETING": "hello"}, "healthcheck": HEALTH}


@pytest.fixture
def make(tmp_path):
    def make(services: dict, *commands: str, grade: str = "sealed", **rest) -> Task:
        path = tmp_path / "docker-compose.yaml"
        path.write_text(yaml.safe_dump({"services": {"main": {}, **services}, "volumes": {"shared": None}}))
        verifier = VerifierSpec(kind="commands", grade=grade, options={"commands": list(commands)})
        return Task(id="t", instruction="x", compose=str(path), workdir="/app", verifier=verifier, **rest)

    return make


async def attempt(task: Task, backend, *lines: str, **rest):
    steps = {"steps": [*({"shell": line} for line in lines), {"text": "done"}]}
    events: list[Event] = []

    async def sink(event: Event) -> None:
        events.append(event)

    policy = ry.policy.scripted(steps)
    done = await ry.run_rollout(task, agent="shell-agent", policy=policy, sandbox=backend, sink=sink, **rest)
    return done, events


@pytest.mark.parametrize("grade", ["sealed", pytest.param("shared", marks=pytest.mark.slow)])
async def test_the_agent_and_the_tests_reach_one_and_the_same_service(make, backend, grade):
    """It counts: the first answer is the agent's, the second the tests', after the agent is dead."""
    task = make({"counter": COUNTER}, 'test "$(cat out.txt)" = "hello 1"', f'test "$({ASK})" = "hello 2"', grade=grade)
    done, events = await attempt(task, backend, f"{ASK} > out.txt; setsid sleep 999 > out.log 2>&1 &")
    assert (done.failure, done.reward) == (None, 1.0), (done.failure, done.verdict)
    started, closed = ([e for e in events if e.name == f"service.{how}"] for how in ("started", "closed"))
    assert [e.fields["service"] for e in started] == [e.fields["service"] for e in closed] == ["counter"]
    assert await backend.list({"rollyard.rollout": done.id}) == []


async def test_the_command_of_main_runs_beside_the_agent_and_ends_with_it(make, backend):
    alive = "grep -qa '[s]leep.98765' /proc/[0-9]*/cmdline"
    main = {"command": ["sh", "-c", "echo up > started; exec sleep 98765"]}
    task = make({"main": main}, 'test "$(cat out.txt)" = "up"', f"! {alive}", grade="shared")
    done, events = await attempt(
        task, backend, f"for n in $(seq 100); do {alive} && cp started out.txt && break; sleep 0.1; done"
    )
    assert (done.failure, done.reward) == (None, 1.0), (done.failure, done.verdict)
    assert [e.fields["service"] for e in events if e.name == "service.started"] == ["main"]


async def test_a_service_that_is_to_stop_is_gone_before_the_tests(make, backend):
    stopped = {**COUNTER, "x-rollyard": {"verify": "stop"}}
    task = make({"counter": stopped}, 'test "$(cat out.txt)" = "hello 1"', f"! {ASK}")
    done, _ = await attempt(task, backend, f"{ASK} > out.txt")
    assert (done.failure, done.reward) == (None, 1.0), (done.failure, done.verdict)


async def test_a_service_starts_after_those_it_depends_on_and_shares_a_volume_with_them(make, backend):
    volume = ["shared:/shared"]
    services = {
        "reader": {
            "command": ["sh", "-c", "cp /shared/first /shared/second && exec sleep 999"],
            "volumes": volume,
            "depends_on": {"writer": {"condition": "service_completed_successfully"}},
            "healthcheck": {"test": "test -s /shared/second", "interval": "10s"},
        },
        "writer": {
            "command": ["sh", "-c", "echo $$WORD > /shared/first"],
            "environment": {"WORD": "given"},
            "volumes": volume,
        },
        "main": {"volumes": ["shared:/seen:ro"], "depends_on": ["reader"]},
    }
    task = make(services, 'test "$(cat out.txt)" = given', "test ! -e /seen/second")
    done, _ = await attempt(task, backend, "cat /seen/second > out.txt; echo no > /seen/second")
    assert (done.failure, done.reward) == (None, 1.0), (done.failure, done.verdict)


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"command": ["sh", "-c", "echo bad >&2; exit 3"], "healthcheck": HEALTH}, "ended with 3 before it was healthy: bad"),
        ({"command": ["sleep", "99"], "healthcheck": {"test": "echo ill; false", "interval": "100ms"}}, "says 'ill'"),
        ({}, "'counter' has nothing to run"),
        ({"image": "no-such-image", "command": "x"}, "no-such-image"),
        ({"command": "x", "environment": {"A": "${NO_SUCH_VARIABLE_HERE}"}}, "NO_SUCH_VARIABLE_HERE"),
    ],
    ids=["ends", "ill", "nothing", "image", "variable"],
)  # fmt: skip
async def test_a_service_that_does_not_come_up_is_no_reward_and_leaves_nothing(make, backend, service, said):
    done, _ = await attempt(make({"counter": service}, "true"), backend, "true")
    assert done.reward is None and said in done.failure.message, done.failure
    assert await backend.list({"rollyard.rollout": done.id}) == []


async def test_what_is_not_supported_is_refused_before_anything_opens(make, backend):
    with pytest.raises(ry.core.errors.Unsupported, match="'ports'"):
        await attempt(make({"counter": {**COUNTER, "ports": ["80:80"]}}, "true"), backend, "true")


@pytest.mark.slow
async def test_services_of_two_rollouts_do_not_meet(make, backend):
    """The same port, the same names, at the same time: each counts from one."""
    task = make({"counter": COUNTER}, 'test "$(cat out.txt)" = "hello 1"')
    rewards: list[float | None] = []

    async def one() -> None:
        rewards.append((await attempt(task, backend, f"{ASK} > out.txt"))[0].reward)

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        group.start_soon(one)
    assert rewards == [1.0, 1.0]


@pytest.mark.parametrize("name", ["shop", pytest.param("warehouse", marks=pytest.mark.slow)])
async def test_the_example_is_solved_by_its_solution(backend, name):
    (task,) = ry.Taskset.load(EXAMPLES / name)
    done = await ry.run_rollout(task, agent="oracle", policy=ry.policy.scripted({"steps": []}), sandbox=backend)
    assert (done.failure, done.reward) == (None, 1.0), (done.failure, done.verdict)


async def test_a_sidecar_is_an_mcp_server_that_the_agent_is_offered(backend):
    (task,) = ry.Taskset.load(EXAMPLES / "warehouse")
    seen: list[str] = []

    def answer(call):
        seen.append(str(call.messages[-1]))
        assert {spec.name for spec in call.tools} == {"list_parts", "stock"}
        return {"text": "done"} if len(seen) > 1 else {"tool": "stock", "args": {"part": "axle"}}

    policy = ry.policy.scripted(answer)
    done = await ry.run_rollout(task, agent="tool-agent", policy=policy, sandbox=backend)
    assert (done.failure, done.reward, len(seen)) == (None, 0.0, 2), (done.failure, seen)
    assert "in_stock" in seen[1]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", ["shop", "warehouse"])
async def test_the_example_is_solved_in_containers_that_share_a_network(engine, name):
    kind, host = engine
    (task,) = ry.Taskset.load(EXAMPLES / name)
    async with ry.sandbox.backend(kind, host=host) as backend:
        done = await ry.run_rollout(task, agent="oracle", policy=ry.policy.scripted({"steps": []}), sandbox=backend)
        assert (done.failure, done.reward) == (None, 1.0), (done.failure, done.verdict)
        assert await backend.list({"rollyard.rollout": done.id}) == []
    async with DockerEngine(host) as asked:
        volumes = await asked.call("GET", "volumes")
        assert not [row["Name"] for row in volumes["Volumes"] or () if row["Name"].startswith("rollyard-")]
