"""Exercism exercises as aider's polyglot benchmark keeps them: `LANGUAGE/exercises/practice/NAME/.meta/config.json`.

The agent gets the exercise without its tests, its example and its notes. The judge (`inside/exercise_check.py`) lays the tests
and the build files over a copy of the agent's sources, and every test must pass: their names are read here, from the test files.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import (
    PYTHON_LAYER,
    WORKDIR,
    is_inside,
    read_inside,
    read_text_inside,
    reward_script,
    write_task,
)

_CONFIG = ".meta/config.json"
_HIDDEN = (".meta", ".docs", ".approaches", ".articles")
_DOCS = ("introduction.md", "introduction.append.md", "instructions.md", "instructions.append.md")
_CHECK = "exercise_check.py"  # of `rollyard.inside`
_JUDGE = f"python3 -I /tests/{_CHECK} {WORKDIR} /tests/plan.json"
_SKIPPED_JS = re.compile(r"\bx(test|it|describe)((?:\.each)?\()|\b(test|it|describe)\.skip\(")
_SKIPPED_JAVA = re.compile(r"@Disabled(?:\(\"[^\"]*\"\))?")
_FEATURE_RUST = re.compile(
    r"^( *)(?:#\[(?!cfg)[^\n]*\n\1)*#\[cfg\(feature[^\n]*\n(?:\1#\[[^\n]*\n)*\1(?:mod|fn) [^\n]*\{\n.*?^\1\}",
    re.M | re.S,
)


class Language(NamedTuple):
    """`names` finds the name of each test in a test file; `layers` are the judge's tools, `needs` programs of the image."""

    names: re.Pattern[str]
    needs: tuple[str, ...]
    layers: tuple[str, ...] = ()


LANGUAGES = {
    "cpp": Language(
        re.compile(r"^TEST_CASE\(\s*(?://[^\n]*\s*)*\"((?:[^\"\\]|\\.)*)\"", re.M), ("cmake", "make", "g++")
    ),
    "go": Language(re.compile(r"^func (Test\w+)\(\w+ \*testing\.T\) \{", re.M), ("go",)),
    "java": Language(re.compile(r"@Test\b(?:\s*@\w+(?:\([^)]*\))?)*[\w\s]*\bvoid\s+(\w+)\s*\("), ("javac",)),
    "javascript": Language(
        re.compile(r"^\s*(?:test|it)\(\s*(?P<q>['\"`])((?:(?!(?P=q))[^\\]|\\.)*)(?P=q)", re.M),
        ("node",),
        (
            "npm:jest@29.7.0,babel-jest@29.7.0,@babel/core@7.26.0,@babel/preset-env@7.26.0,core-js@3.39.0,"
            "@exercism/babel-preset-javascript@0.5.1",
        ),
    ),
    "python": Language(re.compile(r"^    def (test_\w+)\(\s*self", re.M), ("python3",), ("pip:pytest==9.2.0",)),
    "rust": Language(re.compile(r"#\[test\]\s*(?:(?:#\[|//)[^\n]*\s*)*fn (\w+)\("), ("cargo", "cc")),
}


def recognise(source: Path) -> bool:
    return source.is_dir() and next(source.glob(f"*/exercises/practice/*/{_CONFIG}"), None) is not None


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    """`languages` leaves out the others."""
    wanted = [name for name in str(options.get("languages", "")).split(",") if name] or sorted(LANGUAGES)
    for name in wanted:
        if name not in LANGUAGES:
            raise UnknownName("language", name, sorted(LANGUAGES))
        for config in sorted(source.glob(f"{name}/exercises/practice/*/{_CONFIG}")):
            exercise = config.parent.parent
            yield TaskDraft(f"{name}-{exercise.name}", partial(_write, name, exercise, options))


