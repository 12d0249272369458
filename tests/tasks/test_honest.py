"""What is done against forgeries changes nothing for an agent that did the work."""

import msgspec
import pytest

pytestmark = pytest.mark.anyio

GRADES = ("sealed", "shared", "live")


@pytest.fixture
def judged(attempt):
    """`await judged(act, checks, grade)`: what `commands` says about each check."""

    async def run(act, checks, grade, *, before="", instruction="x", safe_path=True):
        verifier = {"kind": "commands", "options": {"commands": checks}, "safe_path": safe_path}
        async with attempt({"instruction": instruction, "verifier": verifier}, before=before) as it:
            await it.act(["bash", "-c", act])
            return await it.verdict(grade=grade)

    return run


@pytest.mark.parametrize("grade", GRADES)
async def test_links_that_lead_to_files_stay(judged, grade):
    act = "echo x > real; ln -s real a; mkdir d; ln -s ../real d/b; ln -s /usr/bin/env e; ln -s /dev/null n; ln -s a c"
    checks = ["cat a", "cat d/b", "test -x e", "test -L n", "cat c", "test -L broken", "test -L old"]
    before = "ln -s not-there broken; ln -s /tests/x old"
    done = await judged(act, checks, grade, before=before)
    assert done.reward == 1.0, (done.checks, done.log)
    assert "link left behind" not in done.log


async def test_a_link_left_behind_is_named(judged):
    done = await judged("ln -s /tests/expected out; ln -s nowhere gone", ["test ! -L out", "test ! -L gone"], "sealed")
    assert done.reward == 1.0
    assert "/app/out -> /tests/expected" in done.log
    assert "leads nowhere: /app/gone -> nowhere" in done.log


REPOSITORY = """set -e
git init -q -b main repo; cd repo
git config user.name a; git config user.email a@example.com
git config filter.up.clean 'tr a-z A-Z'; git config filter.up.smudge cat
echo '*.up filter=up' > .gitattributes; mkdir in out; echo in > in/f; echo out > out/f; echo text > t.up
git add .; git commit -qm first; git sparse-checkout set in >/dev/null; cd ..
git clone -q repo clone; git -C clone config user.name a; git -C clone config user.email b
"""


@pytest.mark.parametrize("grade", GRADES)
async def test_a_repository_works_as_before(judged, grade):
    act = """set -e
    cd repo; echo more >> in/f; git add in/f; echo untracked > new; git commit -qm second; echo staged >> in/f; git add in/f
    cd ../clone; git remote add other ../repo; git fetch -q other; git merge -q other/main; git config user.name 'B "C" #1'
    git branch --set-upstream-to=other/main >/dev/null
    """
    checks = [
        'test "$(git -C repo status --porcelain)" = "$(printf \'M  in/f\\n?? new\')"',  # nothing of `out` is deleted
        "git -C repo diff-files --quiet",
        'test "$(git -C repo cat-file -p HEAD:t.up)" = TEXT',
        'test "$(git -C clone config user.name)" = \'B "C" #1\'',
        "git -C clone diff --quiet other/main && git -C clone pull -q && git -C clone status | grep -q 'up to date'",
        "git -C clone rev-parse HEAD~1 && git -C clone remote get-url other",
        "git -C clone -c protocol.file.allow=always fetch -q other",
    ]
    done = await judged(act, checks, grade, before=REPOSITORY)
    assert done.reward == 1.0, (done.checks, done.log)


STATISTICS = "echo 'def mean(x): return 42' > statistics.py"


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize(
    ("before", "act", "instruction", "check"),
    [
        ("", STATISTICS, "Write /app/statistics.py.", "python3 -c 'from statistics import mean; assert mean(1) == 42'"),
        ("touch statistics.py", STATISTICS, "x", "python3 -c 'from statistics import mean; assert mean(1) == 42'"),
        (
            "",
            STATISTICS + "; echo 'import statistics; print(statistics.mean(1))' > m.py",
            "x",
            "python3 m.py | grep 42",
        ),
        (
            "",
            STATISTICS + "; echo 'import statistics; print(statistics.mean(1))' > m.py",
            "x",
            "python3 -m m | grep 42",
        ),
        ("", "echo 'value = 42' > work.py", "x", "python3 -c 'import json, work; assert work.value == 42'"),
        (
            "",
            "mkdir -p test; touch test/__init__.py; echo 'v = 42' > test/work.py",
            "see test/",
            "python3 -c 'from test.work import v'",
        ),
    ],
    ids=["asked for", "there before", "a program", "a module", "another name", "directory asked for"],
)
async def test_modules_of_the_work_are_found(judged, before, act, instruction, check, grade):
    done = await judged(act, [check], grade, before=before, instruction=instruction)
    assert done.reward == 1.0, (done.checks, done.log)


@pytest.mark.adversarial
async def test_the_opt_out_is_seen_in_the_verdict(judged):
    act, check = "echo 'import os; os._exit(0)' > json.py", "python3 -c 'import json; raise SystemExit(1)'"
    guarded, open_ = await judged(act, [check], "sealed"), await judged(act, [check], "sealed", safe_path=False)
    assert (guarded.reward, guarded.safe_path) == (0.0, True)
    assert (open_.reward, open_.safe_path) == (1.0, False)
    assert b'"safe_path":false' in msgspec.json.encode(open_)


async def test_the_images_own_sitecustomize_still_runs(attempt):
    verifier = {"kind": "commands", "options": {"commands": ["python3 -c 'import os; assert os.seen == 1'"]}}
    verifier["env"] = {"PYTHONPATH": "/app/lib"}
    row = {"instruction": "x", "verifier": verifier}
    before = "mkdir lib; echo 'import os; os.seen = getattr(os, \"seen\", 0) + 1' > lib/sitecustomize.py"
    async with attempt(row, before=before) as it:
        assert (await it.verdict(grade="shared", env=verifier["env"])).reward == 1.0


@pytest.mark.adversarial
@pytest.mark.parametrize(
    ("program", "act", "check"),
    [
        (
            "node",
            "mkdir -p node_modules/fs; echo 'process.exit(0)' | tee fs.js > node_modules/fs/index.js",
            "node -e 'require(\"fs\"); process.exit(1)'",
        ),
        ("perl", "echo 'package strict; exit 0; 1;' > strict.pm", "perl -e 'use strict; exit 1'"),
        ("ruby", "echo 'exit! 0' | tee set.rb > json.rb", "ruby -e 'require \"json\"; exit 1'"),
        ("go", "printf 'module x\\n' > go.mod; printf 'go 1.1\\n' > go.work", "go vet std/nothing"),
    ],
)
@pytest.mark.parametrize("grade", GRADES)
async def test_other_interpreters_take_nothing_from_the_working_directory(judged, attempt, program, act, check, grade):
    async with attempt("x") as it:
        if not (await it.sandbox.exec(["sh", "-c", f"command -v {program}"], timeout=10)).ok:
            pytest.skip(f"no {program} here")
    done = await judged(act, [check], grade)
    assert done.reward == 0.0, done
