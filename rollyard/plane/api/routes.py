"""`ROUTES`: the one table behind the routing, the OpenAPI document and the authorisation test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.responses import Response

from rollyard.core.plane import Role
from rollyard.plane.api.handlers import bundles, envs, instances, owners, watching
from rollyard.plane.api.handlers.bundles import Download, Upload
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.api.handlers.envs import CreateEnv, ReleaseEnv, UpdateEnv
from rollyard.plane.api.handlers.instances import DeleteMany, Exec, Extend, Fork, Presign, RolloutLink
from rollyard.plane.service.access import NewKey
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.owner_terms import OwnerTerms
from rollyard.plane.service.pools import PutPool

_A: tuple[Role, ...] = ("admin",)
_AO: tuple[Role, ...] = ("admin", "owner")
_AOT: tuple[Role, ...] = ("admin", "owner", "trainer")
_ALL: tuple[Role, ...] = ("admin", "owner", "trainer", "agent")


class ApiRoute(NamedTuple):
    """`query` names the parameters that are read from the URL."""

    method: str
    path: str
    roles: tuple[Role, ...]
    handler: Callable[[ApiCall], Awaitable[Response]]
    what: str
    body: type | None = None
    query: tuple[str, ...] = ()


_PAGE = ("limit", "cursor")
_FOUND = ("owner", "env", "run_id", "rollout_id", "label", "live", *_PAGE)
_E, _N, _I = "/v1/envs/{name}/{version}", "/v1/instances", "/v1/instances/{id}"

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/v1/engines", _ALL, owners.list_engines, "the engines and what each can do"),
    ApiRoute("POST", "/v1/envs", _AO, envs.create_env, "describe a new environment version", CreateEnv),
    ApiRoute("GET", "/v1/envs", _ALL, envs.list_envs, "a page of environments", None, ("q", "status", *_PAGE)),
    ApiRoute("GET", _E, _ALL, envs.get_env, "one environment version"),
    ApiRoute("PUT", _E, _AO, envs.update_env, "replace it, at the revision read", UpdateEnv),
    ApiRoute("DELETE", _E, _AO, envs.delete_env, "remove a draft (an admin: any)"),
    ApiRoute("GET", f"{_E}/exists", _ALL, envs.env_exists, "whether it is there"),
    ApiRoute("POST", f"{_E}/release", _AO, envs.release_env, "make it immutable", ReleaseEnv),
    ApiRoute("GET", f"{_E}/builds", _AO, envs.list_builds, "what its builds gave and said, by engine"),
    ApiRoute("GET", f"{_E}/builds/{{engine}}/output", _AO, envs.build_output, "all that a build printed"),
    ApiRoute("POST", "/v1/bundles", _AO, bundles.begin_upload, "a URL to send a bundle to", Upload),
    ApiRoute("POST", "/v1/bundles/{sha256}", _ALL, bundles.begin_download, "a URL to fetch a bundle from", Download),
    ApiRoute("POST", _N, _AOT, instances.create_instance, "make an instance; honours Idempotency-Key", CreateInstance),
    ApiRoute("GET", _N, _AOT, instances.list_instances, "a page of instances", None, _FOUND),
    ApiRoute("POST", f"{_N}/delete", _AOT, instances.delete_instances, "delete by ids, run or labels", DeleteMany),
    ApiRoute(
        *("GET", "/v1/changes", _AOT, watching.list_changes, "what changed since a cursor", None),
        ("owner", "cursor", "wait_s"),
    ),
    ApiRoute(
        *("GET", "/v1/watch", _AOT, watching.stream_changes, "changes as server-sent events", None),
        ("owner", "cursor"),
    ),
    ApiRoute(
        *("GET", _I, _ALL, instances.get_instance, "a live instance, or its first state after `not`", None),
        ("not", "wait_s"),
    ),
    ApiRoute("DELETE", _I, _AOT, instances.delete_instance, "delete an instance"),
    ApiRoute("GET", f"{_I}/history", _ALL, instances.get_history, "its states, also when it is gone"),
    ApiRoute("POST", f"{_I}/heartbeat", _ALL, instances.heartbeat, "a sign of life"),
    ApiRoute("POST", f"{_I}/extend", _AOT, instances.extend, "a new end of its time", Extend),
    ApiRoute("POST", f"{_I}/link", _AOT, instances.link_rollout, "say which rollout it is for", RolloutLink),
    ApiRoute("POST", f"{_I}/pause", _AOT, instances.pause, "make its programs stand still"),
    ApiRoute("POST", f"{_I}/resume", _AOT, instances.resume, "let them go on"),
    ApiRoute("POST", f"{_I}/snapshot", _AOT, instances.snapshot, "an image of what it has written"),
    ApiRoute("POST", f"{_I}/fork", _AOT, instances.fork, "new instances that begin as this one is", Fork),
    ApiRoute(
        *("GET", f"{_I}/logs", _ALL, instances.read_logs, "what its own program printed", None),
        ("stream", "tail", "follow"),
    ),
    ApiRoute("POST", f"{_I}/exec", _ALL, instances.run_program, "run a program and wait for it", Exec),
    ApiRoute("GET", f"{_I}/files", _ALL, instances.read_file, "a file's bytes", None, ("path",)),
    ApiRoute("PUT", f"{_I}/files", _ALL, instances.write_file, "write a file from the body", None, ("path",)),
    ApiRoute("POST", f"{_I}/presign", _AOT, instances.presign, "an expiring URL to a port", Presign),
    ApiRoute("POST", f"{_I}/token", _AOT, instances.get_token, "the token of its gateway, and of nothing else"),
    ApiRoute("GET", "/v1/trace/{id}", _AOT, bundles.get_trace, "everything behind an instance's or a rollout's id"),
    ApiRoute("GET", "/v1/pools", _AOT, owners.list_pools, "warm pools and how many wait in them"),
    ApiRoute("PUT", "/v1/pools/{name}", _A, owners.put_pool, "a pool of instances made ahead of their use", PutPool),
    ApiRoute("DELETE", "/v1/pools/{name}", _A, owners.remove_pool, "end a pool and what waits in it"),
    ApiRoute("GET", "/v1/usage", _AOT, owners.get_usage, "instances and quota of the caller's owner", None, ("owner",)),
    ApiRoute("PUT", "/v1/owners/{owner}", _A, owners.set_terms, "an owner's quota and rate", OwnerTerms),
    ApiRoute("POST", "/v1/keys", _A, owners.create_key, "a new API key, shown once", NewKey),
    ApiRoute("GET", "/v1/keys", _A, owners.list_keys, "keys, without themselves"),
    ApiRoute("DELETE", "/v1/keys/{id}", _A, owners.revoke_key, "end a key"),
    ApiRoute("POST", "/v1/sweep", _A, owners.sweep_now, "sweep now"),
    ApiRoute("GET", "/metrics", ("admin", "metrics"), owners.get_metrics, "Prometheus text"),
)
