"""The verbs that need no run: doctor, image, check. Each is started as a user starts it."""

import json
import os
import subprocess
import sys
import tarfile

import pytest


def rollyard(*argv, home, **options):
    env = dict(os.environ, ROLLYARD_HOME=str(home))
    code = "from rollyard.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, timeout=120, **options
    )


@pytest.fixture
def rootfs(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/motd").write_text("hi")
    with tarfile.open(tmp_path / "r.tar", "w") as archive:
        archive.add(tmp_path / "etc", "etc")
    return tmp_path / "r.tar"


def test_doctor_says_what_this_machine_can_do(tmp_path):
    done = rollyard("doctor", "--json", home=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["healthy"] else 3)
    found = {(row["group"], row["name"]): row for row in report["findings"]}
    assert {"kernel", "sandbox", "engines", "programs", "extras", "disk"} <= {group for group, _ in found}
    assert found["disk", "data"]["found"].endswith(str(tmp_path))
    assert "gate" in found["sandbox", "local"]["found"]
    assert found["extras", "e2b"]["state"] == "absent" or "stdin and stdout" in found["extras", "e2b"]["found"]
    for row in report["findings"]:
        assert row["state"] == "ok" or row["advice"], row
        assert "\n" not in row.get("advice", "")


def test_doctor_prints_one_line_a_row(tmp_path):
    lines = rollyard("doctor", home=tmp_path).stdout.splitlines()
    assert lines[0].split() == ["group", "what", "found"]
    assert any(line.split()[:2] == ["kernel", "cgroups"] or "cgroups" in line for line in lines)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_reports_a_home_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    done = rollyard("doctor", "--json", home=tmp_path / "no")
    assert done.returncode == 3


def test_image_add_list_rm(tmp_path, rootfs):
    home = tmp_path / "home"
    added = json.loads(
        rollyard(
            "image", "add", str(rootfs), "--name", "mini", "--alias", "python:3.11-slim", "--json", home=home
        ).stdout
    )
    assert added["names"] == ["mini", "python:3.11-slim"]
    listed = rollyard("image", "list", home=home).stdout
    assert added["image"]["id"] in listed and "mini, python:3.11-slim" in listed
    assert json.loads(rollyard("image", "list", "--json", home=home).stdout)["names"]["mini"] == added["image"]["id"]
    assert rollyard("image", "rm", "mini", home=home).stdout == "forgot mini\n"
    gone = json.loads(rollyard("image", "rm", added["image"]["id"], "--json", home=home).stdout)
    assert gone["forgotten"] == ["python:3.11-slim", added["image"]["id"]]
    assert json.loads(rollyard("image", "list", "--json", home=home).stdout)["images"] == []


@pytest.mark.parametrize(
    "argv", [["image", "rm", "nothing"], ["image", "add", "/no/such/file"], ["check", "sandbox", "nothing"]]
)
def test_a_wrong_name_is_one_line_and_exit_code_2(tmp_path, argv):
    done = rollyard(*argv, home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rollyard: ") and done.stderr.count("\n") == 1


def test_check_sandbox_prints_each_case_and_a_total(tmp_path):
    done = rollyard("check", "sandbox", "local", "--only", "X", home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in ("passed", "skipped") for line in lines[:-1])
    assert lines[-1].startswith("local (") and lines[-1].endswith("0 failed")


def test_check_sandbox_fails_with_exit_code_3_when_a_case_fails(tmp_path):
    (tmp_path / "liar.py").write_text(LIAR)
    env_path = dict(PYTHONPATH=str(tmp_path))
    os_env = dict(os.environ, ROLLYARD_HOME=str(tmp_path / "home"), **env_path)
    code = "from rollyard.cli.main import main; main()"
    argv = [sys.executable, "-c", code, "check", "sandbox", "liar:liar", "--json", "--only", "E3"]
    done = subprocess.run(argv, capture_output=True, text=True, env=os_env, timeout=120)
    totals = json.loads(done.stdout)
    assert done.returncode == 3
    assert (totals["failed"], totals["outcomes"][0]["result"]) == (1, "failed")
    assert "apart" in totals["outcomes"][0]["title"]


# The local backend, but stderr comes back in stdout.
LIAR = """
import msgspec
import rollyard

def liar(**options):
    backend = rollyard.sandbox.backend("local", **options)
    real_open = backend.open

    def open(spec):
        opening = real_open(spec)
        real_enter = opening.__aenter__

        class Lying:
            async def __aenter__(self):
                box = await real_enter()
                real_exec = box.exec

                async def exec(cmd, **options):
                    done = await real_exec(cmd, **options)
                    return msgspec.structs.replace(done, stdout=done.stdout + done.stderr, stderr=b"")

                box.exec = exec
                return box

            async def __aexit__(self, *error):
                await opening.__aexit__(*error)

        return Lying()

    backend.open = open
    return backend
"""
