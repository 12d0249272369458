"""The OpenAPI document, made from the table of routes and the types of the bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.plane.api.routes import ApiRoute

_STATUSES = {
    "400": "invalid",
    "401": "no valid key",
    "403": "the role may not",
    "404": "not there",
    "409": "conflict",
    "410": "it has ended",
    "413": "too large",
    "429": "quota or rate",
    "501": "the engine cannot",
    "503": "the server stops",
    "502": "unavailable",
}


def document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    bodies = [route.body for route in routes if route.body is not None]
    shapes, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    of_body = dict(zip(bodies, shapes, strict=True))
    components["Refusal"] = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {name: {"type": ["string", "null"]} for name in ("code", "message", "hint", "id")},
                "required": ["code", "message"],
            }
        },
        "required": ["error"],
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, of_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollyard control plane", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: ApiRoute, of_body: dict[type, Any]) -> dict[str, Any]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    made: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.what,
        "x-roles": list(route.roles),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.path)
        ]
        + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query],
        "responses": {
            "2XX": {"description": "done"},
            **{status: {"description": text, "content": refusal} for status, text in _STATUSES.items()},
        },
    }
    if route.body is not None:
        made["requestBody"] = {"content": {"application/json": {"schema": of_body[route.body]}}}
    return made
