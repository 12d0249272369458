"""Attack x verifier kind x grade: what an agent plants in its files must not make any kind of verifier, in any grade, say 1.

Each attack has a check that it fools when nothing is put back (`test_an_attack_is_real`); the same check, run by each kind of
verifier, then says 0. The work is never done, so any reward is forged.
"""

from contextlib import AsyncExitStack

import pytest

import rollyard as ry
from rollyard.core.task import VerifierSpec
from rollyard.images.layers import layer_prefix

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]

GRADES = ("sealed", "shared", "live")
KINDS = ("harbor", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("commands", "pytest", "python")))

REPOSITORY = """set -e
git init -q -b main repo; cd repo
git config user.name a; git config user.email a@example.com
echo right > kept.txt; git add .; git commit -qm first
"""
IN_REPO = "cd /app/repo; echo wrong > kept.txt; "
UNCHANGED = "git -C /app/repo diff --quiet HEAD"
NO_DIFF = 'test -z "$(git -C /app/repo diff HEAD)"'
CLEAN = 'test -z "$(git -C /app/repo status --porcelain)"'
FILTER = (
    "git config filter.x.clean 'cat >/dev/null; echo right'; echo '* filter=x' > .git/info/attributes; touch kept.txt"
)
SAME = "cmp /app/out.txt /tests/expected.txt"
EXIT = "import os; os._exit(0)"
NOT_DONE = "assert json.load(open('/app/answer.json')) == 42"

# what is done before the agent comes, what the agent does, what is checked
ATTACKS = {
    "link to the expected file": ("", "ln -s /tests/expected.txt out.txt", SAME),
    "link to the tests": ("", "ln -s /tests d", "cmp /app/d/expected.txt /tests/expected.txt"),
    "chain of links": ("", "ln -s b out.txt; ln -s c/expected.txt b; ln -s ../tests c", SAME),
    "link to what the checker has open": (
        "",
        "ln -s /proc/self/fd/0 out.txt",
        "cmp - /app/out.txt < /tests/expected.txt",
    ),
    "link to the standard input": ("", "ln -s /dev/stdin out.txt", "cmp - /app/out.txt < /tests/expected.txt"),
    "link to the root": ("", "ln -s / d", "cmp /app/d/tests/expected.txt /tests/expected.txt"),
    "link to what the checker will write": (
        "",
        "ln -s wanted.txt out.txt",
        "cp /tests/expected.txt /app/wanted.txt; cmp /app/out.txt /app/wanted.txt",
    ),
    "link that the image had, led elsewhere": (
        "ln -s nowhere out.txt",
        "ln -sfn /tests/expected.txt out.txt",
        SAME,
    ),
    "git filter": (REPOSITORY, IN_REPO + FILTER, UNCHANGED),
    "git textconv": (
        REPOSITORY,
        IN_REPO + "git config diff.x.textconv 'true'; echo '* diff=x' > .git/info/attributes",
        NO_DIFF,
    ),
    "git external diff": (REPOSITORY, IN_REPO + "git config diff.external true", NO_DIFF),
    "git include": (
        REPOSITORY,
        IN_REPO + "printf '[diff]\\n external = true\\n' > ../more; git config include.path ../../more",
        NO_DIFF,
    ),
    "git conditional include": (
        REPOSITORY,
        IN_REPO + "printf '[diff]\\n external = true\\n' > ../more; git config includeIf.gitdir:/app/.path /app/more",
        NO_DIFF,
    ),
    "git worktree configuration": (
        REPOSITORY,
        IN_REPO + "git config extensions.worktreeConfig true; git config --worktree diff.external true",
        NO_DIFF,
    ),
    "git assume-unchanged": (REPOSITORY, IN_REPO + "git update-index --assume-unchanged kept.txt", UNCHANGED),
    "git skip-worktree": (REPOSITORY, IN_REPO + "git update-index --skip-worktree kept.txt", UNCHANGED),
    "git exclude": (REPOSITORY, "cd repo; echo x > evil.py; echo evil.py > .git/info/exclude", CLEAN),
    "git excludes file": (
        REPOSITORY,
        "cd repo; echo x > evil.py; echo evil.py > ../hide; git config core.excludesFile /app/hide",
        CLEAN,
    ),
    "git other worktree": (
        REPOSITORY,
        "cp -r repo copy; rm -r copy/.git; cd repo; echo wrong > kept.txt; git config core.worktree /app/copy",
        UNCHANGED,
    ),
    "git other directory": (
        REPOSITORY,
        "mv repo/.git elsewhere; echo 'gitdir: ../elsewhere' > repo/.git; " + IN_REPO + "git config diff.external true",
        NO_DIFF,
    ),
    "git alias": (REPOSITORY, IN_REPO + "git config alias.is-right '!true'", "git -C /app/repo is-right"),
    "git monitor": (
        REPOSITORY,
        "cd repo; printf '#!/bin/sh\\nprintf \"x\\\\0\"\\n' > ../watch; chmod +x ../watch; git config core.fsmonitor"
        " /app/watch; git config core.fsmonitorHookVersion 2; git status >/dev/null; git update-index"
        " --fsmonitor-valid kept.txt; echo wrong > kept.txt",
        UNCHANGED,
    ),
    "git hooks": (
        REPOSITORY,
        "mkdir hooks; printf '#!/bin/sh\\necho done > /tmp/hooked\\n' > hooks/post-commit; chmod +x hooks/post-commit;"
        " git -C repo config core.hooksPath /app/hooks",
        "git -C /app/repo commit -q --allow-empty -m x && test -e /tmp/hooked",
    ),
    "git replaced object": (
        REPOSITORY,
        IN_REPO + "git commit -qam second; git replace HEAD HEAD~1 2>/dev/null",
        'test "$(git -C /app/repo show main:kept.txt)" = right',
    ),
    "pytest package": (
        "",
        f"mkdir pytest; touch pytest/__init__.py; echo '{EXIT}' > pytest/__main__.py",
        "cd /app && python3 -m pytest /tests/work.py",
    ),
    "pytest module": ("", f"echo '{EXIT}' > pytest.py", "cd /app && python3 -m pytest /tests/work.py"),
    "unittest module": ("", f"echo '{EXIT}' > unittest.py", "cd /app && python3 -m unittest /tests/work.py"),
    "standard module": ("", f"echo '{EXIT}' > json.py", f'cd /app && python3 -c "import json; {NOT_DONE}"'),
    "standard module in a directory": (
        "mkdir sub",
        f"echo '{EXIT}' > sub/json.py",
        f'cd /app/sub && python3 -c "import json; {NOT_DONE}"',
    ),
    "standard module on the path": (
        "",
        f"echo '{EXIT}' > json.py",
        f'PYTHONPATH="/app:$PYTHONPATH" python3 -c "import json; {NOT_DONE}"',
    ),
}
WORK = "def test_work():\n    assert open('/app/answer.json').read() == '42'\n"


