"""Harbor folders load without Harbor: every field, the effective values, and errors that name file and field."""

from pathlib import Path

import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.task import Artifact, CollectHook, Healthcheck, McpServer
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.harbor.taskfile import strip_canary
from rollyard.tasks.harbor.write import to_folder
from rollyard.tasks.network import asks_public


def without_paths(task):
    """The task with host paths made relative to its folder, so that two copies compare equal."""
    text = msgspec.json.encode(task).decode().replace(task.source, "ROOT")
    return msgspec.structs.replace(msgspec.json.decode(text, type=ry.Task), digest="")


def test_every_field_of_the_schema_reaches_the_task(folders, tmp_path):
    task = load_folder(folders.full(tmp_path / "full"))
    assert task.id == "acme/full"
    assert task.instruction == "Do all of it.\n# not a canary line\n"
    assert task.package["version"] == "2.0"
    assert task.package["authors"][0] == {"name": "A. Author", "email": "a@example.com"}
    assert task.package["source"] == "registry/full"
    assert task.metadata == {
        "difficulty": "easy",
        "expert_time_estimate_min": 5.5,
        "tags": ["x"],
        "nested": {"deep": True},
    }
    assert (task.image, task.build) == ("acme/full:1", str(tmp_path / "full" / "environment"))
    assert task.build_timeout_s == 30
    assert task.resources == ry.Resources(
        cpus=1.5, memory_mb=2048, disk_mb=10240, gpus=2, gpu_types=("H100", "A100"), tpu="v6e:2x4"
    )
    assert task.workdir == "/app"
    assert task.skills == "/skills"
    assert task.user == "agent"
    assert task.env == {"PLAIN": "1", "HOST_VALUE": "${HOST_VALUE:-none}"}
    assert task.healthcheck == Healthcheck(
        command="curl -f localhost", interval_s=1, timeout_s=2, start_period_s=3, start_interval_s=0.5, retries=4
    )
    assert task.mcp == (
        McpServer(name="files", transport="stdio", command=("python3", "-m", "server")),
        McpServer(
            name="web",
            transport="http",
            url="http://localhost:9000/mcp",
            headers={"Authorization": "Bearer ${WEB_TOKEN}", "X-Team": "a"},
        ),
        McpServer(name="events", transport="sse", url="http://localhost:9001/sse"),
    )
    assert task.artifacts == (
        Artifact(source="/app/out.txt"),
        Artifact(source="/app/build", destination="built", exclude=("*.o",)),
    )
    assert (task.network, task.allowed_hosts) == ("none", ())  # the agent's own word, over the environment's
    assert task.limits == ry.Limits(agent=120, verify=90, boot=20)
    assert task.setup == ("echo ready",)
    assert task.layers == ("pytest",)
    assert task.history == '{"schema_version": "ATIF-v1.8"}'
    assert task.solution_env == {"ANSWER": "${ANSWER:-42}"}
    assert task.solution == str(tmp_path / "full" / "solution")
    verifier = task.verifier
    assert (verifier.kind, verifier.grade, verifier.bundled, verifier.carry_workdir) == (
        "harbor",
        "sealed",
        True,
        False,
    )
    assert (verifier.user, verifier.timeout_s) == ("0", 90)
    assert verifier.env == {"JUDGE_KEY": "${JUDGE_KEY}", "MODE": "${MODE:-strict}"}
    assert verifier.network == "allowlist"
    assert verifier.allowed_hosts == ("example.com", "*.example.org", "192.0.2.0/24", "2001:db8::1")
    assert verifier.site.image == "acme/grader:1"
    assert verifier.site.resources == ry.Resources(cpus=1, memory_mb=512)
    assert verifier.site.workdir == "/grade"
    assert verifier.collect == (
        CollectHook(command="pg_dump > /app/dump.sql", timeout_s=12, user="postgres"),
        CollectHook(command="redis-cli save", service="cache"),
    )


