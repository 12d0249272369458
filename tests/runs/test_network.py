"""What a rollout's sandbox may reach in each phase, by the task's word and the caller's; what is refused is an event."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import rollyard as ry
from rollyard import agents
from rollyard.core.egress import parse_network_option
from rollyard.core.errors import ConfigError
from rollyard.core.events import Event
from rollyard.core.sandbox import Capabilities
from rollyard.core.task import Site, Step, Task, VerifierSpec
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.plan import RolloutPlan, with_options
from rollyard.tasks.network import give_network

pytestmark = pytest.mark.anyio
ASK = """python3 - > {out} <<'END'
import urllib.request
for url in {urls}:
    try: print(urllib.request.urlopen(url, timeout=20).status)
    except Exception as error: print(type(error).__name__)
END"""


@pytest.fixture
async def server():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with served:
        yield served.sockets[0].getsockname()[1]


async def test_each_phase_has_its_own_hosts_and_refusals_are_events(backend, server):
    names = [f"{name}.test:{server}" for name in ("setup", "agent", "judge")]
    urls = [f"http://{name}/" for name in names]
    setup, agent, judge = (f"{name}@127.0.0.1" for name in names)
    task = Task(
        id="t",
        instruction="x",
        setup=(ASK.format(out="setup.txt", urls=urls),),
        setup_network="allowlist",
        setup_hosts=(setup,),
        network="allowlist",
        allowed_hosts=(agent,),
        verifier=VerifierSpec(
            kind="commands",
            grade="shared",
            network="allowlist",
            allowed_hosts=(judge,),
            options={
                "commands": [
                    ASK.format(out="judge.txt", urls=urls),
                    "cat setup.txt agent.txt judge.txt | tr '\\n' ' '; exit 1",
                ]
            },
        ),
    )
    events: list[Event] = []

    async def sink(event: Event) -> None:
        events.append(event)

    script = {"steps": [{"shell": ASK.format(out="agent.txt", urls=urls)}, {"text": "done"}]}
    done = await ry.run_rollout(
        task, agent="shell-agent", policy=ry.policy.scripted(script), sandbox=backend, sink=sink
    )
    assert done.failure is None, done.failure
    said = done.verdict.commands[-1].stdout.split()
    assert said == ["200", "HTTPError", "HTTPError", "HTTPError", "200", "HTTPError", "HTTPError", "HTTPError", "200"]
    refused = [(event.fields["stage"], event.fields["host"]) for event in events if event.name == "network.refused"]
    assert refused == [
        ("prepare", "agent.test"), ("prepare", "judge.test"), ("wait", "setup.test"), ("wait", "judge.test"),
        ("verify", "setup.test"), ("verify", "agent.test"),
    ]  # fmt: skip


async def test_a_task_that_wants_the_public_network_runs_closed_and_says_so(backend):
    events: list[str] = []

    async def sink(event: Event) -> None:
        events.append(event.name)

    task = Task(id="t", instruction="x", network="host", setup=("test ! -s /etc/resolv.conf",))
    done = await ry.run_rollout(task, agent="nop", sandbox=backend, policy=ry.policy.scripted([]), sink=sink)
    assert done.failure is None and "network.closed" in events
    assert done.task.network == "none"


def test_the_callers_wish_reaches_every_part_of_a_task():
    can = Capabilities(isolation="namespace", network_allowlist=True)
    public = {"network": "host"}
    spec = VerifierSpec(kind="harbor", site=Site(**public), **public)
    steps = (Step(name="s", instruction="x", **public, verifier=spec),)
    task = Task(id="t", instruction="x", verifier=spec, setup_network="host", steps=steps, **public)
    for wish, network, hosts in (
        ("task", "none", ()),
        ("none", "none", ()),
        ("public", "allowlist", ("*",)),
        ("allow:a.b", "allowlist", ("a.b",)),
    ):
        given = give_network(task, parse_network_option(wish), can, building=parse_network_option("allow:mirror.test"))
        parts = [given, given.verifier, given.verifier.site, given.steps[0], given.steps[0].verifier]
        assert {(part.network, part.allowed_hosts) for part in parts} == {(network, hosts)}
        assert (given.setup_network, given.setup_hosts) == (network, hosts)
        assert given.build_hosts == given.verifier.site.build_hosts == ("mirror.test",)
    bare = Capabilities(isolation="container")
    public_wish = parse_network_option("public")
    assert give_network(task, public_wish, bare, building=public_wish).network == "host"


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ({}, ()),
        ({"build_network": "allow:a.b"}, ("a.b",)),
        ({"build_network": "public"}, ("*",)),
        ({"network": "allow:c.d"}, ("c.d",)),
        ({"network": "allow:c.d", "build_network": "none"}, ()),
    ],
    ids=str,
)
def test_builds_reach_what_they_are_given_and_tasks_no_more_for_it(options, hosts):
    can = Capabilities(isolation="namespace", network_allowlist=True)
    plan = RolloutPlan(rollout_id="ro", agent=agents.get("nop"), options=RolloutOptions(**options))
    given = with_options(plan, Task(id="t", instruction="x"), can)
    assert given.build_hosts == hosts
    assert given.allowed_hosts == (("c.d",) if "network" in options else ())


def test_what_builds_reach_is_no_tasks_word():
    with pytest.raises(ConfigError, match=r"builds have the network none, allow:HOST,\.\.\. or public, not 'task'"):
        RolloutOptions(build_network="task")


def test_a_task_from_elsewhere_does_not_say_where_a_name_leads():
    can = Capabilities(isolation="namespace", network_allowlist=True)
    task = Task(id="t", instruction="x", network="allowlist", allowed_hosts=("a.b@127.0.0.1",), trusted=False)
    with pytest.raises(ConfigError, match=r"a\.b@127\.0\.0\.1"):
        give_network(task, parse_network_option("task"), can, building=parse_network_option("none"))


@pytest.mark.slow
def test_a_run_says_in_one_line_that_tasks_run_closed(tmp_path):
    folder = tmp_path / "tasks" / "t"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[environment]\nallow_internet = true\n")
    (folder / "instruction.md").write_text("go\n")
    (folder / "tests/test.sh").write_text(
        "#!/bin/sh\nmkdir -p /logs/verifier\ntest -s /etc/resolv.conf; echo $? > /logs/verifier/reward.txt\n"
    )
    for network, reward in ((), "reward 1"), (("--network", "public"), "reward 0"):
        done = subprocess.run(
            [sys.executable, "-m", "rollyard", "run", "tasks", "--agent", "nop", "--store", "runs.db", *network],
            cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and reward in done.stdout + done.stderr, done.stderr
        closed = [line for line in done.stderr.splitlines() if line.startswith("network.closed")]
        assert len(closed) == (0 if network else 1) and all("--network public" in line for line in closed)
