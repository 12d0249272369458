"""pytest plugins in Harbor tests: what the task's environment brings works, what the agent planted does not.

The image has a virtual environment with pytest and its plugins, built from wheels by a Dockerfile; every attack is also shown to
win where nothing is put back.
"""

import subprocess
import sys

import msgspec
import pytest

from rollyard.images.build import build
from rollyard.images.build_types import BuildOptions, FileCache
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.rows import as_task

pytestmark = pytest.mark.anyio

ALL = ("sealed", "shared", "live")
SITE = "/opt/venv/lib/python3.*/site-packages"
VENV = "RUN python3 -m venv --without-pip /opt/venv\nENV PATH=/opt/venv/bin:$PATH\nCOPY wheels /wheels\n"
PIP = "python3 -m pip install -q --no-index --find-links /wheels"

SCRIPT = """#!/bin/bash
cd /app
{command}
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
TESTS = "from pathlib import Path\n\ndef test_answer():\n    assert Path('/app/answer').read_text() == '42\\n'\n"
ASYNC_TESTS = """
import asyncio
import pytest

@pytest.mark.asyncio
async def test_answer():
    await asyncio.sleep(0)
    assert open('/app/answer').read() == '42\\n'
"""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    wanted = ["pip", "setuptools", "wheel", "pytest", "pytest-json-ctrf", "pytest-asyncio", "pytest-timeout"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--dest", folder, *wanted], check=True, timeout=200)
    return folder


@pytest.fixture
def image(backend, sandbox_root, folders, wheels, tmp_path):
    """`await image("pytest", ...)`: an image whose virtual environment has these packages, and the wheels of all."""

    async def make(*packages, more=""):
        context = folders.write(tmp_path / "context", {"Dockerfile": "FROM host\n" + VENV + _install(packages) + more})
        _copy(wheels, context / "wheels")
        cache = FileCache(sandbox_root / "builds")
        return await build(context, backend, backend.images, cache, BuildOptions(timeout_s=120))

    return make


def _install(packages):
    words = " ".join(("pip", *packages))
    return f"RUN python3 $(echo /wheels/pip-*.whl)/pip install -q --no-index --find-links /wheels {words}\n"


def _copy(source, target):
    target.mkdir(exist_ok=True)
    for wheel in source.glob("*.whl"):
        if not (target / wheel.name).exists():
            (target / wheel.name).hardlink_to(wheel)


@pytest.fixture
def judged(attempt, folders, tmp_path):
    """`await judged(built, command, act, grade)`: the verdict on what `act` left, by tests that run `command`."""

    async def run(built, command, act, grade, *, tests=TESTS, naive=False, script=None):
        files = {"tests/test.sh": script or SCRIPT.format(command=command), "tests/test_outputs.py": tests}
        task = load_folder(folders.simple(tmp_path / "task", **files))
        task = msgspec.structs.replace(task, files=as_task({"instruction": "x", "files": {"here": "x"}}).files)
        async with attempt(task, image=built.image, env=built.env) as it:
            if act:
                await it.act(["bash", "-c", act])
            return await it.verdict(grade=grade, **({"before": None} if naive else {}))

    return run


CTRF = "pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA"
PLUGINS = {
    "pytest-json-ctrf": (CTRF, TESTS),
    "pytest-asyncio": ("pytest /tests/test_outputs.py -rA", ASYNC_TESTS),
    "pytest-timeout": ("python -m pytest --timeout 30 /tests/test_outputs.py", TESTS),
}


@pytest.mark.parametrize("grade", [ALL[0], *(pytest.param(grade, marks=pytest.mark.slow) for grade in ALL[1:])])
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.ordinary("pytest-json-ctrf-sealed")
async def test_a_plugin_of_the_image_works(image, judged, plugin, grade):
    command, tests = PLUGINS[plugin]
    built = await image("pytest", plugin)
    done = await judged(built, command, "echo 42 > answer", grade, tests=tests)
    assert (done.reward, done.status) == (1.0, "scored"), done
    if plugin == "pytest-json-ctrf":
        assert list(done.checks.values()) == [True]
    failed = await judged(built, command, None, grade, tests=tests)
    assert (failed.reward, failed.status) == (0.0, "scored"), failed


@pytest.mark.parametrize("grade", ["sealed", pytest.param("shared", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["", "--user"])
@pytest.mark.ordinary("-sealed")
async def test_a_plugin_that_the_test_script_installs_works(image, judged, how, grade):
    """Into the environment, or into the user's own site of another interpreter."""
    built = await image("pytest")
    if how == "":
        command = f"{PIP} pytest-timeout && pytest --timeout 30 /tests/test_outputs.py"
    else:
        python = "PATH=${PATH#/opt/venv/bin:}; "
        command = f"{python}{PIP} --user --break-system-packages pytest pytest-timeout &&"
        command += " python3 -m pytest --timeout 30 /tests/test_outputs.py"
    done = await judged(built, command, "echo 42 > answer", grade)
    assert done.reward == 1.0, done


