"""T: MCP servers, tools of the trainer's, sub-agents."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from rollyard.core.call import Call
from rollyard.core.message import ToolSpec
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import Rollout
from rollyard.core.task import McpServer
from rollyard.policy.toolbox import fillers
from rollyard.runs.rollout.plan import Hooks
from rollyard.testing.agent.fixture import DONE, WRITE, AgentFixture, AgentRun
from rollyard.testing.suite import case, check
from rollyard.tools import tool

_SERVER = "/tmp/mcp_server.py"
_PORT = 8123
_TOKEN = "conformance"  # noqa: S105 - protects nothing


def _uses(name: str) -> Any:
    """A model that calls the one tool whose name ends with `name`, then does the task."""

    def answer(call: Call) -> Any:
        results = sum(len(message.tool_results) for message in call.messages)
        if results == 0:
            found = next((t for t in call.tools if t.name.endswith(name)), None)
            return _use(found, {"n": 7}) if found else {"text": f"no tool {name}"}
        return WRITE if results == 1 else DONE

    return answer


def _use(tool: ToolSpec, args: dict[str, Any]) -> dict[str, Any]:
    """A call of this tool; what else it requires is filled in."""
    return {"tool": tool.name, "args": args | fillers(tool, set(args))}


def _check_answer(seen: AgentRun, words: str) -> None:
    offered = sorted({t.name for call in seen.calls[:1] for t in call.tools})
    shown = [part for call in seen.calls for m in call.messages for r in m.tool_results for part in r.parts]
    check(any(words in getattr(part, "text", "") for part in shown), f"the answer never came back; offered: {offered}")
    seen.check_solved()


def _server() -> dict[str, bytes]:
    return {_SERVER: files("rollyard.testing.agent").joinpath("mcp_server.py").read_bytes()}


@case("T1", "calls a tool of an MCP server over stdio", needs=("model", "mcp"), timeout=300)
async def stdio(fixture: AgentFixture) -> None:
    server = McpServer(name="local", transport="stdio", command=("python3", _SERVER, "stdio_word"))
    _check_answer(await fixture.run(_uses("stdio_word"), mcp=[server], files=_server()), "stdio_word says 7")


@case("T2", "calls a tool of an MCP server over HTTP, with its headers", needs=("model", "mcp_http"), timeout=300)
async def http(fixture: AgentFixture) -> None:
    async def serve(sandbox: Sandbox, rollout: Rollout) -> None:
        await sandbox.start(["python3", _SERVER, "http_word", str(_PORT), _TOKEN])
        waiting = f"for i in $(seq 100); do python3 {_SERVER} ping {_PORT} && exit 0; sleep 0.1; done; exit 1"
        done = await sandbox.exec(waiting, timeout=60)
        check(done.ok, f"the test's MCP server did not start: {done.text}")

    server = McpServer(name="web", url=f"http://127.0.0.1:{_PORT}/mcp", headers={"Authorization": f"Bearer {_TOKEN}"})
    hooks = Hooks(after_setup=(serve,))
    _check_answer(await fixture.run(_uses("http_word"), mcp=[server], files=_server(), hooks=hooks), "http_word says 7")


@case("T3", "calls a tool of the trainer's through the gate", needs=("model", "mcp_http"), timeout=300)
async def gate_tool(fixture: AgentFixture) -> None:
    @tool
    async def gate_word(n: int) -> str:
        """Says a number."""
        return f"gate_word says {n}"

    _check_answer(await fixture.run(_uses("gate_word"), tools=[gate_word]), "gate_word says 7")


@case("T4", "runs two sub-agents, each a branch of its own", needs=("model", "subagents"), timeout=400)
async def subagents(fixture: AgentFixture) -> None:
    use = fixture.agent.subagent
    assert use is not None

    def spawn(call: Call, part: str) -> dict[str, Any]:
        found = next((t for t in call.tools if t.name.endswith(use.tool)), None)
        if found is None:
            return {"shell": f": it offers no tool {use.tool}"}
        return _use(found, {k: part if v == "{instruction}" else v for k, v in use.args.items()})

    def answer(call: Call) -> Any:
        text = "".join(m.text for m in call.messages if m.role == "user")
        if "sub-task of the suite" in text and "Write hello" not in text:
            return {"shell": "echo part >> part.txt"} if not _results(call) else DONE
        if _results(call) == 0:
            return {"parallel": [spawn(call, f"sub-task of the suite, {number}") for number in ("one", "two")]}
        return [{"shell": "sleep 4"}, WRITE, DONE][min(_results(call) - 2, 2)] if _results(call) >= 2 else DONE

    seen = await fixture.run(answer, collect=["part.txt"])
    parts = seen.rollout.files.get("/workspace/part.txt", b"")
    check(parts == b"part\npart\n", f"the sub-agents wrote {parts!r}")
    branches = seen.rollout.captured.branches
    check(len(branches) >= 3, f"{len(branches)} branches; the agent and two sub-agents are three")


def _results(call: Call) -> int:
    return sum(len(message.tool_results) for message in call.messages)
