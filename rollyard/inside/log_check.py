"""Whether a test log shows all that had to pass: `python3 log_check.py LOG TESTS.json [RECORD]`.

`TESTS.json` has `FAIL_TO_PASS`, `PASS_TO_PASS` and the `format` of the log. The rules are SWE-bench's, so that the verdict on a
log is the one of its own harness: a test that is not in the log has failed; a test that had to pass before may be skipped now;
an expected name that was cut inside its brackets stands for all that begin with it, where these agree.

The code under test can print, too. `RECORD` is what `run_tests.py` saw beside the log, and a test that the log calls passed must
have passed there, or the log is a forged one. `INNER` of `TESTS.json` are tests of a pytest that a test starts, which the record
does not have. Runs on old Pythons.
"""

import json
import re
import sys
from xml.etree import ElementTree

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


# Runners that print one line for a test: the pattern of that line without the spaces around it.
_LINES = {
    "ant": r"\[junit\]\s+\[(?P<status>PASS|FAIL|ERR)\]\s+(?P<name>.*)$",
    "cargo": r"test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<status>ok|FAILED)$",
    "cucumber": r"(?P<name>.*) \.+(?P<status>\.|F)",
    "go": r"--- (?P<status>PASS|FAIL|SKIP): (?P<name>.+) \(.+\)$",
    "googletest": r".*\[\s*(?P<status>OK|FAILED)\s*\]\s(?P<name>.*)\s\(.*\)$",
    "jest": r"(?P<status>✓|✕|○)\s(?P<name>.+?)(?:\s\(\d+\s*m?s\))?$",
    "jest-json": r"\[(?P<status>PASSED|FAILED)\]\s(?P<name>.+)$",
    "jq": r"(?P<status>PASS|FAIL):\s(?P<name>.+)$",
    "micropython": r"(?P<status>pass|FAIL|skip)\s+(?P<name>.+)$",
    "minitest": r"(?P<name>.+)\. .*=.*(?P<status>\.|F|E).*$",
    "redis": r"\[(?P<status>ok|err|skip|ignore)\]:\s(?P<name>.+?)(?:\s\(\d+\s*m?s\))?$",
    "rspec": r"(?P<name>.+) - (?P<status>passed|failed)",
    "ruby-unit": r"(?:test: )?(?P<name>.+):\s+(?P<status>\.|E\b|F\b|O\b)",
    "tap": r"(?P<status>ok|not ok) \d+ (?P<name>.+)$",
    "vitest": r"(?P<status>✓|×|↓)\s(?P<name>.+?)(?:\s(?:\d+\s*m?s?|\[skipped\]))?$",  # noqa: RUF001 - its own sign
}
_PASSED = ("PASS", "PASSED", "OK", "ok", "pass", "passed", "SUCCESS", ".", "✔", "✓")
_SKIPPED = ("SKIP", "skip", "ignore", "O", "↩", "○", "↓")


def _status(word):
    return "PASSED" if word in _PASSED else "SKIPPED" if word in _SKIPPED else "FAILED"


def _read_lines(form):
    pattern = re.compile(_LINES[form])

    def read(log):
        found = {}
        for match in filter(None, map(pattern.match, map(str.strip, log.split("\n")))):
            name, status = match.group("name"), _status(match.group("status"))
            if form == "redis" and status == "FAILED":
                name = re.sub(r"\s+in\s+\S+$", "", name)  # the file that it failed in
            found[name.strip() if form == "jest" else name] = status
        return found

    return read


def read_phpunit(log):
    """`--testdox`: a heading for each class, and a mark for each test below it."""
    found, suite = {}, None
    for line in log.split("\n"):
        heading, test = re.match(r"(\w.+) \(.+\)$", line), re.match(r"\s*([✔✘↩])\s*(.*)$", line)
        if heading is not None:
            suite = heading.group(1)
        elif test is not None:
            found["{} > {}".format(suite, test.group(2))] = _status(test.group(1))
    return found