def test_steps_inherit_and_override(folders, tmp_path):
    task = load_folder(folders.steps(tmp_path / "steps"))
    first, second = task.steps
    assert task.step_reward == "final"
    assert task.verifier is None
    assert (first.instruction, first.min_reward) == ("Do the first thing.\n", {"reward": 0.5})
    assert (first.agent_timeout_s, first.agent_user) == (50, "dev")
    assert first.verifier.grade == "shared"
    assert first.verifier.env == {"A": "task", "B": "task"}
    assert [Path(d).relative_to(task.source).as_posix() for d in first.verifier.tests] == ["tests"]
    assert second.min_reward == {"correctness": 0.8, "style": 0.1}
    assert (second.agent_timeout_s, second.agent_user) == (70, "root")
    assert second.verifier.grade == "sealed"
    assert second.verifier.env == {"A": "task", "B": "step"}
    assert second.verifier.timeout_s == 10
    tests = [Path(d).relative_to(task.source).as_posix() for d in second.verifier.tests]
    assert tests == ["tests", "steps/second/tests"]
    assert second.workdir_files.endswith("steps/second/workdir")
    assert second.history == "{}"
    assert second.artifacts == (Artifact(source="/app/second.txt"),)
    assert second.healthcheck.command == "true"
    assert task.limits == ry.Limits(agent=120, verify=50)


@pytest.mark.parametrize("kind", ["full", "steps", "simple"])
def test_a_folder_written_from_a_task_loads_as_the_same_task(folders, tmp_path, kind):
    task = load_folder(getattr(folders, kind)(tmp_path / "one"))
    again = load_folder(to_folder(task, tmp_path / "again" / "one"))
    assert without_paths(again) == without_paths(task)


def test_a_task_that_no_folder_made_round_trips_too(tmp_path):
    (task,) = ry.Taskset(
        [
            {
                "id": "made",
                "instruction": "Fix it.",
                "files": {"a.txt": "text", "/opt/b": b"\x00\xff"},
                "setup": ["chmod 600 a.txt"],
                "verify": ["test -s a.txt", "true"],
                "limits": {"agent": 33.0, "idle": 9.0},
                "resources": {"memory_mb": 100, "pids": 50},
            }
        ]
    )
    again = load_folder(to_folder(task, tmp_path / "made"))
    assert again.setup == task.setup
    assert again.limits == task.limits
    assert again.resources == task.resources
    assert again.verifier == task.verifier
    assert [(f.path, Path(f.source).read_bytes()) for f in again.files] == [("a.txt", b"text"), ("/opt/b", b"\x00\xff")]


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_each_schema_version_loads_also_under_its_old_key(folders, tmp_path, version):
    for key in ("version", "schema_version"):
        folder = folders.simple(
            tmp_path / key, f'{key} = "{version}"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
        )
        task = load_folder(folder)
        assert task.resources == ry.Resources(memory_mb=2048, disk_mb=512)


def test_network_unset_means_none_and_public_loads(folders, tmp_path):
    assert load_folder(folders.simple(tmp_path / "unset")).network is None
    for number, table in enumerate(
        (
            '[environment]\nnetwork_mode = "public"',
            "[environment]\nallow_internet = true",
            '[agent]\nnetwork_mode = "public"',
            '[verifier]\nnetwork_mode = "public"',
            '[verifier.environment]\nnetwork_mode = "public"',
        )
    ):
        folder = folders.simple(tmp_path / str(number), table + "\n")
        assert asks_public(load_folder(folder))
    off = folders.simple(tmp_path / "off", "[environment]\nallow_internet = false\n")
    assert load_folder(off).network == "none"


