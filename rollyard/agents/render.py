"""(Agent, Launch) -> argv, environment and files. Pure: nothing is written or run here.

Every value that comes from outside (instruction, prompt, model name, paths, keys) is data: templates are replaced in one
pass, so that a value holding `{key}` stays as it is, and trees are serialised after replacement, so that a value holding
quotes stays inside its string. The trap avoided: pasting values into a shell line or into JSON text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from rollyard.agents import mcp
from rollyard.agents.serial import dump
from rollyard.core.agent import Addition, Agent, Launch
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import at_least

MAX_ARGUMENT = 131_071  # bytes; the kernel's limit for one argument or one variable
_PLACEHOLDER = re.compile(
    r"\{(instruction|model|root_url|base_url|key|home|workdir|prefix|context_window|system_prompt|disabled_tools"
    r"|max_tokens|solution)\}"
)
# What every agent starts with, and all it starts with: nothing of the host's environment reaches it.
_ENV = {"HOME": "{home}", "TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1"}

_STDIN = "{home}/.rollyard-stdin"

Files = dict[str, Any]  # path -> text, bytes or tree


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """`argv` is empty when there is no program to run (`nop`). `files` are written before the start, mode 0600."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, bytes]


def render(agent: Agent, launch: Launch) -> Rendered:
    """Refuses what the agent cannot do (`admit`), then fills in its templates."""
    admit(agent, launch)
    values = _values(launch)
    extras = _additions(agent, launch)
    env = dict(_ENV)
    env.update(agent.env)
    files: Files = dict(agent.files)
    more: list[str] = []
    for extra in extras:
        more.extend(extra.argv)
        env.update(extra.env)
        _merge_files(files, extra.files)
    filled = _fill(files, values)
    if agent.config is not None:  # what it returns holds values already: only its paths are templates
        _merge_files(filled, {_text(path, values): content for path, content in agent.config(launch).items()})
    if agent.mcp is not None and launch.mcp:
        servers = mcp.entries(agent.mcp, launch.mcp, key=launch.key)
        _merge_files(filled, {_text(agent.mcp.file, values): {agent.mcp.key: servers}})
    argv = _arguments(_template(agent, launch), more, values)
    if agent.command is not None:
        argv = agent.command(launch, argv)
    if agent.stdin is not None:
        filled[_text(_STDIN, values)] = _text(agent.stdin, values)
        argv = ["/bin/sh", "-c", 'exec "$@" <"$0"', _text(_STDIN, values), *argv]
    rendered = Rendered(
        argv=tuple(argv),
        env={name: _text(value, values) for name, value in env.items()},
        files={path: dump(path, content) for path, content in filled.items()},
    )
    _check_sizes(agent, launch, rendered)
    return rendered


def _template(agent: Agent, launch: Launch) -> tuple[str, ...]:
    if launch.resumes is None:
        return agent.argv
    if agent.resume is None:
        raise Unsupported(f"agent {agent.name!r} cannot go on from a session of its own")
    return agent.resume.argv


def refuse(agent: Agent, options: Mapping[str, Any]) -> None:
    """Raise for the first option that is set and that this agent cannot honour. `options` are named as `Launch`'s fields
    are; None and empty mean unset, and so does False for `disable_thinking`."""
    for name, value in options.items():
        if value is None or value is False or value == () or value == [] or value == {}:
            continue
        if name == "dialect":
            if value not in agent.wires:
                spoken = ", ".join(agent.wires) or "none"
                raise Unsupported(f"agent {agent.name!r} does not speak the dialect {value!r}; it speaks: {spoken}")
        elif name == "mcp":
            _refuse_mcp(agent, value)
        elif name in ("system_prompt", "disabled_tools", "disable_thinking", "max_tokens"):
            if name not in agent.options:
                honoured = ", ".join(agent.switches) or "none"
                raise Unsupported(
                    f"agent {agent.name!r} cannot honour {name}; it honours: {honoured}",
                    hint=f"drop {name}, or choose another agent",
                )
            if name == "disabled_tools":
                _refuse_tools(agent, value, options.get("mcp") or ())
        else:
            raise ConfigError(f"agents have no option {name!r}")


def _refuse_tools(agent: Agent, names: Any, servers: Any) -> None:
    """Tools of an MCP server bear its name; which it has is known when it runs."""
    for name in names:
        served = any(server.name in name for server in servers)
        if agent.tools and name not in agent.tools and not served:
            raise Unsupported(
                f"agent {agent.name!r} has no tool {name!r} to disable", hint=f"its tools are: {', '.join(agent.tools)}"
            )


def _refuse_mcp(agent: Agent, servers: Any) -> None:
    if agent.mcp is None:
        raise Unsupported(f"agent {agent.name!r} has no MCP client", hint="drop mcp, or choose another agent")
    for server in servers:
        if server.transport not in agent.mcp.transports:
            raise Unsupported(
                f"agent {agent.name!r} cannot use the MCP server {server.name!r}: its transport is {server.transport}, "
                f"and the agent takes {', '.join(agent.mcp.transports)}"
            )


