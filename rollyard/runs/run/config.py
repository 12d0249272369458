"""One TOML file is one run. `RunConfig` is that file as a frozen value; the command line and Python fill the same one."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollyard.core.agent import DEFAULT_AGENT
from rollyard.core.branch_point import HOWS, BranchPoint, How
from rollyard.core.errors import ConfigError
from rollyard.core.ids import LAST
from rollyard.core.near_path import near_path
from rollyard.core.numbers import check_least
from rollyard.core.tree import Tree
from rollyard.runs.report.spending import Price
from rollyard.runs.rollout.options import RolloutFields, RolloutOptions

AUTO = "auto"  # as many rollouts at a time as the machine's memory carries
POLICY = "policy"  # the name of a run's only policy


class RunConfig(RolloutOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run is: tasks x agents x policies x attempts, and the options of each rollout.

    `policies` maps a name (shown in reports) to how it is reached: `upstream:URL`, `tokens:URL`, `scripted:FILE`,
    `replay:ID`. `concurrency` bounds the rollouts in flight per policy name, `prices` say what its tokens cost."""

    branch: str | None = None  # go on from this call of a kept rollout: ROLLOUT@CALL, or ROLLOUT@end
    branch_how: How = "auto"  # by the agent's own session (resume), by its commands run again (replay), or as can be
    branch_answer: str | None = None  # what is answered there in place of the policy: text, or JSON with tool_calls
    tree: Tree | None = None  # each rollout has children that go on from one of its calls
    name: str = ""  # by which people find it again; need not be unique
    tasks: str = ""
    strict: bool = False  # a task that cannot be read ends the run before it begins, instead of being left out
    agents: tuple[str, ...] = (DEFAULT_AGENT,)
    policies: Mapping[str, str] = {}
    attempts: int = 1
    parallel: int | Literal["auto"] = 4  # rollouts at a time; auto: as many as memory carries
    concurrency: Mapping[str, int] = {}
    retries: int = 1
    policy_failures: int = 5  # equal failures in a row after which a policy is asked no more; 0: never
    lease_s: float = 60.0  # how long an attempt stays with a worker that gives no sign of life
    sandbox: str = "local"
    filter: tuple[str, ...] = ()  # globs on task ids
    limit: int | None = None
    max_tokens: int | None = None  # the run's budget of completion tokens
    prices: Mapping[str, Price] = {}  # by policy name
    currency: str = ""  # of the prices, as people write it: $, EUR
    max_cost: float | None = None  # the run's budget of money, in the currency of `prices`

    @property
    def branch_point(self) -> BranchPoint | None:
        return None if self.branch is None else BranchPoint.parse(self.branch)

    def slots(self, sharers: int = 1) -> float:
        """Rollouts at a time of each of so many workers."""
        return math.inf if isinstance(self.parallel, str) else math.ceil(self.parallel / sharers)

    @property
    def answers(self) -> Mapping[str, str]:
        """The policies, or the one that `base_url` stands for."""
        if self.base_url is None:
            return self.policies
        return {POLICY: f"{'passthrough' if self.mode == 'black_box' else 'upstream'}:{self.base_url}"}

    def __post_init__(self) -> None:
        if self.policies and self.base_url is not None:
            raise ConfigError("policies and base_url both say who answers", hint="give one of them")
        RolloutOptions.__post_init__(self)
        if self.name == LAST or self.name != self.name.strip() or not self.name.isprintable():
            raise ConfigError(
                f"{self.name!r} is no name for a run", hint=f"printable words; {LAST!r} means the newest run"
            )
        if self.branch is not None:
            BranchPoint.parse(self.branch)
        if self.branch_how not in HOWS:
            raise ConfigError(f"branch_how={self.branch_how!r} is no way to branch", hint=f"one of {', '.join(HOWS)}")
        if self.branch_how != "auto" and self.branch is None and self.tree is None:
            raise ConfigError(f"branch_how={self.branch_how!r}, and nothing branches", hint="give branch or tree too")
        if self.branch_answer is not None and (self.branch_point is None or self.branch_point.is_behind):
            raise ConfigError("branch_answer needs a call that it answers", hint="give branch = ROLLOUT@CALL")
        check_least(1, attempts=self.attempts, limit=self.limit, max_tokens=self.max_tokens)
        if isinstance(self.parallel, str):
            if self.parallel != AUTO:
                raise ConfigError(f"parallel is {self.parallel!r}", hint=f"a number, or {AUTO!r}")
        else:
            check_least(1, parallel=self.parallel)
        check_least(1, **{f"concurrency.{name}": value for name, value in self.concurrency.items()})
        if not 1 <= self.lease_s < 86400:
            raise ConfigError(f"lease_s must be between a second and a day, got {self.lease_s}")
        check_least(0, retries=self.retries, policy_failures=self.policy_failures, max_cost=self.max_cost)
        for field in ("concurrency", "prices"):
            for name in getattr(self, field):
                if self.answers and name not in self.answers:
                    raise ConfigError(f"{field} names the policy {name!r}, which the run does not have")
        if self.max_cost is not None and not self.prices:
            raise ConfigError(
                "max_cost needs prices", hint="give [prices.NAME] prompt and completion per million tokens"
            )


def load(path: str | Path, options: RolloutFields | None = None) -> RunConfig:
    """A TOML file with `RunConfig`'s fields, and `options` over them; relative task paths are relative to the file."""
    config = convert(read_toml(path), str(path))
    return msgspec.structs.replace(config, **anchor_user(options or {}))


def anchor_user(options: RolloutFields) -> RolloutFields:
    """Options of a command line: the script of a user is found from the folder that it was named in."""
    user = options.get("user")
    return options if user is None else {**options, "user": anchor(user, Path.cwd())}


def read_toml(path: str | Path) -> dict[str, Any]:
    file = Path(path)
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {file}", hint=near_path(file)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    if "tasks" in values and (file.parent / values["tasks"]).exists():
        values["tasks"] = str((file.parent / values["tasks"]).resolve())
    for name, text in values.get("policies", {}).items():
        values["policies"][name] = anchor(str(text), file.parent)
    if "user" in values:
        values["user"] = anchor(str(values["user"]), file.parent)
    return values


def anchor(policy: str, folder: Path) -> str:
    """A script, and the store of a recording, are found again by a run that is resumed elsewhere."""
    kind, colon, rest = policy.partition(":")
    where, mark, options = rest.partition("#")
    if kind == "scripted" and colon and (folder / where).exists():
        where = str((folder / where).resolve())
    if kind == "replay":
        options = "&".join(_anchor_store(option, folder) for option in options.split("&"))
    return f"{kind}{colon}{where}{mark}{options}"


def _anchor_store(option: str, folder: Path) -> str:
    name, _, path = option.partition("=")
    return f"store={(folder / path).resolve()}" if name == "store" and (folder / path).exists() else option


def convert(values: Mapping[str, Any], source: str) -> RunConfig:
    try:
        return msgspec.convert(values, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}", hint="see `rollyard run --help` for the fields") from error