def test_a_verifiers_image_follows_harbors_order(folders, tmp_path):
    folder = folders.simple(tmp_path / "t", '[verifier]\nenvironment_mode = "separate"\n')
    assert load_folder(folder).verifier.site is None  # a fresh copy of the task's own
    folders.write(folder, {"tests/Dockerfile": "FROM host\n"})
    verifier = load_folder(folder).verifier
    assert verifier.bundled
    assert verifier.site.build == str(folder / "tests")
    with_image = '[verifier.environment]\ndocker_image = "grader"\n'
    verifier = load_folder(folders.simple(tmp_path / "t", with_image)).verifier
    assert (verifier.grade, verifier.site.image, verifier.site.build) == ("sealed", "grader", None)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[environment]\ncpuz = 1\n", "environment.*cpuz"),
        ("[environment]\ncpus = 'many'\n", r"environment\.cpus"),
        ("[environment]\ncpus = nan\n", "cpus must be a positive number"),
        ("[environment]\nos = 'plan9'\n", "os is 'linux' or 'windows'"),
        ("[environment]\nallowed_hosts = ['a.b']\n", "only valid with network_mode"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a.b']\n", "http://a.b"),
        ("[environment]\nmemory = '2G'\nmemory_mb = 5\n", "contradict"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\n", "contradicts"),
        ("[verifier]\ntimeout_sec = 0\n", r"limits\.verify"),
        ("[[environment.mcp_servers]]\nname = 'x'\n", "needs a url"),
        (
            "[[environment.mcp_servers]]\nname='x'\nurl='http://h'\nheaders={Authorization='Bearer abc'}\n",
            "never hold one",
        ),
        ("[task]\nname = 'noorg'\n", "org/name"),
        ("artifacts = ['../x']\n", "must not contain"),
        ("artifacts = [{source='/a', destination='/b'}]\n", "destination"),
        ("schema_version = 'new'\n", "schema_version"),
        ("[[steps]]\nname = 'a/b'\n", "portable"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'\n", "two steps"),
        ("[[steps]]\nname = 'absent'\n", "steps/absent does not exist"),
        ("[metadata.rollyard]\ngrad = 'live'\n", "grad"),
        ("[environment.tpu]\ntype='v4'\ntopology='big'\n", "topology"),
        ("not toml", "not TOML"),
    ],
)
def test_a_load_error_names_the_file_and_the_field(folders, tmp_path, toml, said):
    folder = folders.simple(tmp_path / "bad", toml)
    with pytest.raises(ConfigError, match=said) as caught:
        load_folder(folder)
    assert str(folder) in str(caught.value)


def test_missing_parts_are_named(folders, tmp_path):
    folder = folders.simple(tmp_path / "t")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh"):
        load_folder(folder)
    folder = folders.simple(tmp_path / "u")
    (folder / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"instruction\.md"):
        load_folder(folder)


def test_harborignore_keeps_files_out_of_tests_and_digest(folders, tmp_path):
    folder = folders.simple(tmp_path / "t")
    plain = load_folder(folder).digest
    folders.write(folder, {"tests/notes/private.txt": "x", "tests/.harborignore": "notes/\n"})
    assert load_folder(folder).digest == plain
    folders.write(folder, {"tests/.harborignore": "test.sh\n"})
    with pytest.raises(ConfigError, match="harborignore"):
        load_folder(folder)


@pytest.mark.adversarial
def test_a_link_out_of_the_task_folder_is_refused(folders, tmp_path):
    (tmp_path / "secret").write_text("host secret")
    folder = folders.simple(tmp_path / "t")
    (folder / "tests" / "leak").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="leads out of the task folder"):
        load_folder(folder)


def test_the_digest_is_the_content(folders, tmp_path):
    one, two = load_folder(folders.simple(tmp_path / "a")), load_folder(folders.simple(tmp_path / "b"))
    assert one.digest == two.digest
    (tmp_path / "b" / "solution" / "solve.sh").write_text("#!/bin/sh\nfalse\n")
    assert load_folder(tmp_path / "b").digest != one.digest


def test_only_leading_canary_lines_go():
    assert strip_canary("# hello\n# canary x\n") == "# hello\n# canary x\n"
    assert strip_canary("# CANARY x\n\n\ntext\n") == "text\n"
    assert strip_canary("\n\ntext") == "\n\ntext"
