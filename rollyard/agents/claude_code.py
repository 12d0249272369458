"""Claude Code: Messages only. Refuses root unless it is told that it is in a sandbox (`IS_SANDBOX`)."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.agents.events import Fields, decode, plain_text
from rollyard.core.agent import Addition, Agent, Launch, LayerSpec, Mcp, Resume, ToolUse
from rollyard.core.events import AgentEvent

_MCP = "{home}/.claude/rollyard-mcp.json"
_PROMPT = "{home}/.claude/rollyard.md"
_TOOLS = (
    "Agent",
    "Bash",
    "CronCreate",
    "CronDelete",
    "CronList",
    "Edit",
    "EnterWorktree",
    "ExitWorktree",
    "ListAgents",
    "Monitor",
    "NotebookEdit",
    "Read",
    "ReportFindings",
    "ScheduleWakeup",
    "SendMessage",
    "Skill",
    "TaskStop",
    "WebFetch",
    "WebSearch",
    "Workflow",
    "Write",
)


def _command(launch: Launch, argv: list[str]) -> list[str]:
    """A prompt that starts with a slash would be taken for a command of its own."""
    return [*argv[:-1], "\n" + argv[-1]] if argv[-1].startswith("/") else argv


def stream_json(line: str, before: str) -> Iterator[AgentEvent]:
    """The `stream-json` format, which Qwen Code shares."""
    event = decode(line)
    if event["type"] in ("assistant", "user"):
        content = event["message"]["content"]
        for part in content if isinstance(content, list) else []:
            yield from _part(part)
    elif event["type"] == "result":
        yield AgentEvent(kind="usage", fields=event.get("usage") or {})
        error: Fields = event.get("error") or {}
        text = event.get("result") or error.get("message") or event.get("subtype") or ""
        yield AgentEvent(kind="done", ok=not event["is_error"], text=text, fields={"turns": event.get("num_turns")})


def _part(part: Fields) -> Iterator[AgentEvent]:
    match part["type"]:
        case "text":
            yield AgentEvent(kind="assistant", text=part["text"])
        case "thinking":
            yield AgentEvent(kind="reasoning", text=part["thinking"])
        case "tool_use":
            yield AgentEvent(kind="tool_call", tool=part["name"], call_id=part["id"], fields=part["input"])
        case "tool_result":
            failed = bool(part.get("is_error"))
            text = plain_text(part.get("content"))
            yield AgentEvent(kind="tool_result", call_id=part["tool_use_id"], text=text, fields={"is_error": failed})
        case _:
            return


_ARGV = (
    "{prefix}/bin/claude",
    "-p",
    "--output-format",
    "stream-json",
    "--verbose",
    "--dangerously-skip-permissions",
    "--strict-mcp-config",
    "{options}",
)

agent = Agent(
    name="claude-code",
    version="2.1.325",
    summary="Claude Code by Anthropic",
    layer=LayerSpec(npm=("@anthropic-ai/claude-code@2.1.325",)),
    check=("{prefix}/bin/claude", "--version"),
    argv=(*_ARGV, "--", "{instruction}"),
    env={
        "ANTHROPIC_BASE_URL": "{root_url}",
        "ANTHROPIC_API_KEY": "{key}",
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "IS_SANDBOX": "1",
    },
    wires={"messages": Addition()},
    tools=_TOOLS,
    options={
        "system_prompt": Addition(argv=("--append-system-prompt-file", _PROMPT), files={_PROMPT: "{system_prompt}"}),
        "disabled_tools": Addition(argv=("--disallowedTools", "{disabled_tools}")),
        "disable_thinking": Addition(env={"MAX_THINKING_TOKENS": "0"}),
        "max_tokens": Addition(env={"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_tokens}"}),
    },
    mcp=Mcp(
        style="claude",
        file=_MCP,
        secret="${ROLLYARD_KEY}",  # noqa: S106 - a reference; it expands no variable named ANTHROPIC_*
        transports=("stdio", "http", "sse"),
        adds=Addition(argv=("--mcp-config", _MCP), env={"ROLLYARD_KEY": "{key}"}),
    ),
    artifacts=("{home}/.claude/projects/*",),
    needs_isolation="landlock",
    says_done=True,
    freeze_s=240.0,  # its timers fetch its memory back within seconds; it gives a request up after 600
    resume=Resume(
        argv=(*_ARGV, "--continue", "--", "{instruction}"),
        # without these it says in the model's name that no response was requested
        interrupted=Addition(
            env={"CLAUDE_CODE_RESUME_INTERRUPTED_TURN": "1", "CLAUDE_CODE_RESUME_PROMPT": "{instruction}"}
        ),
        settle_s=0.25,  # it writes a message down a tenth of a second after it has it
    ),
    subagent=ToolUse(
        tool="Agent",
        args={"description": "part", "prompt": "{instruction}", "subagent_type": "general-purpose"},
    ),
    off=("auto-update", "telemetry", "error reports", "side calls", "tool search"),
    command=_command,
    events=stream_json,
)
