"""Qwen Code: chat by default; Responses and Messages too. It gives up a silent call after two minutes unless told not to."""

from __future__ import annotations

from rollyard.agents.claude_code import stream_json
from rollyard.agents.node_flags import on_layer_node
from rollyard.core.agent import Addition, Agent, Launch, LayerSpec, Mcp, ToolUse

SETTINGS = "{home}/.qwen/settings.json"
_TOOLS = (
    "agent",
    "edit",
    "get_goal",
    "glob",
    "grep_search",
    "list_agents",
    "notebook_edit",
    "read_file",
    "run_shell_command",
    "skill",
    "tool_call",
    "tool_search",
    "update_goal",
    "write_file",
)


def _command(launch: Launch, argv: list[str]) -> list[str]:
    """A prompt that starts with a slash would be taken for a command of its own. `bin/qwen` only starts this script in a second
    process, with that flag."""
    if launch.instruction.startswith("/"):
        argv = [*argv[:-1], f"--prompt=\n{launch.instruction}"]
    if not launch.prefix:
        return argv
    script = f"{launch.prefix}/lib/node_modules/@qwen-code/qwen-code/cli.js"
    return on_layer_node(launch, [script, *argv[1:]], "--expose-gc")


def _wire(auth: str, variables: dict[str, str]) -> Addition:
    return Addition(
        argv=("--auth-type", auth), env=variables, files={SETTINGS: {"security": {"auth": {"selectedType": auth}}}}
    )


_OPENAI = {"OPENAI_API_KEY": "{key}", "OPENAI_BASE_URL": "{base_url}", "OPENAI_MODEL": "{model}"}
_ANTHROPIC = {"ANTHROPIC_API_KEY": "{key}", "ANTHROPIC_BASE_URL": "{root_url}", "ANTHROPIC_MODEL": "{model}"}

agent = Agent(
    name="qwen-code",
    version="0.24.4",
    summary="Qwen Code by Alibaba",
    layer=LayerSpec(npm=("@qwen-code/qwen-code@0.24.4",), before="2026-11-01", node="22"),
    check=("{prefix}/bin/qwen", "--version"),
    argv=(
        "{prefix}/bin/qwen",
        "{options}",
        "--yolo",
        "--output-format",
        "stream-json",
        "--prompt={instruction}",
    ),
    env={"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
    files={
        SETTINGS: {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": {"timeout": 3_600_000}},
        }
    },
    wires={
        "chat": _wire("openai", _OPENAI),
        "responses": _wire("openai-responses", _OPENAI),
        "messages": _wire("anthropic", _ANTHROPIC),
    },
    tools=_TOOLS,
    options={
        "system_prompt": Addition(argv=("--append-system-prompt={system_prompt}",)),
        "disabled_tools": Addition(files={SETTINGS: {"tools": {"exclude": "{disabled_tools}"}}}),
        "max_tokens": Addition(
            files={SETTINGS: {"model": {"generationConfig": {"samplingParams": {"max_tokens": "{max_tokens}"}}}}}
        ),
    },
    mcp=Mcp(
        style="gemini",
        file=SETTINGS,
        secret="$ROLLYARD_KEY",  # noqa: S106 - a reference
        transports=("stdio", "http", "sse"),
        adds=Addition(env={"ROLLYARD_KEY": "{key}"}, files={SETTINGS: {"tools": {"toolSearch": {"enabled": False}}}}),
    ),
    artifacts=("{home}/.qwen/projects/*",),
    needs_isolation="landlock",
    says_done=True,
    subagent=ToolUse(
        tool="agent",
        args={"description": "part", "prompt": "{instruction}", "subagent_type": "general-purpose"},
    ),
    off=("usage statistics", "telemetry", "auto-update"),
    command=_command,
    events=stream_json,
)
