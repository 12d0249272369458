"""Whether every test of an exercise passes on the agent's code: `python3 -I exercise_check.py TREE PLAN.json`.

The agent's code runs in the process of its tests, so an exit code of 0 proves nothing: it can end that process, print what a
runner prints, or disarm the assertions. Three things together are a pass. Every test that the plan expects is in the runner's
report, whose name is random; no other test failed; and each control, a test with a random name that cannot pass, did fail.
Code that looks for the report and the controls while it runs can still forge them. Runs on old Pythons.
"""

import collections
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

SOURCES = {  # what is taken of the agent's tree, beside the exercise's solution files
    "cpp": re.compile(r"[^/]*\.(cc|cpp|h|hpp)"),
    "go": re.compile(r"(?!.*_test\.go$).*\.go"),
    "java": re.compile(r"src/main/.*\.java"),
    "javascript": re.compile(
        r"(?!(.*/)?(__mocks__|node_modules)/|.*\.(config|spec|test)\.)(?!package).*\.(js|mjs|cjs|json)"
    ),
    "python": re.compile(r"(?!(.*/)?(conftest|test_[^/]*|[^/]*_test)\.py$).*\.py"),
    "rust": re.compile(r"src/.*\.rs"),
}
GO = """package {package}

import (
	"os"
	"testing"
)

var seen{mark} = ""

func see{mark}(t *testing.T) {{
	t.Cleanup(func() {{
		word := "passed "
		if t.Failed() || t.Skipped() {{
			word = "failed "
		}}
		seen{mark} += word + t.Name() + "\\n"
	}})
}}

func TestMain(m *testing.M) {{
	code := m.Run()
	if os.WriteFile("{report}", []byte(seen{mark}), 0o600) != nil {{
		code = 1
	}}
	os.Exit(code)
}}

func TestC{mark}(t *testing.T) {{
	see{mark}(t)
	t.Fatal("a control")
}}
"""
JAVA = """import org.junit.jupiter.api.Assertions;
import org.junit.jupiter.api.Test;

class Control{mark}Test {{
    @Test void c{mark}() {{ Assertions.assertEquals(1, 2); }}
}}
"""
CONTROLS = {  # text at the end of a test file
    "cpp": '\nTEST_CASE("c{mark}") {{ int one = 1; REQUIRE(one == 2); }}\n'
    '\nTEST_CASE("d{mark}") {{ REQUIRE_THROWS_AS([] {{}}(), std::exception); }}\n',
    "javascript": "\ntest('c{mark}', () => {{ expect(1).toBe(2); }});\ntest('d{mark}', () => {{ expect([1]).toEqual([2]); }});\n"
    "test('e{mark}', () => {{ expect(() => 1).toThrow(); }});\n",
    "python": "\nimport unittest\n\nclass Control{mark}(unittest.TestCase):\n"
    "    def test_c{mark}(self):\n        self.assertEqual(1, 2)\n\n"
    "    def test_d{mark}(self):\n        self.assertTrue(False)\n\n"
    "    def test_e{mark}(self):\n        with self.assertRaises(ValueError):\n            pass\n\n"
    "    def test_f{mark}(self):\n        assert 1 == 2\n",
    "rust": "\n#[test]\nfn c{mark}() {{\n    assert_eq!(1, 2);\n}}\n\n#[test]\nfn d{mark}() {{\n    assert!(1 > 2);\n}}\n",
}
JARS = re.compile(r"(junit-(jupiter|platform)[a-z-]*|opentest4j|apiguardian-api|assertj-core|picocli)\.jar")
JAVA_HOME = "/usr/share/java"  # Debian's junit5 and libassertj-core-java, where the image has them


def run(command, place, **env):
    print("$ " + " ".join(command), flush=True)
    return subprocess.call(command, cwd=place, env=dict(os.environ, **env), stdin=subprocess.DEVNULL)


def copy_sources(tree, place, plan):
    """Sources and solution files; links, hidden files and whatever configures a build or a runner stay behind."""
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            source = os.path.join(folder, name)
            path = os.path.relpath(source, tree)
            wanted = path in plan["solution"] or (
                not name.startswith(".") and SOURCES[plan["language"]].fullmatch(path)
            )
            if wanted and os.path.isfile(source) and not os.path.islink(source):
                os.makedirs(os.path.dirname(os.path.join(place, path)), exist_ok=True)
                shutil.copyfile(source, os.path.join(place, path))


def lay_tests(project, place):
    for folder, _, names in os.walk(project):
        for name in names:
            source = os.path.join(folder, name)
            target = os.path.join(place, os.path.relpath(source, project))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target)


def add_controls(place, plan, mark, report):
    """Controls beside the tests; gives the test files as they must still be in the end."""
    language, written = plan["language"], {}
    for path in plan["tests"]:
        with open(os.path.join(place, path), encoding="utf-8") as file:
            text = file.read()
        if language == "go":
            text = re.sub(r"(?m)^(func Test\w+\((\w+) \*testing\.T\) \{)", r"\1 see" + mark + r"(\2);", text)
        written[path] = text + CONTROLS.get(language, "").format(mark=mark)
    beside = os.path.dirname(plan["tests"][0])
    if language == "go":
        package = re.search(r"(?m)^package (\w+)", written[plan["tests"][0]]).group(1)
        written[os.path.join(beside, "control_test.go")] = GO.format(package=package, mark=mark, report=report)
    if language == "java":
        written[os.path.join(beside, "Control" + mark + "Test.java")] = JAVA.format(mark=mark)
    for path, text in written.items():
        with open(os.path.join(place, path), "w", encoding="utf-8") as file:
            file.write(text)
    return written