EVIL = "import os\\n\\ndef pytest_collection_modifyitems(items):\\n    items.clear()\\n"
EVIL += "\\ndef pytest_sessionfinish(session):\\n    session.exitstatus = 0\\n"
EXIT = "import sys, os; 'pytest' in ' '.join(sys.orig_argv) and os._exit(0)"
DIST = "mkdir -p {0}/evil-1.dist-info; printf 'Name: evil\\nVersion: 1\\n' > {0}/evil-1.dist-info/METADATA;"
DIST += (
    f"printf '[pytest11]\\nevil = evil\\n' > {{0}}/evil-1.dist-info/entry_points.txt; printf '{EVIL}' > {{0}}/evil.py"
)
IN_SITE = f"for d in {SITE}; do {{0}}; done"
PYTEST, MODULE = "pytest /tests/test_outputs.py", "python -m pytest /tests/test_outputs.py"
USER_SITE = "RUN sed -i s/false/true/ /opt/venv/pyvenv.cfg\n"
EDITABLE = "RUN echo /app > $(echo /opt/venv/lib/python3.*/site-packages)/app.pth\n"

# name: (what the agent plants, how the tests are started, what the image has besides, grades in which it must fail)
PLANTED = {
    "entry point": (IN_SITE.format(DIST.format("$d")), PYTEST, "", ALL),
    "entry point in the working directory": (DIST.format("/app"), MODULE, "", ALL),
    "entry point behind a link": (
        DIST.format("/app/x") + "; mv x/evil-1.dist-info x/meta; ln -s x/meta evil-1.DIST-info; mv x/evil.py .",
        MODULE,
        "",
        ALL,
    ),
    "entry point in a folder whose name is two lines": (
        IN_SITE.format(DIST.format("$d") + "; mv $d/evil-1.dist-info \"$d/$(printf 'a\\nb')-1.dist-info\""),
        PYTEST,
        "",
        ("shared", "live"),
    ),
    "two lines in the working directory": (
        DIST.format("/app") + "; mv evil-1.dist-info \"$(printf 'a\\nb')-1.dist-info\"",
        MODULE,
        "",
        ALL,
    ),
    "hidden entry point": (
        IN_SITE.format(DIST.format("$d") + "; mv $d/evil-1.dist-info $d/.evil-1.dist-info"),
        PYTEST,
        "",
        ("shared", "live"),
    ),
    "changed entry point": (
        IN_SITE.format(
            f"echo 'evil = evil' >> $(echo $d/pytest_timeout-*-info/entry_points.txt); printf '{EVIL}' > $d/evil.py"
        ),
        PYTEST,
        "",
        ("shared", "live"),
    ),
    "pth": (IN_SITE.format(f'echo "{EXIT}" > $d/x.pth'), PYTEST, "", ("shared", "live")),
    "hidden pth": (IN_SITE.format(f'echo "{EXIT}" > $d/.x.pth'), PYTEST, "", ("shared", "live")),
    "path to planted start-up code": (
        IN_SITE.format(f'echo /app/lib > $d/x.pth; mkdir -p lib; echo "{EXIT}" > lib/sitecustomize.py'),
        PYTEST,
        "",
        ("shared", "live"),
    ),
    "sitecustomize": (IN_SITE.format(f'echo "{EXIT}" > $d/sitecustomize.py'), PYTEST, "", ("shared", "live")),
    "usercustomize": (IN_SITE.format(f'echo "{EXIT}" > $d/usercustomize.py'), PYTEST, USER_SITE, ("shared", "live")),
    "sitecustomize in an editable tree": (f'echo "{EXIT}" > /app/sitecustomize.py', PYTEST, EDITABLE, ALL),
    "conftest above the tests": (
        f"printf '{EVIL}' > /conftest.py; echo '[pytest]' > /pytest.ini",
        PYTEST,
        "",
        ("shared", "live"),
    ),
    "configuration above the tests": (
        f"printf '{EVIL}' > /srv/evil.py; printf '[pytest]\\npythonpath = /srv\\naddopts = -p evil\\n' > /tox.ini",
        PYTEST,
        "",
        ("shared", "live"),
    ),
}


