"""The shape of the package, held by tests: one meaning per class name, plain file names, no cycle between sub-packages,
every dependency declared and used. Layers and third-party fences are import-linter's (`pyproject.toml`, `make check`)."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rollyard"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
BENCHES = sorted((ROOT / "bench").rglob("*.py"))

# File names that said nothing, or another thing than what was in the file.
BANNED = {
    "ahead", "asked", "asking", "base", "blame", "board", "breaks", "cable", "carry", "common", "configs", "deeds",
    "demands", "doorway", "durable", "duty", "faces", "following", "found", "frames", "ground", "grow", "helpers",
    "judged", "jumping_worker", "ledger", "misc", "once", "opening", "owned", "packed", "parcels", "patience",
    "places", "placing", "plans", "planted", "reach", "reveal", "shelf", "shim", "sides", "stand", "tips", "utils",
    "way", "words", "work", "worlds",
}  # fmt: skip
# Function names that hide whether something is computed or done.
BANNED_FUNCTIONS = {
    "about", "ahead", "around", "aside", "asked", "bare", "chosen", "closing_words", "committing",
    "copying", "damaged", "decoded", "echoes", "elsewhere", "enough", "ever", "everything", "exactly", "excluded",
    "exporting", "faulty", "gone", "ground", "having", "heard", "insist", "judged", "lacks", "listening", "loaded",
    "made", "measured", "mine", "naming", "nowhere", "odd", "offered", "others", "ours", "outgoing", "patched",
    "patient", "patiently", "placing", "plainly", "reached", "recorded", "replaced", "retried", "retrying", "said",
    "sampled", "searched", "speaking", "stored", "straight", "strays", "there", "told", "unheard", "unreached",
    "wash", "who", "written",
}  # fmt: skip

# Class and constant names that were riddles; what they named has a name of its own now.
BANNED_NAMES = {
    "Below", "Carried", "Courier", "Flying", "Happening", "PATIENCE", "PATIENCE_S", "Pace", "Parcel", "Parcels", "Patience",
    "Says", "Shelf", "Through", "Tip", "Tips", "Turnstile", "UnderWay",
}  # fmt: skip

# Distributions whose modules have another name, and those that are used without being imported by name.
MODULES = {
    "daytona": "daytona",
    "e2b": "e2b",
    "fleet-python": "fleet",
    "huggingface-hub": "huggingface_hub",
    "prime-sandboxes": "prime_sandboxes",
    "prometheus-client": "prometheus_client",
    "python-multipart": "multipart",
    "runloop-api-client": "runloop_api_client",
    "markdown-it-py": "markdown_it",
    "pyyaml": "yaml",
    "sqlalchemy": "sqlalchemy",
}
# renderers imports httpx and does not ask for it; Starlette reads forms with python-multipart; SQLAlchemy loads drivers; spans go
# to OpenTelemetry where the program that runs us has imported it.
USED_BY_OTHERS = {"httpx", "python-multipart", "asyncpg", "opentelemetry-sdk"}
# Present wherever the package that brings it is.
BROUGHT = {
    "click": "typer",
    "daytona_api_client": "daytona",
    "google": "fleet",
    "httpx2": "mcp",
    "markupsafe": "jinja2",
    "mcp_types": "mcp",
    "numpy": "pyarrow",
    "yarl": "aiohttp",
}
# Tests see what users see. These reach further, and why: "tests/file.py": {"name": reason}.
REACHES = {
    "tests/plane/aenv_client.py": {"_instance": "another project's SDK, which tells its instance's id nowhere else"},
    "tests/plane/conftest.py": {"_asdict": "a named tuple's public method"},
    "tests/plane/rock_client.py": {"_run_in_session": "another project's SDK: what its own agents call"},
    "tests/plane/test_fleet.py": {"_async": "another project's SDK: its async client raises a class of its own"},
    "tests/sandbox/test_remote.py": {"_owned": "at its exit the process is not to ask a server that the test ended"},
}
# Tests that let time pass, and why: nothing that they could wait for says when to go on.
SLEEPS = {
    "test_our_client_drives_a_real_openenv_server": "another project's server: it tells nobody whom it refused",
    "test_five_hundred_sessions_step_for_a_minute_in_flat_memory": "memory over a minute is what it measures",
    "test_no_answered_call_is_lost_in_fifty_kills": "kills at random moments",
    "test_a_body_that_comes_steadily_is_not_cut_off": "a body that takes longer than the limit between two pieces",
    "test_a_long_poll_answers_when_something_changes_and_tells_everything_once": "a request begins to wait unseen",
    "test_one_instance_is_waited_for_until_it_is_in_another_state": "a request begins to wait unseen",
    "test_a_runner_killed_in_any_stage_resumes_with_nothing_lost_twice_or_left": "kills at several moments",
    "test_ctrl_c_cleans_up_and_a_second_one_does_not_spoil_it": "a second key press, a moment later",
    "test_a_cancelled_open_leaves_nothing": "cancels at several moments",
    "test_calls_of_several_clients_survive_a_writer_that_is_killed_again_and_again": "kills at random moments",
    "test_each_caller_gets_its_own_answer_however_many_wait": "longer than writes are gathered, so that each is a batch",
    "test_a_caller_that_reads_slower_than_a_lease_lasts_is_given_every_rollout": "a caller that takes longer than a lease",
    "test_a_store_that_is_away_at_the_first_heartbeat_is_waited_for": "longer than the first heartbeat takes to come",
    "test_pausing_stops_programs_and_resuming_lets_them_go_on": "programs that stand still, for a while",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES_OF_OURS = {module_name(path): path for path in FILES}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Every module an import statement of this file names, wherever in the file it stands."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES_OF_OURS else node.module


def test_a_public_class_name_has_one_meaning():
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        if module_name(path).startswith("rollyard.inside."):
            continue  # carried into sandboxes, where nothing else of ours is: its names stand for those outside
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module_name(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_file_names_are_words_that_a_stranger_would_guess():
    assert [str(path.relative_to(ROOT)) for path in [*FILES, *BENCHES] if path.stem in BANNED] == []


def test_functions_are_named_by_verbs_and_nouns():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in [*FILES, *BENCHES]
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.strip("_") in BANNED_FUNCTIONS
        and not any(ast.unparse(mark) == "property" for mark in node.decorator_list)
    ]
    assert found == []


def test_classes_and_constants_are_named_after_what_they_are():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path in [*FILES, *BENCHES]
        for node in parse(path).body
        for name in defined_names(node)
        if name.strip("_") in BANNED_NAMES
    ]
    assert found == []


def defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def test_tests_reach_into_no_private_part():
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()", "os"):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            else:
                continue
            found[str(path.relative_to(ROOT))].update(n for n in names if re.match(r"_[^_]", n))
    assert {where: names for where, names in found.items() if names} == {w: set(n) for w, n in REACHES.items()}


def test_tests_wait_for_conditions_and_not_for_time():
    """A sleep is one step of a loop that looks again, or stands for somebody's slow work inside a function of its own."""
    found: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for test in ast.walk(parse(path)):
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_"):
                found.update(test.name for _ in plain_sleeps(test))
    assert found == set(SLEEPS)


