"""Spells an edit in the agent's own file tool: Edit, str_replace, write, apply_patch; in its shell where it has none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from bench.scanner_held_out import Create, Edit, Step
from rollyard.core.message import ToolSpec
from rollyard.policy.toolbox import PATH_KEYS, TEXT_KEYS, fillers, find_tool, heredoc, schema_of

_WRITERS = ("write", "write_file", "create_file", "write_to_file")
_EDITORS = ("edit", "replace", "str_replace", "edit_file", "replace_in_file")
_WORKDIR = PurePosixPath("/app")  # some tools take absolute paths alone
_OLD = ("before", "old_string", "oldString", "oldText", "old_str", "old_text")
_NEW = ("after", "new_string", "newString", "newText", "new_str", "new_text")


def spell(step: Step, tools: Sequence[ToolSpec], files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The calls it takes: some agents want a file read before it is changed. `files` are there already."""
    if isinstance(step, str):
        return [{"shell": step}]
    if (tool := find_tool(tools, _EDITORS if isinstance(step, Edit) else _WRITERS)) is not None:
        edit = {"tool": tool.name, "args": _arguments(step, tool)}
        wants_read = "file_path" in edit["args"] and step.path in files and find_tool(tools, ("read",)) is not None
        return [{"tool": "Read", "args": {"file_path": edit["args"]["file_path"]}}, edit] if wants_read else [edit]
    if find_tool(tools, ("exec_command",)) is not None:  # codex reads patches in its shell
        return [{"shell": f"apply_patch <<'PATCH'\n{_patch(step, files)}\nPATCH"}]
    return [{"shell": heredoc(step.path, step.text) if isinstance(step, Create) else _shell_edit(step)}]


def _arguments(step: Edit | Create, tool: ToolSpec) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema_of(tool).get("properties") or {}

    def key(names: tuple[str, ...], given: Mapping[str, Any] = properties) -> str:
        return next((name for name in names if name in given), names[0])

    path, place = key(PATH_KEYS), str(_WORKDIR / step.path)
    if isinstance(step, Create):
        args: dict[str, Any] = {path: place, key(TEXT_KEYS): step.text}
    elif "edits" in properties:
        inner: Mapping[str, Any] = properties["edits"].get("items", {}).get("properties", {})
        args = {path: place, "edits": [{key(_OLD, inner): step.old, key(_NEW, inner): step.new}]}
    else:
        args = {path: place, key(_OLD): step.old, key(_NEW): step.new}
    return args | fillers(tool, set(args))


def _patch(step: Edit | Create, files: Mapping[str, str]) -> str:
    """It takes whole lines: all of a file that was there."""
    before = files.get(step.path, "" if isinstance(step, Create) else step.old)
    after = step.text if isinstance(step, Create) else before.replace(step.old, step.new, 1)
    added = [f"+{line}" for line in after.splitlines()]
    if not before:
        lines = [f"*** Add File: {step.path}", *added]
    else:
        lines = [f"*** Update File: {step.path}", "@@", *(f"-{line}" for line in before.splitlines()), *added]
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def _shell_edit(step: Edit) -> str:
    said = json.dumps([step.path, step.old, step.new])
    return (
        f"python3 - <<'END'\nimport json\npath, old, new = json.loads(r'''{said}''')\ntext = open(path).read()\n"
        "assert old in text, 'the text is not in the file'\nopen(path, 'w').write(text.replace(old, new, 1))\nEND"
    )