def read_maven(log):
    """Maven names no test that passed: each is a command of its own, traced by the shell, and ends as a build."""
    found, names, early = {}, [], []  # `early` are ends that no name stands before
    for line in map(str.strip, log.split("\n")):
        name, end = re.match(r".*-Dtest=(\S+)", line), re.match(r".*BUILD (SUCCESS|FAILURE)$", line)
        if name is not None:
            names.append(name.group(1))
        if end is not None and names:
            found[names.pop(0)] = _status(end.group(1))
        elif end is not None:
            early.append(end.group(1))
    while names and early:
        found[names.pop(0)] = _status(early.pop(0))
    return found


def read_gradle(log):
    """`CLASS > TEST STATUS`; what others print may stand between the name and the status."""
    found, waiting = {}, None
    for line in map(str.strip, log.split("\n")):
        whole = re.match(r"([^>].+)\s+(PASSED|FAILED)$", line)
        if whole is not None:
            found[whole.group(1)], waiting = whole.group(2), None
        elif re.match(r"[^>]\S*\s+>\s+\S+$", line):
            waiting = line
        elif waiting is not None and line in ("PASSED", "FAILED"):
            found[waiting], waiting = line, None
    return found


def read_karma(log):
    """Suites by their indentation, from the browser's start to the summary."""
    found, suites, indent, started = {}, [], -1, False
    for line in log.split("\n"):
        if line.startswith("SUMMARY:"):
            break
        if "Starting browser" in line:
            started = True
            continue
        match = re.match(r"(\s*)?([✔✖])?\s(.*)$", line) if started else None
        if match is None:
            continue
        spaces, mark, name = match.groups()
        if mark:
            found[" > ".join([*suites, name])] = _status(mark)
        elif spaces and len(spaces) > indent:
            indent = len(spaces)
            suites.append(name)
        elif spaces and len(spaces) < indent:
            indent = len(spaces)
            suites = suites[:-1]
    return found


def read_doctest(log):
    """The XML report of C++'s doctest."""
    begin = log.find("<doctest")
    end = log.find("</doctest>", begin)
    if begin < 0 or end < 0:
        return {}
    found = {}
    report = ElementTree.fromstring(log[begin : end + len("</doctest>")])  # noqa: S314 - read where it was written
    for case in report.iter("TestCase"):
        for part in case.iter("SubCase"):
            good = all(check.get("success") == "true" for check in part.iter("Expression"))
            found["{} > {}".format(case.get("name"), part.get("name"))] = "PASSED" if good else "FAILED"
    return found


def read_results(log):
    """What a parser of SWE-bench Pro wrote; PASSED is all that counts there."""
    return {test["name"]: "PASSED" for test in json.loads(log)["tests"] if test["status"] == "PASSED"}


def read_r2e(log):
    """The short summary of pytest, by R2E-Gym's rules: names without their file."""
    found = {}
    summary = re.sub(r"\x1b\[[0-9;]*m|\r", "", log).split("short test summary info")[1:2]
    for line in "".join(summary).split("\n"):
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), None)
        if status is not None:
            found[".".join(line.split("::")[1:]).split(" - ")[0]] = status
    return found


FORMATS = {
    "results": read_results,
    "r2e": read_r2e,
    "pytest": read_pytest,
    "pytest-paths": read_pytest_paths,
    "pytest-long": read_pytest_long,
    "matplotlib": read_matplotlib,
    "seaborn": read_seaborn,
    "sympy": read_sympy,
    "django": read_django,
    "phpunit": read_phpunit,
    "maven": read_maven,
    "gradle": read_gradle,
    "karma": read_karma,
    "doctest": read_doctest,
}
FORMATS.update((form, _read_lines(form)) for form in _LINES)


def status_of(name, found):
    if name in found:
        return found[name]
    if name.count("[") > name.count("]"):  # cut by a set's authors
        matches = [key for key in found if key.startswith(name)]
        if matches and len({found[key] in GOOD for key in matches}) == 1:
            return found[matches[0]]
    return None