def plain_sleeps(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of `sleep` with more than 0 seconds, outside of `while` and of functions within."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.While | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call) and re.match(r"\w+\.sleep\((?!0\))", ast.unparse(child)):
            yield child
        yield from plain_sleeps(child)


def sub_package(module: str) -> str:
    return module if MODULES_OF_OURS[module].name == "__init__.py" else module.rpartition(".")[0]


def test_there_is_no_cycle_between_sub_packages():
    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES_OF_OURS.items():
        for name in imports_of(path):
            if name in MODULES_OF_OURS and not name.startswith(guarded_imports(path)):
                here, there = sub_package(module), sub_package(name)
                if here != there and "rollyard" not in (here, there):
                    graph[here].add(there)
    assert find_cycles(graph) == []


@cache
def guarded_imports(path: Path) -> tuple[str, ...]:
    """Modules that are imported for a type checker alone."""
    if "TYPE_CHECKING" not in path.read_text():
        return ()
    guards = (
        node for node in ast.walk(parse(path)) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    inside = (inner for node in guards for inner in node.body if isinstance(inner, ast.ImportFrom))
    return tuple(inner.module for inner in inside if inner.module)


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that all reach each other."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for after in graph.get(stack.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        return seen

    reach = {node: reachable(node) for node in list(graph)}
    groups = {tuple(sorted(other for other in found if node in reach.get(other, ()))) for node, found in reach.items()}
    return [list(group) for group in sorted(groups) if group]


def declared_distributions() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    return {re.split(r"[\[<>=!~ ;]", item, maxsplit=1)[0].lower() for item in wanted}


def imported_packages() -> set[str]:
    """Third-party packages named by an import statement, or by `import_module("...")` with a plain text."""
    found: set[str] = set()
    for path in FILES:
        if path.is_relative_to(PACKAGE / "inside"):
            continue  # runs in sandboxes, beside what the sandbox has
        found.update(name.partition(".")[0] for name in imports_of(path))
        found.update(re.findall(r"import_module\(\"(\w+)", path.read_text()))
        found.update(re.findall(r"import_sdk\(\"(\w+)", path.read_text()))
    return found - set(sys.stdlib_module_names) - {"rollyard", "__future__"}


def test_every_dependency_is_imported_and_every_import_is_declared():
    declared = {MODULES.get(name, name.replace("-", "_")) for name in declared_distributions() - USED_BY_OTHERS}
    imported = {BROUGHT.get(name, name) for name in imported_packages()}
    assert {"unused": sorted(declared - imported), "undeclared": sorted(imported - declared)} == {
        "unused": [],
        "undeclared": [],
    }
