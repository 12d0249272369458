"""Finds an agent's own shell among the tools it offers, and writes the call in that tool's own arguments.

Agents name it Bash, bash, shell, exec_command, run_shell_command, developer__shell, terminal ... and take `command`, `cmd`,
a list of words or a list of commands; some require more (`description`, `is_background`, `security_risk`). The name finds
the tool; its JSON Schema says how to call it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.message import ToolSpec

SHELLS = (
    "bash",
    "shell",
    "exec_command",
    "run_shell_command",
    "execute_bash",
    "execute_command",
    "run_command",
    "run_commands",
    "run_terminal_cmd",
    "terminal",
    "local_shell",
    "shell_command",
    "run_in_terminal",
    "exec",
)
WRITERS = ("write", "write_file", "create_file", "write_to_file", "editor")
COMMAND_KEYS = ("command", "cmd", "commands", "script", "code", "input")
PATH_KEYS = ("file_path", "path", "filepath", "filePath", "absolute_path", "filename")
TEXT_KEYS = ("content", "contents", "text", "file_text", "new_content")
SUFFIX = re.compile(r".*?(?:__|[./:])")


def bare_name(name: str) -> str:
    """`developer__shell` and `functions.shell` are both a shell; case does not matter."""
    last = name
    while match := SUFFIX.match(last):
        last = last[match.end() :]
    return (last or name).lower()


def find_tool(tools: Sequence[ToolSpec], names: Sequence[str]) -> ToolSpec | None:
    """The first tool that goes by one of `names`, in the order of `names`."""
    found: dict[str, ToolSpec] = {}
    for tool in tools:
        found.setdefault(bare_name(tool.name), tool)
    return next((found[name] for name in names if name in found), None)


def shell_call(tools: Sequence[ToolSpec], command: str) -> tuple[ToolSpec, dict[str, Any]] | None:
    """The agent's shell and the arguments that run `command` in it; None when it offers no shell."""
    tool = find_tool(tools, SHELLS)
    if tool is None:
        return None
    properties = schema_of(tool).get("properties") or {}
    key = next((k for k in COMMAND_KEYS if k in properties), "command")
    value: Any = command
    if is_list(properties.get(key, {})):
        value = [command] if key == "commands" else ["bash", "-lc", command]
    return tool, {key: value} | fillers(tool, {key})


def write_call(tools: Sequence[ToolSpec], path: str, text: str) -> tuple[ToolSpec, dict[str, Any]] | None:
    """Through the shell where there is one (it works alike everywhere), else through the agent's own file tool."""
    if (call := shell_call(tools, heredoc(path, text))) is not None:
        return call
    tool = find_tool(tools, WRITERS)
    if tool is None:
        return None
    properties = schema_of(tool).get("properties") or {}
    path_key = next((k for k in PATH_KEYS if k in properties), "path")
    text_key = next((k for k in TEXT_KEYS if k in properties), "content")
    return tool, {path_key: path, text_key: text} | fillers(tool, {path_key, text_key})


def heredoc(path: str, text: str) -> str:
    end = "END_OF_FILE"
    while end in text:
        end += "_"
    folder = path.rpartition("/")[0]
    made = f"mkdir -p -- {shlex.quote(folder)} && " if folder else ""
    if text.endswith("\n"):
        return f"{made}cat > {shlex.quote(path)} <<'{end}'\n{text}{end}\n"
    return f"{made}printf %s {shlex.quote(text)} > {shlex.quote(path)}"


def schema_of(tool: ToolSpec) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(tool.schema)
    except BAD_JSON:
        return {}
    return value if isinstance(value, dict) else {}


def is_list(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "array" in kinds and "string" not in kinds


def fillers(tool: ToolSpec, given: set[str]) -> dict[str, Any]:
    """Harmless values for what else the tool requires."""
    schema = schema_of(tool)
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or []
    return {name: harmless(properties.get(name) or {}) for name in required if name not in given}


def harmless(schema: Mapping[str, Any]) -> Any:
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    values: dict[Any, Any] = {"boolean": False, "array": [], "object": {}, "null": None}
    return values.get(kind, "scripted step")
