"""A Fleet-shaped server over any backend: the published `fleet-python` SDK makes, resets, queries, verifies and ends instances.

`fleet_app(worlds, plane, engine)` is an ASGI app over a plane. It takes

- `worlds`: what can be made, by env key (`World`, or `load_worlds(directory)` for folders with a `world.toml`);
- `plane`, `engine`: a plane's parts (`ephemeral_plane(backend)` has some) and which of its engines runs the worlds. An instance
  is a sandbox that runs the world's tool server; verifiers get their own. Imported tasks, verifiers, jobs and what is said in
  their sessions are in the plane's storage, each under its owner;
- `admit`: an async function from the `Authorization` header to the owner's name, which raises `Refusal(401, ...)`. Without it
  everybody is `local`: serve that on loopback only. `one_key(key)` makes one. Owners do not see each other's instances;
- `tasks`: those that every owner finds at `/v1/tasks`;
- `secret`: what instance tokens and the runner token are made with; give one that outlives a restart.

Point a client at it with `FLEET_BASE_URL` (its address) and `FLEET_API_KEY`. Served: environments, instances (idempotent by
`X-Request-ID`, 409 with the first one's id), heartbeats, the manager of each instance (reset, resources, SQLite describe, query
and difference, files, verifier functions), its MCP endpoint and pages under `urls.root`, verifiers by sha256, tasks, account and
runs.
Pickled arguments are opened in a sandbox and nowhere else. Jobs are served where a `runner` is given. Not served: judges, CDP.
"""

from __future__ import annotations

from rollyard.plane.compat.fleet.app import fleet_app
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.guard import one_key
from rollyard.plane.compat.fleet.tasks import Tasks
from rollyard.plane.compat.fleet.world import World, load_world, load_worlds

__all__ = ["FleetRefusal", "Tasks", "World", "fleet_app", "load_world", "load_worlds", "one_key"]
