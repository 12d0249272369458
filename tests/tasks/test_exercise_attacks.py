"""Exercises whose solution runs beside its tests: ending early, printing a report or disarming tests earns nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.tasks.adapters import load_adapter

pytestmark = pytest.mark.adversarial
JUNIT = Path("/usr/share/java/junit-platform-console.jar")
CATCH = Path("/usr/include/catch2/catch.hpp")
NEEDS = {
    "cpp": CATCH.exists() and shutil.which("cmake") and shutil.which("g++"),
    "go": shutil.which("go"),
    "java": shutil.which("javac") and JUNIT.exists(),
    "javascript": shutil.which("jest"),
    "python": True,
    "rust": shutil.which("cargo"),
}
CMAKE = "cmake_minimum_required(VERSION 3.5)\nproject(twice CXX)\nadd_executable(twice twice_test.cpp twice.cpp test/main.cpp)\n"
CARGO = '[package]\nname = "twice"\nversion = "1.0.0"\nedition = "2021"\n'
EXERCISES = {  # the files, the path of the solution, and its honest content
    "cpp": (
        {
            "CMakeLists.txt": CMAKE + "target_compile_definitions(twice PRIVATE EXERCISM_RUN_ALL_TESTS)\n",
            "twice.h": "int twice(int n);\n",
            "test/catch.hpp": "#include <catch2/catch.hpp>\n",
            "test/main.cpp": '#define CATCH_CONFIG_MAIN\n#include "catch.hpp"\n',
            "twice_test.cpp": '#include "twice.h"\n#include "test/catch.hpp"\n'
            'TEST_CASE("of two") { REQUIRE(twice(2) == 4); }\n#if defined(EXERCISM_RUN_ALL_TESTS)\n'
            'TEST_CASE("of three") { REQUIRE(twice(3) == 6); }\n#endif\n',
        },
        "twice.cpp",
        '#include "twice.h"\nint twice(int n) { return 2 * n; }\n',
    ),
    "go": (
        {
            "go.mod": "module twice\n\ngo 1.18\n",
            "twice_test.go": 'package twice\n\nimport "testing"\n\nfunc TestTwo(t *testing.T) {\n'
            '\tif Twice(2) != 4 {\n\t\tt.Error("two")\n'
            '\t}\n}\n\nfunc TestThree(t *testing.T) {\n\tif Twice(3) != 6 {\n\t\tt.Fatal("three")\n\t}\n}\n',
        },
        "twice.go",
        'package twice\n\nimport "fmt"\n\nfunc Twice(n int) int { fmt.Print("no end of line"); return 2 * n }\n',
    ),
    "java": (
        {
            "src/test/java/TwiceTest.java": "import org.junit.jupiter.api.*;\n"
            "import static org.assertj.core.api.Assertions.assertThat;\n"
            "class TwiceTest {\n    @Test void two() { assertThat(Twice.of(2)).isEqualTo(4); }\n\n"
            '    @Disabled("Remove to run test")\n    @Test\n    @DisplayName("of three")\n'
            "    public void three() { assertThat(Twice.of(3)).isEqualTo(6); }\n}\n"
        },
        "src/main/java/Twice.java",
        "class Twice { static int of(int n) { return 2 * n; } }\n",
    ),
    "javascript": (
        {
            "package.json": '{"name": "twice"}\n',
            "babel.config.js": "module.exports = { presets: [['@babel/preset-env', { targets: { node: 'current' } }]] };\n",
            "twice.spec.js": "import { twice } from './twice';\n\ndescribe('twice', () => {\n"
            "  test('of two', () => { expect(twice(2)).toBe(4); });\n"
            "  xtest('of three', () => { expect(twice(3)).toEqual(6); });\n});\n",
        },
        "twice.js",
        "export const twice = (n) => 2 * n;\n",
    ),
    "python": (
        {
            "twice_test.py": "import unittest\nfrom twice import twice\n\nclass TwiceTest(unittest.TestCase):\n"
            "    def test_two(self):\n        self.assertEqual(twice(2), 4)\n\n    def test_three(\n        self,\n    ):\n"
            "        self.assertEqual(twice(3), 6)\n"
        },
        "twice.py",
        "def twice(n):\n    return 2 * n\n",
    ),
    "rust": (
        {
            "Cargo.toml": CARGO,
            "tests/twice.rs": "use twice::*;\n\n#[test]\nfn two() {\n    assert_eq!(twice(2), 4);\n}\n\n"
            "#[test]\n#[ignore]\n/// of three\nfn three() {\n"
            '    assert_eq!(twice(3), 6);\n}\n\n#[cfg(feature = "more")]\n#[test]\nfn more() {\n    panic!();\n}\n',
        },
        "src/lib.rs",
        "pub fn twice(n: i32) -> i32 {\n    2 * n\n}\n",
    ),
}
WRONG = {
    "cpp": '#include "twice.h"\nint twice(int n) { return 2 + n; }\n',
    "go": "package twice\n\nfunc Twice(n int) int { return 2 + n }\n",
    "java": "class Twice { static int of(int n) { return 2 + n; } }\n",
    "javascript": "export const twice = (n) => 2 + n;\n",
    "python": "def twice(n):\n    return 2 + n\n",
    "rust": "pub fn twice(n: i32) -> i32 {\n    2 + n\n}\n",
}
GO_EXIT = (
    'package twice\n\nimport (\n\t"fmt"\n\t"os"\n)\n\nfunc Twice(n int) int { return n }\n\n'
    'func init() { fmt.Print("%s"); os.Exit(0) }\n'
)
RUST_EXIT = 'pub fn twice(_n: i32) -> i32 {\n    print!("%s");\n    std::process::exit(0)\n}\n'
JAVA_EXIT = (
    'class Twice { static int of(int n) { System.out.print("%s"); System.out.flush(); System.exit(0); return n; } }\n'
)
CPP_EXIT = (
    '#include "twice.h"\n#include <cstdio>\n#include <cstdlib>\nint twice(int n) { return n; }\n'
    'int ended = (puts("%s"), exit(0), 1);\n'
)
PYTHON_EXIT = (
    "import os, sys\ndef twice(n):\n    sys.__stdout__.write('%s')\n    sys.__stdout__.flush()\n    os._exit(0)\n"
)
ATTACKS = {
    ("cpp", "exits"): {"twice.cpp": CPP_EXIT % ""},
    ("cpp", "prints"): {"twice.cpp": CPP_EXIT % "<TestCase name='of two'><OverallResult success='true'/></TestCase>"},
    ("cpp", "replaces the macros"): {
        "twice.h": "#define TWOBLUECUBES_SINGLE_INCLUDE_CATCH_HPP_INCLUDED\n"
        '#define TEST_CASE(n) static void m##n()\n#include "never.h"\n',
        "never.h": "#undef TEST_CASE\n#define CAT(a, b) a##b\n#define CAT2(a, b) CAT(a, b)\n#define REQUIRE_THROWS_AS(a, b)\n"
        "#define TEST_CASE(n) [[maybe_unused]] static void CAT2(f, __COUNTER__)()\n#define REQUIRE(x)\nint twice(int n);\n",
    },
    ("go", "exits"): {"twice.go": GO_EXIT % ""},
    ("go", "prints"): {"twice.go": GO_EXIT % r"--- PASS: TestTwo (0.00s)\n--- PASS: TestThree (0.00s)\nPASS\n"},
    ("go", "chooses no test"): {
        "twice.go": 'package twice\n\nimport "os"\n\nfunc Twice(n int) int { return n }\n\n'
        'func init() { os.Args = append(os.Args, "-test.run=^$") }\n'
    },
    ("java", "exits"): {"src/main/java/Twice.java": JAVA_EXIT % ""},
    ("java", "prints"): {"src/main/java/Twice.java": JAVA_EXIT % r"[ 2 tests successful ]\n"},
    ("javascript", "exits"): {"twice.js": "process.exit(0);\nexport const twice = (n) => n;\n"},
    ("javascript", "disarms"): {
        "twice.js": "const yes = () => ({ pass: true });\nexpect.extend({ toBe: yes, toEqual: yes });\n"
        "export const twice = (n) => n;\n"
    },
    ("javascript", "configures"): {
        "jest.config.js": "module.exports = { testMatch: ['**/other.js'], passWithNoTests: true };\n",
        "other.js": "test('x', () => {});\n",
    },
    ("python", "exits"): {"twice.py": PYTHON_EXIT % ""},
    ("python", "prints"): {"twice.py": PYTHON_EXIT % "2 passed in 0.01s"},
    ("python", "disarms"): {
        "twice.py": "import unittest\nunittest.TestCase.assertEqual = lambda *given, **named: None\ndef twice(n):\n    return n\n"
    },
    ("python", "shadows pytest"): {"pytest.py": "print('2 passed')\n"},
    ("python", "configures"): {
        "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    report = (yield).get_result()\n    report.outcome = 'passed'\n"
    },
    ("rust", "exits"): {"src/lib.rs": RUST_EXIT % ""},
    ("rust", "prints"): {
        "src/lib.rs": RUST_EXIT % r"test two ... ok\ntest three ... ok\n\ntest result: ok. 2 passed; 0 failed\n"
    },
    ("rust", "brings other tests"): {
        "Cargo.toml": f'{CARGO}autotests = false\n\n[[test]]\nname = "twice"\npath = "src/fake.rs"\n',
        "src/fake.rs": "#[test]\nfn two() {}\n\n#[test]\nfn three() {}\n",
    },
    ("rust", "empties the tests"): {
        "Cargo.toml": f'{CARGO}build = "src/before.rs"\n',
        "src/before.rs": 'use std::fs;\n\nfn main() {\n    let text = fs::read_to_string("tests/twice.rs").unwrap();\n'
        '    fs::write("tests/twice.rs", text.replace("assert_eq!(twice", "let _ = (twice")).unwrap();\n}\n',
    },
    ("rust", "configures"): {".cargo/config.toml": '[target.x86_64-unknown-linux-gnu]\nrunner = "true"\n'},
}


def judge(tmp_path, language, answer):
    """Whether the judge of the task that the adapter makes lets these files pass."""
    if not NEEDS[language]:
        pytest.skip(f"the tools of {language} are not here")
    files, solution, honest = EXERCISES[language]
    folder = tmp_path / "set" / language / "exercises" / "practice" / "twice"
    tests = [
        path
        for path in files
        if "test" in path.rpartition("/")[2].lower() or path.startswith("tests/") or ".spec." in path
    ]
    named = {"solution": [solution, *(["Cargo.toml"] if language == "rust" else [])], "test": tests}
    config = {"files": {**named, "example": [".meta/example"]}}
    everything = {**files, solution: WRONG[language], ".meta/example": honest, ".meta/config.json": json.dumps(config)}
    write(folder, everything)
    (draft,) = load_adapter("polyglot").read(tmp_path / "set", {})
    draft.write(tmp_path / "task")
    shutil.copytree(tmp_path / "task" / "files", tmp_path / "app")
    write(tmp_path / "app", answer)
    (tmp_path / "scratch").mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a python3 with pytest
    done = subprocess.run(
        [sys.executable, "-I", tmp_path / "task/tests/exercise_check.py", tmp_path / "app", tmp_path / "task/tests/plan.json"],
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch"), "PATH": path},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    return done.returncode == 0, done.stdout + done.stderr


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.mark.parametrize("language", [pytest.param("cpp", marks=pytest.mark.slow), *sorted(set(EXERCISES) - {"cpp"})])
def test_an_honest_solution_passes_and_a_wrong_one_does_not(tmp_path, language):
    _, solution, honest = EXERCISES[language]
    passed, said = judge(tmp_path / "honest", language, {solution: honest})
    assert passed and "2 of 2 tests passed" in said, said
    passed, said = judge(tmp_path / "wrong", language, {})
    assert not passed and "did not pass: " in said and "cannot pass" not in said, said


@pytest.mark.parametrize(
    ("language", "way"),
    [pytest.param(*key, marks=[pytest.mark.slow] if key[0] == "cpp" else [], id=" ".join(key)) for key in ATTACKS],
)
def test_a_solution_does_not_make_its_own_verdict(tmp_path, language, way):
    passed, said = judge(tmp_path, language, ATTACKS[language, way])
    assert not passed, said


def test_an_exercise_without_tests_makes_no_task(tmp_path):
    folder = tmp_path / "set" / "go" / "exercises" / "practice" / "counter"
    config = {"files": {"solution": ["counter.go"], "test": ["counter_test.go"], "example": [".meta/example.go"]}}
    texts = {".meta/config.json": json.dumps(config), ".meta/example.go": "package counter\n"}
    write(
        folder,
        {
            **texts,
            "counter.go": "package counter\n",
            "counter_test.go": "package counter\n\n// Define your tests here\n",
        },
    )
    (draft,) = load_adapter("polyglot").read(tmp_path / "set", {})
    with pytest.raises(Exception, match="define no test, so every answer would pass"):
        draft.write(tmp_path / "task")
