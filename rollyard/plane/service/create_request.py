"""What may be asked of a creation, and the plan that it becomes: the request, over the environment, over the defaults.

What the chosen engine cannot honour is refused here, by name, before anything is written down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from rollyard.core.egress import parse_rule
from rollyard.core.errors import PlaneInvalid, UnknownName
from rollyard.core.ids import new_id
from rollyard.core.plane import POOL_OWNER, AdmissionTerms, EnvSpec, Instance, InstancePlan, OnTimeout
from rollyard.core.sandbox import Mount, Network, Resources, is_path
from rollyard.plane.engines.choose import choose, refuse
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.service.request_note import say_origin

_MAX_LABELS = 64
# What a rollout writes on its sandbox, through whichever API it asks
_RUN, _ROLLOUT = ("rollyard.run", "rollyard.rollout")


class CreateInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `env` (`name@version`), `image` or `pool`. What is given here wins over what the environment says."""

    env: str | None = None
    image: str | None = None
    pool: str | None = None
    engine: str | None = None
    owner: str | None = None
    run_id: str | None = None
    rollout_id: str | None = None
    ttl_s: float | None = None
    idle_ttl_s: float | None = None
    labels: dict[str, str] = {}
    environment: dict[str, str] = {}
    start: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    mount_points: tuple[Mount, ...] = ()
    resources: Resources | None = None
    network: Network | None = None
    allowed_hosts: tuple[str, ...] = ()
    on_timeout: OnTimeout = "end"
    auto_resume: bool = False


class CreateDefaults(msgspec.Struct, frozen=True, kw_only=True):
    default_ttl_s: float = 1800.0
    max_ttl_s: float = 7 * 86400.0
    boot_s: float = 300.0  # the most an engine may take to create or delete
    terms: AdmissionTerms = AdmissionTerms()


FROM_POOL = ("owner", "run_id", "rollout_id", "ttl_s", "idle_ttl_s", "labels", "pool")


def check_request(wanted: CreateInstance, settings: CreateDefaults) -> None:
    """What is wrong with a request whatever it is made from."""
    if sum(value is not None for value in (wanted.env, wanted.image, wanted.pool)) != 1:
        raise PlaneInvalid("give one of env, image and pool")
    if wanted.owner is not None and wanted.owner.startswith(POOL_OWNER):
        raise PlaneInvalid(f"owners whose names begin with {POOL_OWNER} are pools")
    for ttl in (wanted.ttl_s, wanted.idle_ttl_s):
        if ttl is not None and not (math.isfinite(ttl) and 0 < ttl <= settings.max_ttl_s):
            raise PlaneInvalid(f"times to live are above 0 and at most {settings.max_ttl_s:.0f} s")
    if len(wanted.labels) > _MAX_LABELS or any(not name or len(name) > 200 for name in wanted.labels):
        raise PlaneInvalid(f"there are at most {_MAX_LABELS} labels, with names of 1 to 200 characters")
    if wanted.pool is not None:
        default = CreateInstance()
        late = [n for n in wanted.__struct_fields__ if n not in FROM_POOL and getattr(wanted, n) != getattr(default, n)]
        if late:
            raise PlaneInvalid(f"one from a pool is made already and cannot take {', '.join(late)}")


def plan_instance(
    wanted: CreateInstance,
    spec: EnvSpec,
    owner: str,
    engines: Mapping[str, Engine],
    settings: CreateDefaults,
    now: float,
) -> Instance:
    """The row of an instance that is about to be made."""
    check_request(wanted, settings)
    try:
        engine = choose(engines, wanted.engine or spec.engine)
    except UnknownName as error:
        raise PlaneInvalid(error.message) from error
    ttl = wanted.ttl_s or spec.ttl_s or settings.default_ttl_s
    plan = InstancePlan(
        image=wanted.image or spec.image,
        env={**spec.env, **wanted.environment},
        start=wanted.start or spec.start,
        port=spec.port,
        arguments=wanted.arguments,
        mounts=wanted.mount_points,
        resources=wanted.resources or spec.resources,
        network=wanted.network or spec.network,
        allowed_hosts=wanted.allowed_hosts,
        ttl_s=min(ttl, settings.max_ttl_s),
        on_timeout=wanted.on_timeout,
        auto_resume=wanted.auto_resume,
    )
    if plan.auto_resume and plan.on_timeout != "pause":
        raise PlaneInvalid("auto_resume is for an instance with on_timeout pause", hint="set both, or neither")
    if plan.arguments and not plan.start:
        raise PlaneInvalid("arguments are for a program", hint="give start, or an environment that has one")
    if is_path(plan.image) or "\0" in plan.image:
        hint = "add it on the server with `rollyard image add SOURCE --name NAME`"
        raise PlaneInvalid("an image is named, not given by a path of the server", hint=hint)
    _check_engine(engine, engines, plan)
    if bool(plan.allowed_hosts) != (plan.network == "allowlist"):
        raise PlaneInvalid("network allowlist and allowed_hosts come together", hint="give both, or neither")
    for host in plan.allowed_hosts:
        parse_rule(host)
    return journal_instance(plan, engine.name, owner, wanted, now, settings)


def journal_instance(
    plan: InstancePlan, engine: str, owner: str, wanted: CreateInstance, now: float, settings: CreateDefaults
) -> Instance:
    return Instance(
        id=new_id("inst"),
        owner=owner,
        engine=engine,
        state="creating",
        live=True,
        plan=plan,
        env=wanted.env,
        run_id=run_of(wanted),
        rollout_id=rollout_of(wanted),
        labels=wanted.labels,
        created_at=now,
        updated_at=now,
        last_seen_at=now,
        expires_at=now + plan.ttl_s,
        idle_ttl_s=wanted.idle_ttl_s,
        settle_by=now + 2 * settings.boot_s,
        reason=f"asked for {origin}" if (origin := say_origin()) else None,
    )


def run_of(wanted: CreateInstance) -> str | None:
    """The run that it is for: as it was said, or as a rollout says it on its sandbox, through whichever API it asks."""
    return wanted.run_id or wanted.labels.get("rollyard.run")


def rollout_of(wanted: CreateInstance) -> str | None:
    return wanted.rollout_id or wanted.labels.get("rollyard.rollout")


def _check_engine(engine: Engine, engines: Mapping[str, Engine], plan: InstancePlan) -> None:
    needs = {
        "mounts": ("mount directories", bool(plan.mounts)),
        "arguments": ("start a program with arguments", bool(plan.start or plan.arguments)),
        "pause": ("pause an instance", plan.on_timeout != "end"),
        "gpus": ("give accelerators", plan.resources.accelerated),
        "images": ("run images", plan.image != "host"),
        "network_none": ("cut the network off", plan.network == "none"),
        "network_allowlist": ("limit the network to a list", plan.network == "allowlist"),
    }
    for capability, (what, wanted) in needs.items():
        if wanted and not getattr(engine.capabilities, capability):
            raise refuse(engine, engines, capability, what)
