"""SWE-bench and sets of its form: folders (`task.yaml`, `tests.json`, patches) or rows (`base_commit`, `patch`, `test_patch`).

Where `repositories` names a folder of git repositories (`OWNER__NAME`, `OWNER/NAME`, with or without `.git`), the image is built:
the declared Python, the pinned packages, and then the tree of the base commit as one new commit, so that images of one repository
and version share their environment and no later commit is in any of them. Otherwise the instance's own image is taken, and its
repository sealed before the agent starts: nothing is left of it but the image's HEAD and what that grew from. The agent never
has the test patch, the gold patch or the list of tests.
"""

from __future__ import annotations

import gzip
import importlib.resources
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import (
    PYTHON_LAYER,
    SEAL,
    SEALING,
    Row,
    field,
    first_row,
    is_original,
    is_wanted,
    put_tests_back,
    read_inside,
    read_text_inside,
    row_drafts,
    string_list,
    write_task,
)
from rollyard.tasks.adapters.git_trees import ONE_COMMIT

_WORKDIR = "/testbed"
_PINS = re.compile(r"^\s*- ([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)\s*$", re.M)
_CONDA = re.compile(r"^\s*- ([A-Za-z0-9._-]+)=([0-9][^=\s]*)=(\S+)\s*$", re.M)
# What comes between the test patch and the first mark builds the tests; between the marks they run.
_PARTS = re.compile(
    r"(?:^EOF_\d+\n(?P<build>(?:(?!^EOF_).)*?))?^(?:: |\{ set \+x; \} 2>/dev/null\necho )'>>>>> Start Test Output'\n"
    r"(?P<command>.*?)\n(?:: |echo )'>>>>> End Test Output",
    re.S | re.M,
)
_INSTALLS = re.compile(r'echo "Current environment.*?\ncd /testbed\n(.*?)\n# Configure git', re.S)
_FORMATS = {
    "astropy": "pytest-long", "scikit": "pytest-long", "sphinx": "pytest-long", "pytest_v2": "pytest-long",
    "pydicom": "pytest-paths", "requests": "pytest-paths", "pylint": "pytest-paths", "pytest_options": "pytest-paths",
    "matplotlib": "matplotlib", "seaborn": "seaborn", "django": "django", "sympy": "sympy",
    **dict.fromkeys(("pytest", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"), "pytest"),
}  # fmt: skip
_LANGUAGE_FORMATS = {  # of SWE-bench Multilingual
    "gotest": "go", "gradle_custom": "gradle", "jest_json": "jest-json", "micropython_test": "micropython",
    "rspec_transformed_json": "rspec", "ruby_unit": "ruby-unit",
    **{name: name for name in ("ant", "cargo", "cucumber", "doctest", "googletest", "jest", "jq", "karma", "maven",
                               "minitest", "phpunit", "redis", "tap", "vitest")},
}  # fmt: skip
_FORMATS_OF_INSTANCES = {  # two repositories changed their runner on the way
    "immutable-js__immutable-js-2005": "jest-json", "immutable-js__immutable-js-2006": "jest",
    "jekyll__jekyll-8761": "cucumber", "jekyll__jekyll-8771": "cucumber",
    **{f"jekyll__jekyll-{number}": "minitest" for number in (8047, 8167, 9141)},
}  # fmt: skip
_COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
_SUBSETS = {"verified": "SWE-bench/SWE-bench_Verified", "lite": "SWE-bench/SWE-bench_Lite"}
_RUNNERS = {  # parts of a project's own test runner that its code under test does not need
    "django/django": ("tests/runtests.py", "tests/test_sqlite.py"),
    "sympy/sympy": (
        "bin/test", "sympy/testing/runtests.py", "sympy/testing/pytest.py", "sympy/utilities/runtests.py",
        "sympy/utilities/pytest.py",
    ),
}  # fmt: skip
_DJANGO_CONTROL = """import unittest


class NAMETests(unittest.TestCase):
    def test_NAME_a(self):
        self.assertEqual(1, 2)

    def test_NAME_b(self):
        self.assertTrue(False)

    def test_NAME_c(self):
        with self.assertRaises(ValueError):
            pass
"""
_SYMPY_CONTROL = """def test_NAME_a():
    assert 1 == 2


def test_NAME_b():
    raise AssertionError


def test_NAME_c():
    assert [] == [1]
"""
_LOG = "/logs/verifier/tests.log"
_RECORD = "/logs/verifier/record.json"
_JUDGES = ("run_tests.py", "pytest_witness.py", "log_check.py")
_TEST = f"""#!/bin/sh
cd {_WORKDIR} && python3 -I -S /tests/run_tests.py < /tests/plan.json
tail -c 20000 {_LOG}
if python3 -I -S /tests/log_check.py {_LOG} /tests/tests.json {_RECORD}; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
_ORIGINALS = "originals.tar.gz"  # test files of the base, where its repository is at hand
# The one commit of a tree that was built, where the agent's changes to it do not reach the judge
_BASE = "/opt/base.git"
_TOOLS = ("pip", "setuptools", "wheel")
# Images whose packages are in a conda environment of that name
_TESTBED = re.compile(r"(?:^|/)(?:sweb\.eval|swesmith)\.")
# What their shells do at a login, for programs that are started by no login shell
_ACTIVE = {
    "PATH": "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "CONDA_PREFIX": "/opt/miniconda3/envs/testbed",
    "CONDA_DEFAULT_ENV": "testbed",
}
_INSTALL = "python -m pip install -e ."
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_COMMIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


class SweInstance(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder and a row have in common. `reverse`: the patch makes the fault, and undoing it is the answer."""

    id: str
    repo: str
    base: str
    problem: str
    patch: str
    test_patch: str
    tests: dict[str, Any]
    command: str
    image: str
    build: str = ""
    version: str = ""
    python: str = ""
    pins: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    install: str = _INSTALL
    reverse: bool = False


def recognise(source: Path) -> bool:
    row = first_row(source)
    rows = {"instance_id", "patch", "FAIL_TO_PASS"} <= row.keys() and "selected_test_files_to_run" not in row
    return rows or (source.is_dir() and next(source.glob("*/gold.patch"), None) is not None)


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    """`instances` are globs over ids; `subset` is verified or lite, of folders that say so."""
    if source.is_dir():
        wanted = str(options.get("subset", ""))
        if wanted and wanted not in _SUBSETS:
            raise UnknownName("subset", wanted, list(_SUBSETS))
        subset = _SUBSETS.get(wanted, "")
        for file in sorted(source.glob("*/task.yaml")):
            if is_wanted(file.parent.name, options) and subset in file.read_text():
                yield TaskDraft(file.parent.name, partial(_write_folder, file.parent, options))
        return

    def name(_number: int, row: Row) -> str | None:
        found = str(row.get("instance_id", ""))
        return found if is_wanted(found, options) else None

    yield from row_drafts(source, name, lambda row, folder: _write(_from_row(row, options), options, folder))


def _write_folder(source: Path, options: Mapping[str, Any], folder: Path) -> None:
    _write(_from_folder(source), options, folder)


def _from_folder(source: Path) -> SweInstance:
    try:
        files = ("gold.patch", "test.patch", "eval.sh", "Dockerfile", "task.yaml", "problem_statement.md")
        texts = {name: read_text_inside(source / name, source.parent) for name in files}
        task = msgspec.convert(yaml.safe_load(texts["task.yaml"]), dict[str, Any])
        tests = msgspec.json.decode(read_inside(source / "tests.json", source.parent), type=dict[str, Any])
    except (*BAD_JSON, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: {error}") from error
    parts, install = _PARTS.search(texts["eval.sh"]), _INSTALLS.search(texts["Dockerfile"])
    if parts is None:
        raise ConfigError(f"{source / 'eval.sh'}: no command between its marks")
    file = source / "environment.yml"
    declared = read_text_inside(file, source.parent) if file.is_file() else ""
    conda = {name: (version, build) for name, version, build in _CONDA.findall(declared)}
    libraries = [f"{name}=={version}" for name, (version, build) in conda.items() if re.match(r"py\d", build)]
    return SweInstance(
        id=str(task["instance_id"]),
        repo=str(task["repo"]),
        base=str(task["base_commit"]),
        problem=texts["problem_statement.md"],
        patch=texts["gold.patch"],
        test_patch=texts["test.patch"],
        tests={**tests, "format": _format(str(task["instance_id"]), str(task.get("log_parser", "")))},
        build=(parts["build"] or "").strip(),
        command=parts["command"],
        image=str(task.get("image", "")),
        version=str(task.get("version", "")),
        python=".".join(conda["python"][0].split(".")[:2]) if "python" in conda else "",
        pins=tuple(
            [pin for pin in libraries if pin.split("==")[0] not in (*_TOOLS, "certifi")]
            + [f"{name}=={version}" for name, version in _PINS.findall(declared) if name not in _TOOLS]
        ),
        tools=tuple(f"{name}=={conda[name][0]}" for name in _TOOLS if name in conda),
        install=install[1].strip() if install is not None else _INSTALL,
    )


def _format(instance: str, parser: str) -> str:
    name = parser.removeprefix("parse_log_")
    found = _FORMATS_OF_INSTANCES.get(instance) or _FORMATS.get(name) or _LANGUAGE_FORMATS.get(name)
    if found is None:
        raise ConfigError(
            f"{instance}: no reader for logs of {parser!r}" if parser else f"{instance}: names no log_parser"
        )
    return found


def _from_row(row: Mapping[str, Any], options: Mapping[str, Any]) -> SweInstance:
    """`image` of the options is a name with `{instance}` in it, or `{owner}` and `{rest}`, for rows that name none."""
    name, repo = str(field(row, "instance_id")), str(field(row, "repo"))
    test_patch = str(row.get("test_patch") or "")
    template = str(options.get("image", "swebench/sweb.eval.x86_64.{instance}:latest"))
    owner, _, rest = name.lower().partition("__")
    parts = {"{instance}": name.lower().replace("__", "_1776_"), "{owner}": owner, "{rest}": rest}
    default = re.sub(r"\{\w+\}", lambda part: parts.get(part[0], part[0]), template)
    expected = {
        "FAIL_TO_PASS": string_list(field(row, "FAIL_TO_PASS")),
        "PASS_TO_PASS": string_list(row.get("PASS_TO_PASS")),
        "format": _FORMATS.get(repo.partition("/")[2].partition("-")[0].partition(".")[0], "pytest"),
    }
    given = str(row.get("test_cmd") or _COMMANDS.get(repo, "pytest -rA"))
    files = _test_files(test_patch) or sorted(
        {test.split("::")[0] for test in expected["FAIL_TO_PASS"] if "::" in test}
    )
    if repo == "django/django":
        files = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
    return SweInstance(
        id=name,
        repo=repo,
        base=str(row.get("base_commit") or ""),
        problem=str(field(row, "problem_statement")),
        patch=str(field(row, "patch")),
        test_patch=test_patch,
        tests=expected,
        command=" ".join([given, *files]),
        image=str(row.get("image_name") or row.get("docker_image") or default),
        reverse=not test_patch,
    )


def _test_files(patch: str) -> list[str]:
    return [name for name in re.findall(r"^diff --git a/.* b/(.*)$", patch, re.M) if name.endswith(".py")]


def _write(one: SweInstance, options: Mapping[str, Any], folder: Path) -> None:
    if not one.tests.get("FAIL_TO_PASS"):
        raise ConfigError(f"{one.id}: no test fails before its patch")
    apply = "git apply -R" if one.reverse else "git apply"
    repositories = options.get("repositories")
    tree = _archive(_find_repository(Path(str(repositories)), one.repo), one) if repositories else b""
    environment = _build_files(one, tree) if repositories else {}
    inside = importlib.resources.files("rollyard.inside")
    plan = _plan(one, _restore(one, originals=bool(repositories)), built=bool(repositories))
    if not repositories and one.reverse:
        environment = {
            "Dockerfile": f"FROM {one.image}\nCOPY fault.patch /tmp/\n{_apply_fault()}",
            "fault.patch": one.patch,
        }
    table = {
        "metadata": {
            "repo": one.repo,
            "rollyard": {
                "verifier": "test-log",
                "options": {"timeout_s": 1800.0},
                "grade": "sealed",
                **({"verifier_layers": [PYTHON_LAYER]} if _is_foreign(one) else {}),
                **({} if environment else {"setup": [SEALING]}),
            },
        },
        "environment": {"workdir": _WORKDIR, "build_timeout_sec": 3600.0}
        | ({} if environment else {"docker_image": one.image})
        | ({"env": _ACTIVE} if not repositories and not _is_foreign(one) and _TESTBED.search(one.image) else {}),
        "agent": {"timeout_sec": 3000.0},
        "verifier": {"timeout_sec": 1830.0},
    }
    write_task(
        folder,
        instruction=f"{one.problem.strip()}\n\nThe repository is in {_WORKDIR}. Change its source, not its tests.",
        table=table,
        tests={
            "plan.json": msgspec.json.format(msgspec.json.encode(plan)),
            **({_ORIGINALS: _pack_originals(one, tree)} if repositories else {}),
            "test.sh": _TEST,
            "test.patch": one.test_patch,
            "tests.json": msgspec.json.encode({**one.tests, "INNER": _find_inner(one), "runner": _runner(plan)}),
            **{name: inside.joinpath(name).read_bytes() for name in _JUDGES},
        },
        solution={"solve.sh": f"#!/bin/bash\ncd {_WORKDIR} && {apply} /solution/gold.patch\n", "gold.patch": one.patch},
        files={} if environment else {SEAL: inside.joinpath(SEAL).read_bytes()},
        environment=environment,
    )


def _is_foreign(one: SweInstance) -> bool:
    """Whether its tests are of another language than Python: then its image may have none, and some logs need the trace."""
    return one.tests["format"] in (*_LANGUAGE_FORMATS.values(), *_FORMATS_OF_INSTANCES.values())


def _restore(one: SweInstance, *, originals: bool) -> str:
    if originals:
        return f"/tests/{_ORIGINALS}"
    base = f"git --git-dir={_BASE} --work-tree=. checkout -q HEAD --"
    return base if one.reverse else one.base


def _pack_originals(one: SweInstance, tree: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tree)) as source, tarfile.open(fileobj=packed, mode="w") as target:
        for member in source:
            if is_original(member.name, one.test_patch, one.patch, _RUNNERS.get(one.repo, ())):
                target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return gzip.compress(packed.getvalue(), compresslevel=1, mtime=0)


def _plan(one: SweInstance, restore: str, *, built: bool) -> dict[str, Any]:
    """What `run_tests.py` does."""
    expected = [*one.tests["FAIL_TO_PASS"], *one.tests["PASS_TO_PASS"]] if one.reverse else []
    files = [test.split("::")[0] for test in expected if "::" in test]
    prepare = put_tests_back(_WORKDIR, restore, one.test_patch, one.patch, files, _RUNNERS.get(one.repo, ()))
    prepare += re.findall(r"^sed -i .* (?:setup\.cfg|tox\.ini|pyproject\.toml)$", one.install, re.M)
    if built and (name := re.search(r"^tox --current-env -e(\w+)", one.command)):
        prepare += _enter_venv(f".tox/{name[1]}")
    if one.build:
        prepare += ["{", one.build, "} > /logs/verifier/build.log 2>&1"]
    traced = ["set -x", one.command, "{ set +x; } 2>/dev/null"] if _is_foreign(one) else [one.command]
    plan = {
        "prepare": "\n".join([*prepare, "true"]),
        "command": "\n".join(traced),
        "key": "",
        "log": _LOG,
        "record": _RECORD,
    }
    if _is_foreign(one):
        return plan
    if one.repo in _RUNNERS and (control := _control(one)) is not None:
        return {**plan, "control": control, "command": f"{one.command} @CONTROL@"}
    with_tox, changed = re.subn(r"^(tox .* --) ", r"\1 @WITNESS@ ", one.command, count=1)
    if changed:
        return {**plan, "site": "tox", "command": with_tox}
    with_pytest, changed = re.subn(
        r"^((?:\w+=\S+ )*(?:\S*python3? -m )?pytest) ", r"\1 @WITNESS@ ", one.command, count=1
    )
    return {**plan, "site": "pytest", "command": with_pytest} if changed and "\n" not in one.command else plan


def _runner(plan: Mapping[str, Any]) -> str:
    """How the log is proved: by what pytest says beside it, by controls, or not at all."""
    return "pytest" if "site" in plan else "controls" if "control" in plan else ""


def _find_inner(one: SweInstance) -> list[str]:
    """Tests that passed before and that no file of the command can have: a pytest that a test starts prints them, so the log has
    them and the record has not. A command that names folders could run any file."""
    words = [word for word in one.command.split() if not word.startswith("-")]
    files = [word for word in words if word.endswith(".py")]
    if not files or any("/" in word for word in words if word not in files):
        return []
    places = {name: name.partition("::")[0] for name in one.tests["PASS_TO_PASS"] if "::" in name}
    return [
        name
        for name, place in places.items()
        if not any(place.endswith(file) or file.endswith(place) for file in files)
    ]


def _control(one: SweInstance) -> dict[str, str] | None:
    """A file of tests that cannot pass, beside those of the command, and how the command names it."""
    words = one.command.split()
    if one.repo == "django/django":
        labels = words[words.index("1") + 1 :] if "1" in words else []
        app = labels[-1].partition(".")[0] if labels else "utils_tests"
        return {"path": f"tests/{app}/test_NAME.py", "argument": f"{app}.test_NAME", "text": _DJANGO_CONTROL}
    folder, found, _ = words[-1].rpartition("/")
    path = f"{folder}/test_NAME.py"
    return {"path": path, "argument": path, "text": _SYMPY_CONTROL} if found else None


def _enter_venv(place: str) -> list[str]:
    """tox's plugin for the environment it is in takes it for one without a folder of its own, which a venv is not."""
    return [f"mkdir -p {place} && cp /opt/testbed/pyvenv.cfg {place}/ && ln -sfn /opt/testbed/lib {place}/lib"]


def _apply_fault() -> str:
    """The fault laid in, as part of the one commit that there is."""
    command = f"cd {_WORKDIR} && git apply /tmp/fault.patch && rm -rf /tmp/fault.patch .git && {ONE_COMMIT} && cp -a .git {_BASE}"
    return f"RUN {command}\nWORKDIR {_WORKDIR}\n"


def _build_files(one: SweInstance, tree: bytes) -> dict[str, str | bytes]:
    if not one.python:
        raise ConfigError(f"{one.id}: it declares no Python to build with", hint="leave out the option repositories")
    version = [f"export SETUPTOOLS_SCM_PRETEND_VERSION={one.version}"] if re.fullmatch(r"[\d.]+", one.version) else []
    install = "\n".join(["set -e", f"cd {_WORKDIR}", *version, one.install])  # there are no tags to read a version from
    tools = " ".join([*(one.tools or ("pip",)), *([] if _has_pytest(one) else ["pytest"])])
    lines = [
        "ARG BASE=host",
        "FROM ${BASE}",
        f"RUN {_make_venv(one.python)}",
        "ENV PATH=/opt/testbed/bin:$PATH",
        f"RUN python -m pip install -q --no-compile {tools}",
        *([f"RUN python -m pip install -q {' '.join(one.pins)}"] if one.pins else []),
        f"ADD repository.tar.gz {_WORKDIR}/",
        f"WORKDIR {_WORKDIR}",
        f"RUN {ONE_COMMIT}",
        "COPY install.sh /tmp/install.sh",
        "RUN bash /tmp/install.sh && rm /tmp/install.sh",
    ]
    return {"Dockerfile": "\n".join([*lines, ""]), "repository.tar.gz": tree, "install.sh": f"{install}\n"}


def _make_venv(python: str) -> str:
    """Python 2 has no venv of its own, and the newest virtualenv makes none for it."""
    if not python.startswith("2."):
        return f"python{python} -m venv /opt/testbed"
    tool = "/opt/virtualenv/bin"
    return (
        f"python3 -m venv /opt/virtualenv && {tool}/python -m pip install -q virtualenv==20.21.1"
        f" && {tool}/virtualenv -q -p python{python} /opt/testbed"
    )


def _has_pytest(one: SweInstance) -> bool:
    """Or needs none."""
    pinned = any(pin.startswith("pytest==") for pin in one.pins)
    return pinned or one.repo == "pytest-dev/pytest" or "pytest" not in one.command


def _find_repository(root: Path, repo: str) -> Path:
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"{repo!r} is no repository", hint="OWNER/NAME")
    owner, _, name = repo.partition("/")
    tried = [root / f"{owner}{mark}{name}{end}" for mark in ("__", "/", "+") for end in ("", ".git", "/repo")]
    for path in tried:
        if (path / "HEAD").is_file() or (path / ".git").exists():
            return path
    raise ConfigError(f"{root}: no repository of {repo} in it", hint=f"clone it to {root}/{owner}__{name}")


def _archive(repository: Path, one: SweInstance) -> bytes:
    """The tree of the base commit: files, and nothing of the history."""
    if not _COMMIT_NAME.fullmatch(one.base):
        raise ConfigError(f"{one.id}: {one.base!r} is no commit")
    command = ["git", "-C", str(repository), "archive", "--format=tar", one.base]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-200:]
        raise ConfigError(f"{one.id}: {repository} does not give {one.base}: {said}")
    return gzip.compress(done.stdout, compresslevel=1, mtime=0)


adapter = Adapter(
    about="SWE-bench instances: folders, also of Multilingual; rows of SWE-bench, Verified, Lite, SWE-Gym, SWE-smith",
    get="tasks/ of github.com/SWE-bench/swe-bench-tasks or swe-bench-multilingual-tasks, or rows as JSON Lines or Parquet",
    recognise=recognise,
    read=read,
    needs=("the instances' images; or their repositories, their Python and a network for the build",),
    options=("image", "instances", "repositories", "subset"),
    carries=(*_JUDGES, SEAL),
)
