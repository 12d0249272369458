"""The HTTP API's own description: `/openapi.json`. `openenv validate` tells a server's mode by its paths, and a fuzzer tells by
it what a request may look like and which answers it may get."""

from __future__ import annotations

from typing import Any

SECONDS = {"type": "number", "minimum": 0}
ANY = {"type": "object", "additionalProperties": True}
STATE = {
    "type": "object",
    "properties": {
        "episode_id": {"type": ["string", "null"]},
        "step_count": {"type": "integer", "minimum": 0},
    },
    "additionalProperties": True,
}
RESET = {
    "type": "object",
    "properties": {
        "seed": {"type": ["integer", "null"], "minimum": 0},
        "episode_id": {"type": ["string", "null"], "maxLength": 255},
    },
    "additionalProperties": True,
}
OBSERVED = {
    "type": "object",
    "required": ["observation", "reward", "done"],
    "properties": {
        "observation": ANY,
        "reward": {"type": ["number", "null"]},
        "done": {"type": "boolean"},
        "metadata": ANY,
    },
}
OPENING = {
    "type": "object",
    "properties": {"lease_s": SECONDS, "deadline_s": SECONDS, "queue_s": SECONDS},
}
OPENED = {"type": "object", "required": ["session", "lease_s", "deadline_s"]}
SESSIONS = {"type": "array", "items": {"type": "object", "required": ["session", "live", "lease_s"]}}
REFUSAL = {
    "type": "object",
    "required": ["detail"],
    "properties": {"detail": {"type": "string"}, "code": {"type": "string"}},
}
SPLIT = {"type": "string"}
PLACE = {"type": ["integer", "null"]}
SESSION = {
    "name": "x-session-id",
    "in": "header",
    "required": False,
    "description": "the session that the request is about; without it, an environment is made for the request alone",
    "schema": {"type": "string"},
}


def document(*, name: str, version: str, production: bool, keyed: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {
        "/health": _path("get", {"type": "object", "required": ["status"]}),
        "/metrics": _path("get", None, kind="text/plain"),
        "/metadata": _path("get", {"type": "object", "required": ["name", "description"]}),
        "/schema": _path("get", {"type": "object", "required": ["action", "observation", "state"]}),
        "/openapi.json": _path("get", ANY),
        "/list_environments": _path("get", {"type": "array", "items": {"type": "string"}}),
        "/sessions": _path("get", SESSIONS) | _path("post", OPENED, body=OPENING),
        "/sessions/{id}": _path("delete", ANY, named=["id"]),
        "/sessions/{id}/cancel": _path("post", {"type": "object", "required": ["cancelled"]}, named=["id"]),
        "/mcp": _path("post", ANY, body=_rpc()),
        "/{env}/splits": _path("get", {"type": "array"}, named=["env"]),
        "/{env}/tasks": _tasks({"split": SPLIT}),
        "/{env}/num_tasks": _tasks({"split": SPLIT}),
        "/{env}/task": _tasks({"split": SPLIT, "index": {"type": "integer"}}, ["split", "index"]),
        "/{env}/task_range": _tasks({"split": SPLIT, "start": PLACE, "stop": PLACE}),
    }
    if not production:
        action = {"type": "object", "required": ["action"], "properties": {"action": ANY}}
        paths |= {
            "/reset": _path("post", OBSERVED, body=RESET, more=[SESSION]),
            "/step": _path("post", OBSERVED, body=action, more=[SESSION]),
            "/state": _path("get", STATE, more=[SESSION]) | _path("post", STATE, more=[SESSION]),
        }
    described: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": name, "version": version}, "paths": paths}
    if keyed:
        described["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        described["security"] = [{"key": []}]
    return described


def _path(
    method: str,
    answer: dict[str, Any] | None,
    *,
    body: dict[str, Any] | None = None,
    named: list[str] | None = None,
    more: list[dict[str, Any]] | None = None,
    kind: str = "application/json",
) -> dict[str, Any]:
    refused = {"description": "refused, with the reason", "content": {"application/json": {"schema": REFUSAL}}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "OK", "content": {kind: {"schema": answer or {"type": "string"}}}},
            "default": refused,
        },
        "parameters": [
            *({"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in named or ()),
            *(more or ()),
        ],
    }
    if body is not None:
        operation["requestBody"] = {"required": False, "content": {"application/json": {"schema": body}}}
    return {method: operation}


def _tasks(fields: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    body = {"type": "object", "required": required or ["split"], "properties": fields, "additionalProperties": False}
    return _path("post", ANY, body=body, named=["env"])


def _rpc() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["jsonrpc", "method"],
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["integer", "string", "null"]},
            "method": {"enum": ["tools/list", "tools/call", "openenv/session/create", "openenv/session/close"]},
            "params": ANY,
        },
    }