@pytest.mark.adversarial
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.ordinary("entry point", "usercustomize")
async def test_what_the_agent_planted_would_win(image, judged, name):
    act, command, more, _ = PLANTED[name]
    built = await image("pytest", "pytest-timeout", more=more)
    done = await judged(built, command, act, "shared", naive=True)
    assert done.reward == 1.0, done


@pytest.mark.adversarial
@pytest.mark.parametrize(
    ("name", "grade"), [(name, grade) for name, (*_, grades) in PLANTED.items() for grade in grades]
)
@pytest.mark.ordinary(
    "entry point-sealed",
    "entry point in a folder whose name is two lines-shared",
    "two lines in the working directory-sealed",
    "changed entry point-live",
    "usercustomize-shared",
    "sitecustomize in an editable tree-sealed",
    "conftest above the tests-shared",
)
async def test_what_the_agent_planted_does_not_work(image, judged, name, grade):
    act, command, more, _ = PLANTED[name]
    built = await image("pytest", "pytest-timeout", more=more)
    done = await judged(built, command, act, grade)
    assert (done.reward, done.status) == (0.0, "scored"), done
    if not (grade == "sealed" and name in ("entry point",)):
        assert "left by the agent" in done.log
    honest = await judged(built, command, f"{act}; echo 42 > /app/answer", grade)
    assert honest.reward == 1.0, honest


PROJECT = """set -e
mkdir thing
echo 'value = 42' > thing/__init__.py
cat > pyproject.toml <<'END'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "thing"
version = "1"
[project.scripts]
thing = "thing:value"
[tool.setuptools]
packages = ["thing"]
END
pip install -q --no-index --no-build-isolation {how} .
rm pyproject.toml
"""


@pytest.mark.parametrize("how", ["-e", ""])
@pytest.mark.ordinary("-e")
async def test_what_an_honest_agent_installs_stays(image, judged, how):
    """An editable install is a `.pth` with code in it; the package must still be there for the tests."""
    built = await image("pytest", "setuptools", "wheel")
    act = PROJECT.replace("{how}", how)
    tests = "import thing\n\ndef test_it():\n    import importlib.metadata as m\n    assert thing.value == 42\n"
    tests += "    assert m.entry_points(group='console_scripts', name='thing')\n"
    done = await judged(built, "cd / && pytest /tests/test_outputs.py", act, "shared", tests=tests)
    assert done.reward == 1.0, done


@pytest.mark.parametrize("grade", [ALL[0], *(pytest.param(grade, marks=pytest.mark.slow) for grade in ALL[1:])])
@pytest.mark.parametrize(
    ("packages", "command", "said"),
    [
        (("pytest",), CTRF, "unrecognized arguments: --ctrf"),
        ((), "pytest /tests/test_outputs.py", "pytest: command not found"),
        ((), "python -m pytest /tests/test_outputs.py", "No module named pytest"),
        ((), "uvx pytest /tests/test_outputs.py", "uvx: command not found"),
    ],
)
@pytest.mark.ordinary("packages1-*")
async def test_a_runner_that_cannot_start_on_the_untouched_image_gives_no_reward(
    image, judged, packages, command, said, grade
):
    done = await judged(
        await image(*packages), f"PATH=/opt/venv/bin:/usr/bin:/bin; {command}", "echo 42 > answer", grade
    )
    assert (done.reward, done.status) == (None, "failed"), done
    assert said in done.error