def find_missing(log, tests):
    """What had to pass and did not; where `EXPECTED` is a status for each test, those that ended otherwise."""
    found = FORMATS[tests["format"]](log)
    if "EXPECTED" in tests:
        expected = {re.sub("\x1b\\[\\d+m", "", name).split(" - ")[0]: end for name, end in tests["EXPECTED"].items()}
        return sorted(name for name in set(found) | set(expected) if found.get(name) != expected.get(name))
    lost = [name for name in tests["FAIL_TO_PASS"] if status_of(name, found) not in GOOD]
    return lost + [name for name in tests["PASS_TO_PASS"] if status_of(name, found) not in (*GOOD, "SKIPPED")]


def find_forgery(log, tests, record):
    """Why the log is not believed; None where what was seen beside it agrees with it."""
    if not record["prepared"]:
        return "the tests could not be put in their place"
    if tests.get("runner") == "pytest":
        if not record["starts"] or record["ends"] < record["starts"]:
            return "the tests did not run to their end"
        if record["strange"]:
            return "something else than pytest spoke in its name"
        if not record["controls"] or set(record["controls"]) != {"failed"}:
            return "a test that cannot pass did not fail: the code under test changed what tests say"
        return _find_unseen(log, tests, record)
    if tests.get("runner"):
        return _find_late(log, tests, record["control"])
    return None


def _find_unseen(log, tests, record):
    read = FORMATS[tests["format"]]
    good = [shown for _, when, outcome, xfail, shown in record["tests"] if _is_good(when, outcome, xfail)]
    found, seen = read(log), read("\n".join("PASSED " + name for name in good))
    for name in tests["FAIL_TO_PASS"] + [name for name in tests["PASS_TO_PASS"] if name not in tests.get("INNER", ())]:
        if "::" in name and status_of(name, found) in GOOD and status_of(name, seen) not in GOOD:
            return "the log says that " + name + " passed, and pytest did not say so while it ran"
    return None


def _is_good(when, outcome, xfail):
    return (outcome == "skipped" and xfail) or (outcome == "passed" and when == "call")


def _find_late(log, tests, control):
    """Runners that are not pytest run controls as tests: those that cannot pass have to fail. The list of failures comes after
    all tests, so that a test is not passed by what is printed later than that."""
    read = FORMATS[tests["format"]]
    found = read(log)
    for letter in "abc":
        names = [
            name
            for name in found
            if re.split("[ :]", name)[-1 if ".py:" in name else 0] == "test_" + control + "_" + letter
        ]
        if not names or any(found[name] in GOOD for name in names):
            return "a test that cannot pass did not fail: the tests did not run to their end, or the code changed them"
    heading = re.search(r"(?m)^(FAIL: |_+ .*:)test_" + control + r"_a\b", log)
    early = read(log[: heading.start()]) if heading is not None else {}
    for name in tests["FAIL_TO_PASS"] + tests["PASS_TO_PASS"]:
        if status_of(name, found) in GOOD and status_of(name, early) not in GOOD:
            return "the log says that " + name + " passed after all tests had ended"
    return None


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        whole = file.read()
    with open(sys.argv[2], encoding="utf-8") as file:
        wanted = json.load(file)
    lost = find_missing(whole, wanted)
    if len(sys.argv) > 3:
        with open(sys.argv[3], encoding="utf-8") as file:
            forgery = find_forgery(whole, wanted, json.loads(file.read().partition("\n")[2]))
        if forgery is not None:
            sys.exit("not believed: " + forgery)
    for name in lost[:50]:
        print("did not pass:", name)
    total = len(wanted.get("EXPECTED") or wanted["FAIL_TO_PASS"] + wanted["PASS_TO_PASS"])
    print(total - len(lost), "of", total, "passed")
    sys.exit(1 if lost or not total else 0)
