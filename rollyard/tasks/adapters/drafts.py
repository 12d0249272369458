"""What adapters share: reading rows in any of their formats, and writing one task folder."""

from __future__ import annotations

import ast
import csv
import fnmatch
import gzip
import io
import re
import shlex
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rollyard.core import toml
from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, MissingExtra
from rollyard.tasks.adapters import TaskDraft

WORKDIR = "/app"
PYTHON_LAYER = "pip:iniconfig==2.1.0"  # a layer of any package brings the interpreter that a judge runs by
_TEST_FOLDERS = {"tests", "test"}
_TEST_FILE = re.compile(r"test_.*\.py|.*_tests?\.py|tests?\.py|conftest\.py")
_ORDERS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml")  # pytest takes orders from them
_SETTINGS = ("setup.cfg", "tox.ini", "pyproject.toml")  # and from these, which have other readers, too
SEAL = "seal_repository.sh"  # of `rollyard.inside`
SEALING = f"sh {SEAL} . && rm {SEAL}"  # the setup command of a task that has it among its files
_LONGEST_FIELD = 2**30  # of a CSV file; without a word Python's own reader ends at 128 kB
Row = Mapping[str, Any]
ROWS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


class SourceFile(bytes):
    """A file's content, which also says whether it may be started."""

    program = False

    @classmethod
    def read(cls, path: Path, root: Path) -> SourceFile:
        made = cls(read_inside(path, root))
        made.program = bool(path.stat().st_mode & 0o100)
        return made


def is_rows(source: Path) -> bool:
    return source.is_file() and source.name.endswith(ROWS)


def row_drafts(
    source: Path, name: Callable[[int, Row], str | None], write: Callable[[Row, Path], None]
) -> Iterator[TaskDraft]:
    """A draft for each row of a file, or of every such file directly in a folder; a row that cannot be read is one too, which
    says why. `name` is given the row's number from 0 on; None leaves the row out."""
    files = sorted(path for path in source.iterdir() if is_rows(path)) if source.is_dir() else [source]
    for number, row in enumerate(row for file in files for row in _read_file(file)):
        if isinstance(row, ConfigError):
            yield TaskDraft(f"row-{number}", partial(_refuse, row))
        elif (called := name(number, row)) is not None:
            yield TaskDraft(folder_name(called), partial(write, row))


def _refuse(error: ConfigError, folder: Path) -> None:
    raise error


def first_row(source: Path) -> Row:
    """For a look at the form; an empty one where there is none."""
    row = next(_read_file(source), {}) if is_rows(source) else {}
    if isinstance(row, ConfigError):
        raise row
    return row


def _read_file(file: Path) -> Iterator[Row | ConfigError]:
    """Its rows, and an error in place of each that is none. A file that cannot be read at all is an error."""
    if file.name.endswith(".parquet"):
        yield from _read_parquet(file)
        return
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as data:
            if data.read(len(BOM_UTF8)) != BOM_UTF8:  # editors and spreadsheets put one before the first row
                data.seek(0)
            if file.name.endswith(".csv"):
                yield from _read_csv(file, data)
            elif file.name.endswith(".json"):
                for number, row in enumerate(
                    _decode(data.read(), f"{file}: a file of rows is a list of objects", list[Any])
                ):
                    yield _as_row(row, f"{file}[{number}]")
            else:
                yield from (_read_line(line, f"{file}:{number}") for number, line in enumerate(data, 1) if line.strip())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8: {error}", hint="save it as UTF-8") from error
    except EOFError as error:
        raise ConfigError(f"{file}: ends too soon", hint="fetch it again") from error
    except (OSError, zlib.error) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _read_csv(file: Path, data: gzip.GzipFile | io.BufferedReader) -> Iterator[Row | ConfigError]:
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.DictReader(io.TextIOWrapper(data, encoding="utf-8", newline=""))
    try:
        for row in rows:
            if None in row:
                many = f"{file}:{rows.line_num}: more fields than the {len(rows.fieldnames or ())} of the first line"
                yield ConfigError(many, hint="a comma in a field needs quotes around the field")
            else:
                yield row
    except csv.Error as error:
        raise ConfigError(f"{file}:{rows.line_num}: {error}") from error