def admit(agent: Agent, launch: Launch) -> None:
    """Whether this agent may be started like this, said before it starts."""
    refuse(
        agent,
        {
            "system_prompt": launch.system_prompt,
            "disabled_tools": launch.disabled_tools,
            "mcp": launch.mcp,
            "disable_thinking": launch.disable_thinking,
            "max_tokens": launch.max_tokens,
            "dialect": launch.dialect,
        },
    )
    if agent.root == "refuses" and launch.as_root:
        raise Unsupported(f"agent {agent.name!r} refuses to run as root", hint="set the task's user")
    if agent.root == "needs" and not launch.as_root:
        raise Unsupported(f"agent {agent.name!r} needs root", hint="set the task's user to root")
    wanted = agent.needs_isolation
    if wanted is not None and not launch.allow_unsafe and not at_least(launch.isolation, wanted):
        raise Unsupported(
            f"agent {agent.name!r} runs commands without asking, so it needs isolation {wanted!r} or stronger; "
            f"this sandbox has {launch.isolation!r}",
            hint="use a stronger sandbox, or allow_unsafe if nothing here is worth protecting",
        )


def _additions(agent: Agent, launch: Launch) -> list[Addition]:
    """In order: the dialect, the options that are set, MCP."""
    found: list[Addition] = []
    dialect = launch.dialect or agent.dialect
    if dialect is not None:
        found.append(agent.wires[dialect])
    wanted = {
        "system_prompt": launch.system_prompt is not None,
        "disabled_tools": bool(launch.disabled_tools),
        "disable_thinking": launch.disable_thinking,
        "max_tokens": launch.max_tokens is not None,
    }
    found.extend(extra for name, extra in agent.options.items() if wanted[name])
    if agent.mcp is not None and launch.mcp:
        found.append(agent.mcp.adds)
    if agent.resume is not None and launch.resumes is not None:
        found.append(Addition(env=agent.resume.env))
        found.extend((agent.resume.interrupted,) if launch.resumes == "call" else ())
    return found


def _values(launch: Launch) -> dict[str, Any]:
    return {
        "instruction": launch.instruction,
        "model": launch.model,
        "root_url": launch.root_url,
        "base_url": launch.base_url,
        "key": launch.key,
        "home": launch.home,
        "workdir": launch.workdir,
        "prefix": launch.prefix,
        "context_window": launch.context_window,
        "system_prompt": launch.system_prompt or "",
        "disabled_tools": list(launch.disabled_tools),
        "max_tokens": launch.max_tokens,
        "solution": launch.solution,
    }


def _text(template: str, values: Mapping[str, Any]) -> str:
    if values.get("prefix") == "":  # not in a layer: found on PATH by its name
        template = template.removeprefix("{prefix}/bin/")

    def value(match: re.Match[str]) -> str:
        found = values[match[1]]
        if found is None:
            raise ConfigError(f"this start has no {match[1]}, and the agent needs one")
        return ",".join(found) if isinstance(found, list) else str(found)

    return _PLACEHOLDER.sub(value, template)


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """A string that is one placeholder becomes that value with its own type; any other string is filled in as text."""
    if isinstance(node, str):
        whole = _PLACEHOLDER.fullmatch(node)
        if whole is not None and values[whole[1]] is not None:
            return values[whole[1]]
        return _text(node, values)
    if isinstance(node, Mapping):
        return {_text(key, values): _fill(value, values) for key, value in cast("Mapping[str, Any]", node).items()}
    if isinstance(node, list | tuple):
        return [_fill(value, values) for value in cast("list[Any]", node)]
    return node


def _arguments(argv: tuple[str, ...], more: list[str], values: Mapping[str, Any]) -> list[str]:
    out: list[str] = []
    for item in argv:
        out.extend(_text(part, values) for part in (more if item == "{options}" else (item,)))
    return out


def _merge_files(into: Files, new: Mapping[str, Any]) -> None:
    for path, content in new.items():
        old = into.get(path)
        into[path] = _merge(old, content) if isinstance(old, Mapping) and isinstance(content, Mapping) else content


def _merge(old: Any, new: Any) -> dict[str, Any]:
    out = dict(old)
    for key, value in new.items():
        both = isinstance(out.get(key), Mapping) and isinstance(value, Mapping)
        out[key] = _merge(out[key], value) if both else value
    return out


def _check_sizes(agent: Agent, launch: Launch, rendered: Rendered) -> None:
    """A key in argv would be world-readable in /proc; an oversized argument would fail in `execve` with no name."""
    for item in rendered.argv:
        if launch.key and launch.key in item and launch.key not in launch.instruction:
            raise ConfigError(f"agent {agent.name!r} would put the gate's key into its arguments")
        if len(item.encode("utf-8", "surrogatepass")) > MAX_ARGUMENT:
            raise Unsupported(
                f"agent {agent.name!r} takes the instruction as one argument of at most {MAX_ARGUMENT} bytes",
                hint="put the long part into a file and name it in the instruction",
            )
        if "\0" in item:
            raise ConfigError(f"an argument of agent {agent.name!r} holds a NUL byte, which no program can be given")
    for name, value in rendered.env.items():
        if "\0" in value or len(value.encode("utf-8", "surrogatepass")) + len(name) > MAX_ARGUMENT:
            raise Unsupported(
                f"the variable {name} of agent {agent.name!r} cannot hold its value (too long, or a NUL byte)"
            )


def presence_check(agent: Agent, prefix: str) -> list[str]:
    """The argv that succeeds where the agent lies under `prefix`; "" looks for it on PATH."""
    return [_text(item, {"prefix": prefix}) for item in agent.check]


def artifacts(agent: Agent, launch: Launch) -> tuple[str, ...]:
    """The globs of what this agent leaves behind, as paths in the sandbox."""
    values = _values(launch)
    return tuple(_text(pattern, values) for pattern in agent.artifacts)