def run_cpp(place, plan, report):
    build, name = report + ".build", plan["exercise"]
    flags = "-DCATCH_CONFIG_NO_POSIX_SIGNALS"
    configure = ["cmake", "-DEXERCISM_RUN_ALL_TESTS=1", "-S", place, "-B", build]
    if run(configure, place, CXXFLAGS=flags) == 0 and run(["make", "-C", build, name], place) == 0:
        run([os.path.join(build, name), "-r", "xml", "-o", report], place)
    for case in ElementTree.parse(report).getroot().iter("TestCase"):  # noqa: S314 - in the sandbox alone
        yield case.get("name"), case.find("OverallResult").get("success") == "true"


def run_go(place, plan, report):
    run(
        ["go", "test", "-count=1", "./..."],
        place,
        GOTOOLCHAIN="local",
        GOPROXY="off",
        GOCACHE="/tmp/go",
        GOPATH="/tmp/gopath",
    )
    with open(report, encoding="utf-8") as file:
        for line in file:
            word, _, name = line.strip().partition(" ")
            yield name, word == "passed"


def run_java(place, plan, report):
    jars = [os.path.join(JAVA_HOME, name) for name in (os.listdir(JAVA_HOME) if os.path.isdir(JAVA_HOME) else ())]
    jars = ":".join(sorted(jar for jar in jars if JARS.fullmatch(os.path.basename(jar))))
    if os.path.isfile(os.path.join(JAVA_HOME, "junit-platform-console.jar")):
        sources = [
            os.path.join(f, n)
            for f, _, names in os.walk(os.path.join(place, "src"))
            for n in names
            if n.endswith(".java")
        ]
        classes = report + ".classes"
        if run(["javac", "-proc:none", "-d", classes, "-cp", jars, *sources], place) == 0:
            launcher = ["org.junit.platform.console.ConsoleLauncher", "--scan-classpath", classes, "--disable-banner"]
            run(["java", "-cp", jars + ":" + classes, *launcher, "--reports-dir", report], place)
        folder = report
    else:
        run(["gradle", "test", "--offline", "--no-daemon"], place)
        folder = os.path.join(place, "build", "test-results", "test")
    for name in os.listdir(folder):
        for case, passed in read_junit(os.path.join(folder, name)) if name.endswith(".xml") else ():
            yield case.partition("(")[0], passed


def run_javascript(place, plan, report):
    jest = os.path.realpath(shutil.which("jest") or "jest")
    modules = os.path.dirname(os.path.dirname(os.path.dirname(jest)))
    os.symlink(modules, os.path.join(place, "node_modules"))
    run(["jest", "--ci", "--rootDir", ".", "--json", "--outputFile", report, "--runTestsByPath", *plan["tests"]], place)
    with open(report, encoding="utf-8") as file:
        suites = json.load(file)["testResults"]
    for suite in suites:
        for case in suite["assertionResults"]:
            yield case["title"], case["status"] == "passed"


def run_python(place, plan, report):
    command = ["python3", "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", place]
    run(command + ["--junitxml", report] + plan["tests"], place)
    return read_junit(report)


def run_rust(place, plan, report):
    for path in plan["tests"]:
        target = os.path.splitext(os.path.basename(path))[0]
        log = report + "." + target
        run(
            ["cargo", "test", "--offline", "--test", target, "--", "--include-ignored", "--logfile", log],
            place,
            CARGO_HOME="/tmp/cargo",
        )
        with open(log, encoding="utf-8") as file:
            for line in file:
                word, _, name = line.strip().partition(" ")
                yield name.rpartition("::")[2], word == "ok"


def read_junit(report):
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 - in the sandbox alone
        yield case.get("name"), not {child.tag for child in case} & {"failure", "error", "skipped"}


def check(tree, plan_file):
    with open(plan_file, encoding="utf-8") as file:
        plan = json.load(file)
    language, mark = plan["language"], secrets.token_hex(8)
    root = os.path.realpath(tempfile.mkdtemp())
    place, report = os.path.join(root, plan["exercise"]), os.path.join(root, secrets.token_hex(16))
    os.mkdir(place)
    copy_sources(tree, place, plan)
    lay_tests(os.path.join(os.path.dirname(plan_file), "project"), place)
    written = add_controls(place, plan, mark, report)
    runners = {
        "cpp": run_cpp,
        "go": run_go,
        "java": run_java,
        "javascript": run_javascript,
        "python": run_python,
        "rust": run_rust,
    }
    try:
        cases = list(runners[language](place, plan, report))
    except (OSError, ValueError, KeyError, AttributeError, ElementTree.ParseError) as error:
        return "the tests left no report: " + str(error)
    for path, text in written.items():
        with open(os.path.join(place, path), encoding="utf-8") as file:
            if file.read() != text:
                return path + " was changed while it ran"
    controls = [passed for name, passed in cases if mark in name]
    failed = sorted(name for name, passed in cases if not passed and mark not in name)
    found = collections.Counter(name for name, passed in cases if passed)
    missing = sorted((collections.Counter(plan["expected"]) - found).elements())
    for name in failed[:50]:
        print("did not pass:", name)
    for name in [name for name in missing if name not in failed][:50]:
        print("did not run:", name)
    if not controls or any(controls):
        return "a test that cannot pass did not fail: the tests did not run to their end, or the code changed what they say"
    print(len(plan["expected"]) - len(missing), "of", len(plan["expected"]), "tests passed")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], os.path.abspath(sys.argv[2])))
