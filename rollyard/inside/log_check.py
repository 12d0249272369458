"""Whether a test log shows all that had to pass: `python3 log_check.py LOG TESTS.json`.

`TESTS.json` has `FAIL_TO_PASS`, `PASS_TO_PASS` and the `format` of the log. The rules are SWE-bench's, so that the verdict on a
log is the one of its own harness: a test that is not in the log has failed; a test that had to pass before may be skipped now;
an expected name that was cut inside its brackets stands for all that begin with it, where these agree. Runs on old Pythons.
"""

import json
import re
import sys

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
GOOD = ("PASSED", "XFAIL")
_COUNT = re.compile(r"^\[\d+\]$")


def read_pytest(log, change=lambda name: name, line_change=lambda line: line):
    """Lines of `-rA`: a status and a name."""
    found = {}
    for line in map(line_change, log.split("\n")):
        if line.startswith(STATUSES):
            words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
            if len(words) > 1 and not _is_count(words):
                found[change(words[1])] = words[0]
    return found


def _is_count(words):
    return words[0] == "SKIPPED" and bool(_COUNT.match(words[1]))


def read_pytest_paths(log):
    """A parameter that is a path is known by its last part."""

    def shorten(name):
        match = re.search(r"(.*?)\[(.*)\]", name)
        if match is None:
            return name
        main, option = match.groups()
        if option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = "/" + option.split("/")[-1]
        return main + "[" + option + "]"

    return read_pytest(log, change=shorten)


def read_pytest_long(log):
    """Names with spaces in them, colours, and the status at either end."""
    found = {}
    for line in log.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[(\d+)m", "", line))
        words = (line.split(" - ", 1)[0] if line.startswith("FAILED") else line).split()
        if len(words) < 2:
            continue
        if line.startswith(STATUSES):
            if not _is_count(words):
                found[" ".join(words[1:])] = words[0]
        elif line.endswith(STATUSES):
            found[" ".join(words[:-1])] = words[-1]
    return found


def read_matplotlib(log):
    return read_pytest(
        log, line_change=lambda line: line.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")
    )


def read_seaborn(log):
    found = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            found[words[1]] = "FAILED"
        elif " PASSED " in line:
            if words[1] == "PASSED":
                found[words[0]] = "PASSED"
        elif line.startswith("PASSED"):
            found[words[1]] = "PASSED"
    return found


def read_sympy(log):
    headings = (re.search(r" (.*\.py:.*) ", line) for line in log.split("\n"))  # of failures, between underscores
    found = {heading.group(1): "FAILED" for heading in headings if heading is not None}
    ends = {" E": "ERROR", " F": "FAILED", " ok": "PASSED"}
    for line in map(str.strip, log.split("\n")):
        for end, status in ends.items():
            if line.startswith("test_") and line.endswith(end):
                found[line.split()[0]] = status
    return found


# What Django itself says between a test's name and its `ok`, and how that ends; the first may be many lines long.
_DJANGO_SAYS = (
    ("Testing against Django installed in ", " silenced).", True),
    ("Internal Server Error: /", "/", False),
    ("System check identified no issues (0 silenced)", "", False),
)


def _passed_late(lines):
    """Names whose `ok` stands on a line of its own after what Django said."""
    for at, line in enumerate(lines[:-1]):
        name, mark, rest = line.partition(" ... ")
        for begin, end, long in _DJANGO_SAYS:
            if mark and rest.startswith(begin):
                until = range(at, len(lines) - 1) if long else (at,)
                if any(lines[n].endswith(end) and lines[n + 1] == "ok" for n in until):
                    yield name


def read_django(log):
    """Lines of Django's runner, `NAME ... STATUS`; what a test prints may stand between the two."""
    found = {}
    last = None
    for line in map(str.strip, log.split("\n")):
        if "--version is equivalent to version" in line:
            found["--version is equivalent to version"] = "PASSED"
        if " ... " in line:
            last = line.split(" ... ")[0]
        end = next((end for end in (" ... ok", " ... OK", " ...  OK") if line.endswith(end)), None)
        if end is not None:
            if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                line = line.split("...", 1)[-1].strip()
            found[line.rsplit(end, 1)[0]] = "PASSED"
        if " ... skipped" in line:
            found[line.split(" ... skipped")[0]] = "SKIPPED"
        for mark, status in (("FAIL", "FAILED"), ("ERROR", "ERROR")):
            if line.endswith(" ... " + mark):
                found[line.split(" ... " + mark)[0]] = status
            if line.startswith(mark + ":"):
                found[line.split()[1].strip()] = status
        if line.startswith("ok") and last is not None:
            found[last] = "PASSED"
    found.update((name, "PASSED") for name in _passed_late(log.split("\n")))
    return found


FORMATS = {
    "pytest": read_pytest,
    "pytest-paths": read_pytest_paths,
    "pytest-long": read_pytest_long,
    "matplotlib": read_matplotlib,
    "seaborn": read_seaborn,
    "sympy": read_sympy,
    "django": read_django,
}


def status_of(name, found):
    if name in found:
        return found[name]
    if name.count("[") > name.count("]"):
        matches = [key for key in found if key.startswith(name)]
        if matches and len({found[key] in GOOD for key in matches}) == 1:
            return found[matches[0]]
    return None


def missing(log, tests):
    """What had to pass and did not."""
    found = FORMATS[tests["format"]](log)
    lost = [name for name in tests["FAIL_TO_PASS"] if status_of(name, found) not in GOOD]
    return lost + [name for name in tests["PASS_TO_PASS"] if status_of(name, found) not in (*GOOD, "SKIPPED")]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        whole = file.read()
    with open(sys.argv[2], encoding="utf-8") as file:
        expected = json.load(file)
    lost = missing(whole, expected)
    for name in lost[:50]:
        print("did not pass:", name)
    total = len(expected["FAIL_TO_PASS"]) + len(expected["PASS_TO_PASS"])
    print(total - len(lost), "of", total, "passed")
    sys.exit(1 if lost or not total else 0)