def _read_line(line: bytes, where: str) -> Row | ConfigError:
    try:
        return _as_row(_decode(line, where, Any), where)
    except ConfigError as error:
        return error


def _decode(data: bytes, where: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except BAD_JSON as error:
        raise ConfigError(f"{where}: {error}") from error


def _as_row(row: Any, where: str) -> Row | ConfigError:
    return row if isinstance(row, dict) else ConfigError(f"{where}: a row is an object, not {type(row).__name__}")


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet", why=f"reading {file}") from error
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def field(row: Row, *names: str) -> Any:
    """The first of these fields that the row has."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    filled = [name for name in row if row[name] not in (None, "")]
    empty = [name for name in row if name not in filled]
    without = f", and without a value {', '.join(empty)}" if empty else ""
    raise ConfigError(f"the row has no {' or '.join(names)}; it has {', '.join(filled) or 'nothing'}{without}")


def text_field(row: Row, *names: str) -> str:
    """The same as text; what is no text or number, such as a list of messages, is refused."""
    value = field(row, *names)
    if not isinstance(value, (str, int, float)):
        named = next(name for name in names if row.get(name) is value)
        raise ConfigError(f"the row's {named} is a {type(value).__name__}, not text")
    return str(value)


def is_wanted(name: str, options: Mapping[str, Any]) -> bool:
    """Whether one of the globs of the option `instances` matches; commas stand between them."""
    globs = str(options.get("instances", "*")).split(",")
    return any(fnmatch.fnmatchcase(name, glob.strip()) for glob in globs)


def string_list(value: Any) -> list[str]:
    """A list of names, which many sets keep in a string: as JSON, as Python writes it, or with spaces between."""
    if isinstance(value, str):
        text = value.strip()
        return [str(item) for item in _read_list(text)] if text.startswith("[") else text.split()
    return [str(item) for item in value or ()]


def _read_list(text: str) -> list[Any]:
    try:
        return msgspec.json.decode(text, type=list[Any])
    except BAD_JSON:
        try:
            return list(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise ConfigError(f"no list of names: {text[:80]!r}") from error


def put_tests_back(
    workdir: str, restore: str, test_patch: str, answer: str, tests: Sequence[str] = (), runner: Sequence[str] = ()
) -> list[str]:
    """Lines of a judge's script: test files as they were at the base, with the test patch on them. So are files that pytest takes
    orders from and the project's own test runner, unless the answer, the set's own patch, has them too. `restore` brings files
    back: a commit of the repository, the beginning of a command of git, or the tar of all that `is_original` names. `tests` are
    files that the patch does not name."""
    touched = [shlex.quote(path) for path in dict.fromkeys((*_files_of_patch(test_patch), *tests))]
    kept = _files_of_patch(answer)
    apart = " ".join(f"! -path {shlex.quote(f'./{path}')}" for path in kept)
    named = " -o ".join(f"-name {name}" for name in ("__pycache__", *_ORDERS, *_SETTINGS))
    lines = [
        "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'",
        f"cd {workdir} || exit 1",
    ]
    if not restore.startswith(("git ", "/")):
        lines += _read_originals(shlex.quote(restore))
        restore = "git --git-dir=$originals --work-tree=. checkout -q $tree --"
    lines += [f"find . -name .git -prune -o \\( {named} \\) {apart} -prune -exec rm -rf {{}} +"]
    if restore.endswith(".tar.gz"):
        lines += [f"rm -rf {path}" for path in touched] + [f"tar -xzf {restore} || exit 1"]
    else:
        others = " ".join(shlex.quote(f":(exclude){path}") for path in kept)
        lines += [f"{restore} ':(glob)**/{name}' {others} 2>/dev/null" for name in (*_ORDERS, *_SETTINGS)]
        lines += [f"{restore} {path} 2>/dev/null || rm -f {path}" for path in touched]
        lines += [f"{restore} {shlex.quote(path)} 2>/dev/null" for path in runner if path not in kept]
    return [*lines, "git apply /tests/test.patch || exit 1"] if test_patch else lines


def _read_originals(base: str) -> list[str]:
    """The files of a commit in a repository of the judge's own. The one at hand is the agent's, and git believes the name of an
    object without a look at its content; packed and read again, each object gets the name that it deserves."""
    return [
        f'[ "$(git cat-file commit {base} | git hash-object -t commit --literally --stdin)" = {base} ] || exit 1',
        f"originals=$(mktemp -d) && tree=$(git rev-parse {base}^{{tree}}) && git init -q --bare $originals || exit 1",
        "git rev-list --objects $tree | cut -d' ' -f1 > $originals/names",
        "git pack-objects -q --stdout < $originals/names | git --git-dir=$originals index-pack --stdin > /dev/null || exit 1",
        "git --git-dir=$originals cat-file --batch-check < $originals/names | grep ' missing$' && exit 1",
    ]


def is_original(path: str, test_patch: str, answer: str, runner: Sequence[str] = ()) -> bool:
    """Whether `put_tests_back` wants this file of the base."""
    steers = PurePosixPath(path).name in (*_ORDERS, *_SETTINGS) or path in runner
    return (steers and path not in _files_of_patch(answer)) or path in _files_of_patch(test_patch)


def _files_of_patch(patch: str) -> list[str]:
    return re.findall(r"^diff --git a/(.*) b/.*$", patch, re.M)


def is_test(path: str) -> bool:
    """Whether a file of a Python package is one of its tests, or a part of them."""
    parts = PurePosixPath(path).parts
    return bool(_TEST_FOLDERS & set(parts[:-1])) or bool(_TEST_FILE.fullmatch(parts[-1]))


def is_inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())


def read_inside(path: Path, root: Path) -> bytes:
    """A file of the dataset whose folder is `root`: by `..` or a link its author could name any file of this machine."""
    if not is_inside(path, root):
        raise ConfigError(f"{path} leads out of {root}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def read_text_inside(path: Path, root: Path) -> str:
    try:
        return read_inside(path, root).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def folder_name(task_id: str) -> str:
    """A task's id as one name in a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "__", task_id).strip(".") or "task"


def reward_script(command: str) -> str:
    """`test.sh`: 1 where this shell command succeeds. What it prints is the log, and no part of the reward."""
    return f"#!/bin/sh\nif {command}; then reward=1; else reward=0; fi\necho $reward > /logs/verifier/reward.txt\n"


def write_task(
    folder: Path,
    *,
    instruction: str,
    table: Mapping[str, Any],
    tests: Mapping[str, str | bytes],
    solution: Mapping[str, str | bytes],
    files: Mapping[str, str | bytes] | None = None,
    environment: Mapping[str, str | bytes] | None = None,
) -> None:
    """A task folder. `files` are put into the working directory before the agent starts; `environment` is a build folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "instruction.md").write_text(instruction if instruction.endswith("\n") else f"{instruction}\n")
    parts = {"tests": tests, "solution": solution, "files": files or {}, "environment": environment or {}}
    for part, content in parts.items():
        for name, data in content.items():
            path = folder / part / name
            if not is_inside(path, folder / part):
                raise ConfigError(f"{name!r} leads out of the task's {part}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.encode() if isinstance(data, str) else data)
            program = data.program if isinstance(data, SourceFile) else path.suffix == ".sh"
            path.chmod(0o755 if program else 0o644)
    (folder / "task.toml").write_text(toml.dumps(_with_files(table, files or {})))


def _with_files(table: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {"schema_version": "1.4", **table}
    if files:
        metadata: dict[str, Any] = dict(whole.get("metadata", {}))
        listed = [{"path": name, "source": f"files/{name}"} for name in files]
        whole["metadata"] = {**metadata, "rollyard": {**metadata.get("rollyard", {}), "files": listed}}
    return whole
