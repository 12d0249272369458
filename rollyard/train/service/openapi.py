"""The OpenAPI document of `serve rollouts`. A test holds it against the routes that are served."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from rollyard.gate.trainer import FailureBody, ReplyBody, Version
from rollyard.train.formats import FORMATS


class Operation(NamedTuple):
    method: str
    path: str
    summary: str
    body: type | None = None
    query: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ("200", "400", "401")


def operations(job: type) -> tuple[Operation, ...]:
    one = "/v1/jobs/{job_id}"
    found = ("200", "400", "401", "404")
    trainers = ("200", "400", "401", "403", "409")
    return (
        Operation("get", "/health", "whether the server answers; needs no key", statuses=("200",)),
        Operation("get", "/openapi.json", "this document; needs no key", statuses=("200",)),
        Operation(
            "post",
            "/v1/jobs",
            "begin a job; repeated under the same Idempotency-Key it gives the same job",
            job,
            statuses=("200", "201", "400", "401", "409", "429"),
        ),
        Operation("get", "/v1/jobs", "the caller's jobs, oldest first", query=("after", "limit")),
        Operation("get", one, "a job; with wait, once it is over or the seconds are", query=("wait",), statuses=found),
        Operation("delete", one, "cancel a job: rollouts in flight end, those that ended stay", statuses=found),
        Operation("get", f"{one}/rollouts", "one line for each rollout that ended", statuses=found),
        Operation(
            "get",
            f"{one}/rows",
            f"training rows of what has ended; formats: {', '.join(FORMATS)}",
            query=("format", "group"),
            statuses=(*found, "422"),
        ),
        Operation("get", f"{one}/events", "server-sent events: rollout, end", statuses=found),
        Operation(
            "get",
            "/v1/calls",
            "model calls that wait for the trainer's answer",
            query=("wait", "max", "taken"),
            statuses=trainers,
        ),
        Operation("post", "/v1/calls/{call_id}/reply", "answer one", ReplyBody, statuses=trainers),
        Operation("post", "/v1/calls/{call_id}/fail", "refuse one", FailureBody, statuses=trainers),
        Operation("get", "/v1/policy_version", "the policy version that new answers have", statuses=trainers),
        Operation("post", "/v1/policy_version", "publish a policy version", Version, statuses=trainers),
        Operation("post", "/v1/pause", "hold new calls while weights change", query=("wait",), statuses=trainers),
        Operation("post", "/v1/resume", "let calls through again", statuses=trainers),
    )


def document(job: type) -> dict[str, Any]:
    wanted = operations(job)
    bodies = [operation.body for operation in wanted if operation.body is not None]
    shapes, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    of_body = dict(zip(bodies, shapes, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in wanted:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, of_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollyard rollouts", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _describe(operation: Operation, of_body: dict[type, Any]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", operation.path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    parameters += [{"name": n, "in": "query", "schema": {"type": "string"}} for n in operation.query]
    made: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {status: {"description": _STATUSES[status]} for status in operation.statuses},
    }
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": of_body[operation.body]}}}
    return made


_STATUSES = {
    "200": "done",
    "201": "begun",
    "400": "the request cannot be met, and why",
    "401": "no valid key",
    "403": "only the trainer may",
    "404": "no such job of the caller's",
    "409": "the key was used for another request, or the call no longer waits",
    "422": "a rollout cannot be trained on in this format, and why",
    "429": "too many jobs under way",
}