@pytest.mark.parametrize("grade", ["sealed", pytest.param("shared", marks=pytest.mark.slow)])
async def test_a_script_whose_interpreter_is_missing_gives_no_reward(image, judged, grade):
    done = await judged(await image(), "", "echo 42 > answer", grade, script="#!/usr/bin/no-such-interpreter\n")
    assert (done.reward, done.status) == (None, "failed"), done
    assert "exit code 12" in done.error


@pytest.mark.parametrize(
    "act",
    [
        f"rm -r {SITE}/pytest*",
        "rm /opt/venv/bin/pytest",
        "rm -r /opt/venv",
        "printf '#!/bin/sh\\necho pytest: error: unrecognized arguments: -x\\nexit 4\\n' > /opt/venv/bin/pytest",
    ],
)
@pytest.mark.ordinary("rm -r /opt/venv")
async def test_a_runner_that_the_agent_broke_is_judged(image, judged, act):
    done = await judged(await image("pytest"), PYTEST, act, "shared")
    assert (done.reward, done.status) == (0.0, "scored"), done


async def test_output_that_looks_like_a_runner_that_did_not_start_does_not_void_an_attempt(image, judged):
    act = "printf 'echo pytest: command not found\\nexit 127\\n' > run.sh"
    done = await judged(await image("pytest"), "bash /app/run.sh", act, "shared", script=None)
    assert (done.reward, done.status) == (0.0, "scored"), done


@pytest.mark.parametrize("grade", [ALL[0], *(pytest.param(grade, marks=pytest.mark.slow) for grade in ALL[1:])])
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("PATH=/opt; pytest /app", "pytest: not found"),
        ("PATH=/opt; python3 -m pytest /app", "python3: not found"),
        ("/tests/check.rb", "/tests/check.rb: not found"),
    ],
)
async def test_a_command_whose_runner_cannot_start_gives_no_reward(attempt, tmp_path, command, said, grade):
    (tmp_path / "check.rb").write_text("#!/usr/bin/no-such-interpreter\n")
    (tmp_path / "check.rb").chmod(0o755)
    verifier = {"kind": "commands", "tests": [str(tmp_path)], "options": {"commands": ["true", command]}}
    async with attempt({"instruction": "x", "verifier": verifier}) as it:
        await it.act("echo 42 > answer")
        done = await it.verdict(grade=grade)
    assert (done.reward, done.status) == (None, "failed"), done
    assert said in done.error


@pytest.mark.parametrize("left", ["true", "echo 'echo pytest: command not found; exit 127' > made; chmod +x made"])
async def test_a_program_that_the_agent_did_not_make_is_judged(attempt, left):
    """Missing or pretending to be a runner that is missing: on the untouched image nothing says so."""
    verifier = {"kind": "commands", "options": {"commands": ["./made"]}}
    async with attempt({"instruction": "x", "verifier": verifier}) as it:
        await it.act(left)
        done = await it.verdict()
    assert (done.reward, done.status) == (0.0, "scored"), done


@pytest.mark.parametrize("bundled", [False, True])
async def test_a_script_without_its_x_bit_runs(backend, folders, tmp_path, attempt, bundled):
    toml = '[environment]\ndocker_image = "host"\nworkdir = "/app"\n'
    files = {"tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"}
    folder = folders.simple(tmp_path / "t", toml, **files)
    (folder / "tests" / "test.sh").chmod(0o644)
    task = load_folder(folder)
    if not bundled:
        async with attempt(task) as it:
            assert (await it.verdict(grade="shared")).reward == 1.0
        return
    context = folders.write(
        tmp_path / "c",
        {"Dockerfile": "FROM host\nCOPY test.sh /tests/test.sh\n", "test.sh": files["tests/test.sh"]},
    )
    (context / "test.sh").chmod(0o644)
    built = await build(context, backend, backend.images, FileCache(tmp_path / "cache"), BuildOptions(timeout_s=60))
    task = msgspec.structs.replace(task, verifier=msgspec.structs.replace(task.verifier, bundled=True))
    async with attempt(task, image=built.image) as it:
        assert (await it.verdict(grade="shared")).reward == 1.0
