"""Who may reach the host: the user's own tasks may, tasks from elsewhere may not until the user says so.

A task below the working directory is the user's own, and so is one made in Python. Any other is untrusted: it reads no variables
of the host but those named by `--env`, its files and links stay in its folder, its Python verifier runs in a sandbox of its own,
and packages of its layers are installed in one. `--trust-tasks` lifts this, and is remembered for exactly these files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import msgspec

from rollyard.core import folders, registry
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.home import user_home
from rollyard.core.sandbox import is_path
from rollyard.core.task import Site, Task, VerifierSpec
from rollyard.tasks.verifiers.sandboxed_python import read_file_reference
from rollyard.tasks.verifiers.weighted import parts_of

HINT = "--trust-tasks (trust_tasks=True) lets these tasks reach this machine"


def is_trusted(path: Path, *, trust_tasks: bool, remembered: Set[str] | None = None) -> bool:
    """`trust_tasks` says so now; for these very files it may have been said before (`remembered`, read where it is not given)."""
    place = path.resolve()
    if is_own(place):
        return True
    if trust_tasks:
        _remember(source_digest(place), place)
        return True
    remembered = load_remembered() if remembered is None else remembered
    return bool(remembered) and source_digest(place) in remembered


def is_own(place: Path) -> bool:
    here = Path.cwd().resolve()
    return here != Path(here.anchor) and place.is_relative_to(here)


def source_digest(place: Path) -> str:
    """Over every file, also those that a task's ignore files leave out: they could be code."""
    outer = hashlib.sha256()
    names = sorted(folders.entries(place)) if place.is_dir() else [""]
    for name in names:
        file = place / name
        if file.is_symlink():
            outer.update(f"{name}\0{file.readlink()}\n".encode("utf-8", "surrogateescape"))
        elif file.is_file():
            with file.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
            outer.update(f"{name}\0{digest}\n".encode("utf-8", "surrogateescape"))
    return f"sha256:{outer.hexdigest()}"


def _trust_file() -> Path:
    root = Path(os.environ.get("XDG_STATE_HOME") or user_home() / ".local" / "state")
    return root / "rollyard" / "trusted-tasks"


def load_remembered() -> set[str]:
    try:
        return {line.partition(" ")[0] for line in _trust_file().read_text().splitlines()}
    except OSError:
        return set()


def _remember(digest: str, place: Path) -> None:
    file = _trust_file()
    if digest in load_remembered():
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as lines:
        lines.write(f"{digest} {str(place)!a}\n")


def mark_untrusted(task: Task, root: Path | None) -> Task:
    """The task as one whose author is not trusted; a path of the host that leaves `root` is refused, and any where the author
    has no folder here."""
    inside = None if root is None else root.resolve()
    for path in _host_paths(task):
        if inside is None:
            raise ConfigError(f"task {task.id!r}: {path} is a path of this machine", hint="send the contents of files")
        if not _stays_inside(path, str(inside)):
            raise ConfigError(f"task {task.id!r}: {path} is outside {inside}, where this task comes from", hint=HINT)
    return msgspec.structs.replace(task, trusted=False)


def _stays_inside(path: str, inside: str) -> bool:
    """Where no link lies between the two there is nothing to resolve."""
    rest = path.removeprefix(inside)
    if rest == "" or (rest.startswith("/") and rest != path and not {"..", ""} & set(rest[1:].split("/"))):
        at = inside
        for part in rest.split("/")[1:]:
            at = f"{at}/{part}"
            if os.path.islink(at):  # noqa: PTH114 - of thousands of tasks
                break
        else:
            return True
    return Path(path).resolve().is_relative_to(inside)


def _host_paths(task: Task) -> Iterator[str]:
    steps = task.steps
    specs = [spec for spec in (task.verifier, *(step.verifier for step in steps)) if spec is not None]
    sites: list[Site] = [task, *(spec.site for spec in specs if spec.site is not None)]
    found: list[str | None] = [task.solution, task.source, *(file.source for file in task.files)]
    found += [path for site in sites for path in (site.build, site.compose)]
    found += [str(Path(site.image).expanduser()) for site in sites if is_path(site.image)]
    found += [path for step in steps for path in (step.workdir_files, step.solution)]
    found += [path for spec in specs for path in spec.tests]
    judges = [part for spec in specs for part in _with_parts(spec)]
    found += [str(spec.options["folder"]) for spec in judges if spec.options.get("folder")]
    refs = [str(spec.options.get("ref")).rpartition(":")[0] for spec in judges if spec.kind == "python"]
    found += [ref for ref in refs if ref.endswith(".py")]
    yield from (path for path in found if path is not None)


def _with_parts(spec: VerifierSpec) -> Iterator[VerifierSpec]:
    """The verifier, and those that it is made of."""
    yield spec
    if spec.kind == "weighted":
        for _, _, part in parts_of(spec):
            yield from _with_parts(part)


def refuse_host_code(task: Task) -> None:
    """Verifiers of an untrusted task are installed ones, or files that run in a sandbox; nothing else is imported here."""
    specs = [spec for spec in (task.verifier, *(step.verifier for step in task.steps)) if spec is not None]
    for part in (part for spec in specs for part in _with_parts(spec) if not task.trusted):
        if part.kind == "python":
            read_file_reference(part)
        elif part.kind not in (installed := registry.names("rollyard.verifiers")):
            raise UnknownName("verifier", part.kind, installed, hint=HINT)


def apply_trust(task: Task, *, trust_tasks: bool, env: tuple[str, ...]) -> Task:
    """What the caller of one rollout says about the author of its task."""
    if task.trusted or trust_tasks:
        return msgspec.structs.replace(task, trusted=True) if not task.trusted else task
    return msgspec.structs.replace(task, host_env=env)


def readable_variables(task: Task) -> Mapping[str, str]:
    """Variables of the host that the task's templates may name."""
    if task.trusted:
        return os.environ
    return {name: os.environ[name] for name in task.host_env if name in os.environ}
