"""What the docker backend refuses, and what it never tells an engine: no engine is needed to see it."""

import json
import subprocess
import sys

import pytest

from rollyard.core.errors import ConfigError, IsolationTooWeak, SandboxUnavailable, Unsupported
from rollyard.core.sandbox import Capabilities, Mount, Resources, SandboxSpec
from rollyard.sandbox.docker import container, sweep
from rollyard.sandbox.docker.backend import DockerBackend
from rollyard.sandbox.docker.container import Identity
from rollyard.sandbox.teardown import one_by_one

CAN = Capabilities(isolation="container", layers=True, mounts=True)
WHO = Identity(
    id="sbx_1", backend="docker", image="i", isolation="container", created_at=1.0, expires_at=100.2, lifetime="owner",
    user="0:0", workdir="/",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["privileged", "cap_add", "devices", "network_mode", "pid_mode", "volumes", "binds", "security_opt", "userns"],
)
def test_an_option_that_would_weaken_isolation_is_refused_by_name(name):
    with pytest.raises(Unsupported, match=name):
        container.check(SandboxSpec(options={name: "x"}), CAN, ())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"min_isolation": "gvisor"}, IsolationTooWeak),
        ({"network": "host"}, ConfigError),
        ({"network": "allowlist", "allowed_hosts": ("127.1",)}, ConfigError),
        ({"idle_ttl_s": 5.0}, Unsupported),
        ({"disk": "tmpfs"}, Unsupported),
        ({"resources": Resources(gpus=1)}, Unsupported),
        ({"mounts": (Mount(local_dir="/x", remote_dir="/etc"),)}, ConfigError),
        ({"options": {"shm_mb": "-1"}}, ConfigError),
        ({"options": {"cpuset": "0; rm"}}, ConfigError),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_made(changes, error):
    with pytest.raises(error):
        container.check(SandboxSpec(**changes), CAN, ())


def test_a_container_has_no_network_no_new_privileges_and_none_of_the_spec_s_environment():
    spec = SandboxSpec(env={"API_KEY": "canary-1"}, labels={"run": "r1"}, resources=Resources(memory_mb=64, pids=10))
    body = container.request(spec, WHO, [], None)
    host = body["HostConfig"]
    assert host["NetworkMode"] == "none" and host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Memory"] == host["MemorySwap"] == 64 * 2**20
    assert not {"Privileged", "CapAdd", "Devices", "PidMode", "IpcMode", "UsernsMode", "Binds"} & set(host)
    assert "canary-1" not in json.dumps(body)


def test_labels_and_name_hold_what_another_process_needs():
    spec = SandboxSpec(labels={"run": "r1"})
    found = container.info(container.labels(spec, WHO), WHO.name, "running")
    assert found is not None and (found.id, dict(found.labels)) == ("sbx_1", {"run": "r1"})
    assert found.expires_at == 101.0
    assert container.info({"other": "x"}, "name", "running") is None


@pytest.mark.anyio
async def test_an_engine_that_is_not_there_is_an_error_without_the_address_s_password(tmp_path):
    with pytest.raises(SandboxUnavailable) as caught:
        async with DockerBackend(host="tcp://user:canary-2@127.0.0.1:9", store=tmp_path):
            pass
    assert "canary-2" not in str(caught.value) and "127.0.0.1:9" in str(caught.value)


def test_deleting_without_a_loop_lists_what_it_could_not_delete(tmp_path):
    names = [f"c{n}" for n in range(250)]
    for host in (f"unix://{tmp_path}/none", "tcp://127.0.0.1:9", "ssh://engine", "https://engine:2376"):
        delete = one_by_one(lambda name, seconds, host=host: sweep.delete_now(host, name, seconds))
        assert delete(names, 20.0) == names


def test_a_missing_client_library_is_named_with_the_command_that_installs_it(tmp_path):
    program = (
        "import asyncio, sys; sys.modules['aiodocker'] = None\n"
        "from rollyard.sandbox.docker.backend import DockerBackend\n"
        "async def main():\n"
        f"    async with DockerBackend(host='unix:///none', store={str(tmp_path)!r}): pass\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "MissingExtra" in done.stderr and "pip install 'rollyard[docker]'" in done.stderr