def _write(name: str, exercise: Path, options: Mapping[str, Any], folder: Path) -> None:
    language = LANGUAGES[name]
    files = _named_files(exercise)
    everything = {
        path.relative_to(exercise).as_posix(): path.read_bytes()
        for path in sorted(exercise.rglob("*"))
        if path.is_file() and path.relative_to(exercise).parts[0] not in _HIDDEN and is_inside(path, exercise)
    }
    solution: list[str] = [path for path in files["solution"] if path in everything]
    tests = {path for path in everything if path in files["test"] or _is_test(path, files)}
    if not solution or not tests:
        raise ConfigError(f"{exercise}: its configuration names no solution file or no test that is there")
    visible = {path: data for path, data in everything.items() if path not in tests}
    project = {
        path: _unskip(name, data) if path in tests else data
        for path, data in everything.items()
        if path not in solution
    }
    expected = [case for path in sorted(tests) for case in _test_names(name, project, path)]
    if not expected:
        raise ConfigError(f"{exercise}: its test files define no test, so every answer would pass")
    plan = {
        "language": name,
        "exercise": exercise.name,
        "solution": files["solution"],
        "tests": sorted(path for path in tests if _test_names(name, project, path)),
        "expected": expected,
    }
    image = str(options.get("image", "host"))
    looked = [
        f"command -v {need} >/dev/null || {{ echo 'this task needs {need} in its image' >&2; exit 1; }}"
        for need in language.needs
    ]
    table = {
        "metadata": {
            "language": name,
            "rollyard": {
                "verifier": "commands",
                "options": {"commands": [_JUDGE], "score": "all", "timeout_s": 300.0},
                "grade": "sealed",
                "image": image,
                "setup": looked,
                "verifier_layers": list(language.layers or (() if image == "host" else (PYTHON_LAYER,))),
            },
        },
        "environment": {"workdir": WORKDIR},
        "agent": {"timeout_sec": 900.0},
        "verifier": {"timeout_sec": 330.0},
    }
    placed = _place_examples(exercise, files["example"], solution)
    # The agent has that one already
    examples = {path: data for path, data in placed.items() if visible.get(path) != data}
    lines = [
        f"mkdir -p {WORKDIR}/{PurePosixPath(path).parent} && cp /solution/answer/{path} {WORKDIR}/{path}"
        for path in examples
    ]
    write_task(
        folder,
        instruction=_instruction(exercise, solution),
        table=table,
        tests={
            _CHECK: importlib.resources.files("rollyard.inside").joinpath(_CHECK).read_bytes(),
            "plan.json": msgspec.json.encode(plan),
            "test.sh": reward_script(_JUDGE),
            **{f"project/{path}": data for path, data in project.items()},
        },
        solution={
            "solve.sh": "\n".join(["#!/bin/sh", "set -e", *lines, ""]),
            **{f"answer/{path}": data for path, data in examples.items()},
        },
        files=visible,
    )


def _named_files(exercise: Path) -> dict[str, list[str]]:
    try:
        found = msgspec.json.decode(read_inside(exercise / _CONFIG, exercise), type=dict[str, Any]).get("files")
        named = msgspec.convert(found, dict[str, list[str]])
    except BAD_JSON as error:
        raise ConfigError(f"{exercise / _CONFIG}: {error}") from error
    return {"solution": [], "test": [], "example": [], **named}


def _unskip(language: str, data: bytes) -> bytes:
    """A test file with every test of it enabled."""
    text = data.decode(errors="surrogateescape")
    if language == "javascript":
        text = _SKIPPED_JS.sub(lambda found: f"{found[1]}{found[2]}" if found[1] else f"{found[3]}(", text)
    elif language == "java":
        text = _SKIPPED_JAVA.sub("", text)
    return text.encode(errors="surrogateescape")


def _test_names(language: str, project: Mapping[str, bytes], path: str) -> list[str]:
    """The tests that a file defines; in Rust without those of features, which are not built."""
    text = project[path].decode(errors="replace")
    if language == "rust":
        text = _FEATURE_RUST.sub("", text)
    return [found[found.re.groups] for found in LANGUAGES[language].names.finditer(text)]


def _is_test(path: str, files: Mapping[str, Any]) -> bool:
    """Test files that the configuration does not name as such, and editor files that hold the tests' cases."""
    if path.startswith("src/test/"):
        return True
    return path in files.get("editor", ()) and "test" in path.rpartition("/")[2].lower()


def _place_examples(exercise: Path, examples: list[str], solution: list[str]) -> dict[str, bytes]:
    """Each example file at the place of the solution file that it stands for: by its name, else by its ending. Those that stand
    for none are laid beside the solution."""
    places = {PurePosixPath(path).name: path for path in solution}
    named = {
        example: places[PurePosixPath(example).name] for example in examples if PurePosixPath(example).name in places
    }
    free = [path for path in solution if path not in named.values()]
    for example in [example for example in examples if example not in named]:
        same = [path for path in free if path.endswith(PurePosixPath(example).suffix)]
        named[example] = same[0] if same else str(PurePosixPath(solution[0]).with_name(PurePosixPath(example).name))
        free = [path for path in free if path != named[example]]
    placed = {target: read_inside(exercise / example, exercise) for example, target in named.items()}
    manifest = exercise / ".meta/Cargo-example.toml"
    return {**placed, "Cargo.toml": read_inside(manifest, exercise)} if manifest.is_file() else placed


def _instruction(exercise: Path, solution: list[str]) -> str:
    docs = [exercise / ".docs" / name for name in _DOCS]
    texts = [read_text_inside(path, exercise).strip() for path in docs if path.is_file()]
    names = ", ".join(f"`{WORKDIR}/{path}`" for path in solution)
    rule = f"Write your solution into {names}. Keep the names of what is there already: tests will call it."
    return "\n\n".join([*texts, rule])


adapter = Adapter(
    about="Exercism exercises of aider's polyglot benchmark, six languages",
    get="a checkout of github.com/Aider-AI/polyglot-benchmark",
    recognise=recognise,
    read=read,
    needs=("a language's tools: python3, go, cargo, node, cmake and g++, a JDK with JUnit 5 or gradle",),
    options=("image", "languages"),
    carries=(_CHECK,),
)
