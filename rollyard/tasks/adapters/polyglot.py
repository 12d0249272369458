"""Exercism exercises as aider's polyglot benchmark keeps them: `LANGUAGE/exercises/practice/NAME/.meta/config.json`.

The agent gets the exercise without its tests, its example and its notes. The judge lays the tests and the build files over a copy
of what the agent left, and runs them by the language's line in `LANGUAGES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import WORKDIR, is_inside, read_inside, read_text_inside, reward_script, write_task

_CONFIG = ".meta/config.json"
_HIDDEN = (".meta", ".docs", ".approaches", ".articles")
_DOCS = ("introduction.md", "introduction.append.md", "instructions.md", "instructions.append.md")
_UNSKIP = r"s/\bx(test|it|describe)(\.each)?\(/\1\2(/; s/\b(test|it|describe)\.skip\(/\1(/"
_MODULES = 'modules=$(dirname "$(dirname "$(dirname "$(readlink -f "$(command -v jest)")")")")'
_ENABLE = r"""find src/test -name '*.java' -exec sed -i -E 's/@Disabled(\("[^"]*"\))?//' {} +"""
_JUNIT = "/usr/share/java/junit-platform-console.jar"  # of Debian's junit5 and libassertj-core-java, where the image has them
_JAVA = (
    "names='junit-(jupiter|platform)[a-z-]*|opentest4j|apiguardian-api|assertj-core|picocli' && "
    r"""jars=$(ls /usr/share/java/*.jar | grep -E "/($names)[.]jar\$" | tr '\n' ':') && rm -rf classes && mkdir classes && """
    "find src -name '*.java' > sources && javac -d classes -cp \"$jars\" @sources && {"
    ' java -cp "classes:$jars" org.junit.platform.console.ConsoleLauncher --scan-classpath classes --disable-banner > said;'
    " code=$?; cat said; [ $code -eq 0 ] && grep -Eq '[1-9][0-9]* tests successful' said; }"
)


class Language(NamedTuple):
    """`test` is a shell line in the exercise's folder; `layers` are the judge's tools, `needs` programs of the image."""

    test: str
    needs: tuple[str, ...]
    layers: tuple[str, ...] = ()


LANGUAGES = {
    "cpp": Language(
        "CXXFLAGS=-DCATCH_CONFIG_NO_POSIX_SIGNALS cmake -DEXERCISM_RUN_ALL_TESTS=1 -B build . && make -C build",
        ("cmake", "make", "g++"),
    ),
    "go": Language("GOTOOLCHAIN=local GOPROXY=off GOCACHE=/tmp/go GOPATH=/tmp/gopath go test ./...", ("go",)),
    "java": Language(
        f"{_ENABLE} && if [ -f {_JUNIT} ]; then {_JAVA}; else gradle test --offline --no-daemon; fi", ("javac",)
    ),
    "javascript": Language(
        f"{_MODULES} && ln -sfn $modules node_modules && sed -i -E '{_UNSKIP}' *.spec.js && jest --ci --rootDir .",
        ("node",),
        (
            "npm:jest@29.7.0,babel-jest@29.7.0,@babel/core@7.26.0,@babel/preset-env@7.26.0,core-js@3.39.0,"
            "@exercism/babel-preset-javascript@0.5.1",
        ),
    ),
    "python": Language("python3 -m pytest -q -p no:cacheprovider *_test.py", ("python3",), ("pip:pytest==9.2.0",)),
    "rust": Language("CARGO_HOME=/tmp/cargo cargo test --offline -- --include-ignored", ("cargo", "cc")),
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
    project = {path: data for path, data in everything.items() if path not in solution}
    place = f"/tmp/work/{exercise.name}"
    command = (
        f"rm -rf /tmp/work && mkdir -p /tmp/work && cp -R {WORKDIR} {place} && cp -R /tests/project/. {place}/ && "
        f"cd {place} && {language.test}"
    )
    looked = [
        f"command -v {need} >/dev/null || {{ echo 'this task needs {need} in its image' >&2; exit 1; }}"
        for need in language.needs
    ]
    table = {
        "metadata": {
            "language": name,
            "rollyard": {
                "verifier": "commands",
                "options": {"commands": ["sh /tests/run.sh"], "score": "all", "timeout_s": 300.0},
                "grade": "sealed",
                "image": str(options.get("image", "host")),
                "setup": looked,
                "verifier_layers": list(language.layers),
            },
        },
        "environment": {"workdir": WORKDIR},
        "agent": {"timeout_sec": 900.0},
        "verifier": {"timeout_sec": 330.0},
    }
    examples = _place_examples(exercise, files["example"], solution)
    lines = [
        f"mkdir -p {WORKDIR}/{PurePosixPath(path).parent} && cp /solution/answer/{path} {WORKDIR}/{path}"
        for path in examples
    ]
    write_task(
        folder,
        instruction=_instruction(exercise, solution),
        table=table,
        tests={
            "run.sh": f"{command}\n",
            "test.sh": reward_script("sh /tests/run.sh"),
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


def _is_test(path: str, files: Mapping[str, Any]) -> bool:
    """Editor files that hold the tests' cases."""
    return path in files.get("editor", ()) and "test" in path.rpartition("/")[2].lower()


def _place_examples(exercise: Path, examples: list[str], solution: list[str]) -> dict[str, bytes]:
    """Each example file at the place of the solution file that it stands for: by its name, else by its ending."""
    placed: dict[str, bytes] = {}
    for example in examples:
        free = [path for path in solution if path not in placed]
        name, ending = PurePosixPath(example).name, PurePosixPath(example).suffix
        same = [path for path in free if PurePosixPath(path).name == name] or [p for p in free if p.endswith(ending)]
        target = same[0] if same else example.removeprefix(".meta/")
        placed[target] = read_inside(exercise / example, exercise)
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
)