@pytest.fixture
async def plant(attempt, backend, tmp_path):
    """`it, kinds = await plant(name)`: the agent's sandbox after the attack, and a verifier of each kind."""
    async with AsyncExitStack() as stack:

        async def start(name, kind):
            before, act, check = ATTACKS[name]
            tests = tmp_path / "tests"
            tests.mkdir()
            (tests / "expected.txt").write_text("expected\n")
            (tests / "work.py").write_text(WORK)
            passed = (
                f"({check}) >/dev/null 2>&1 && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
            )
            (tests / "test.sh").write_text(f"#!/bin/sh\n{passed}\n")
            code = f"import subprocess\n\ndef test_it():\n    assert subprocess.run({check!r}, shell=True).returncode == 0\n"
            (tests / "test_check.py").write_text(code)
            layers = (await backend.images.layer(pip=["pytest==9.2.0"]),) if kind == "pytest" else ()
            options = {
                "commands": {"commands": [check]},
                "pytest": {"paths": ["test_check.py"]},
            }
            spec = {"kind": kind, "options": options.get(kind, {}), "tests": [str(tests)], "layers": list(layers)}
            row = {"instruction": "x", "files": {"answer.json": "0"}, "verifier": spec if kind != "python" else None}
            it = await stack.enter_async_context(attempt(row, layers=layers, before=before))
            await it.act(["bash", "-c", f"set -e; {act}"])
            return it, layers

        yield start


async def upload(sandbox, tests):
    await sandbox.exec("mkdir -p /tests /logs/verifier", timeout=10)
    await sandbox.upload_dir(str(tests), "/tests")


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_real(plant, tmp_path, name):
    it, _ = await plant(name, "commands")
    await upload(it.sandbox, tmp_path / "tests")
    for _ in range(5):  # git does not believe its monitor every time
        done = await it.sandbox.exec(ATTACKS[name][2], timeout=30, cwd="/app")
        if done.ok:
            return
    pytest.fail(done.text)


@pytest.mark.parametrize("grade", [g if g == "sealed" else pytest.param(g, marks=pytest.mark.slow) for g in GRADES])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_fails(plant, tmp_path, name, kind, grade):
    it, layers = await plant(name, kind)
    case = {"grade": grade}
    if kind == "python":

        @ry.verifier(grade=grade)
        async def check(sandbox, rollout):
            await upload(sandbox, tmp_path / "tests")
            return float((await sandbox.exec(ATTACKS[name][2], timeout=30)).ok)

        case = {"verifier": check, "spec": VerifierSpec(kind="python", grade=grade)}
    if layers:
        case |= {"layers": () if grade == "sealed" else layers, "tools": (f"{layer_prefix(layers[0])}/bin",)}
    verdict = await it.verdict(**case)
    assert (verdict.reward, verdict.status) == (0.0, "scored"), verdict
