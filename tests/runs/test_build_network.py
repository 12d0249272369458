"""A Dockerfile's commands have the hosts that the caller names, and none without; this machine's mirrors are handed in."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import rollyard as ry
from rollyard.core.task import Task
from rollyard.images.mirrors import find_mirrors

pytestmark = pytest.mark.anyio


def build(tmp_path: Path, *lines: str) -> Task:
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    return Task(id="t", instruction="x", build=str(tmp_path), build_timeout_s=500)


async def run(backend, task: Task, network: str, check: str) -> tuple[ry.Rollout, list[str]]:
    refused: list[str] = []

    async def sink(event) -> None:
        if event.name == "network.refused":
            refused.append(event.fields["host"])

    done = await ry.run_rollout(
        task, agent="nop", policy=ry.policy.scripted([]), sandbox=backend, network=network, verify=[check], sink=sink
    )
    return done, refused


async def test_a_build_reaches_the_hosts_that_the_caller_names_and_none_without(backend, tmp_path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        fetch = "import urllib.request as r; open('/got', 'wb').write(r.urlopen('http://{}:{}/').read())"
        task = build(tmp_path, "FROM host", f'RUN python3 -c "{fetch.format("web.test", port)}"')
        closed, _ = await run(backend, task, "task", "true")
        assert closed.reward is None and "--build-network allow:HOST" in closed.failure.message
        allow = f"allow:web.test:{port}@127.0.0.1"
        opened, refused = await run(backend, task, allow, 'test "$(cat /got)" = hello -a ! -s /etc/resolv.conf')
        assert (opened.reward, refused, opened.failure) == (0.0, [], None)  # the check has the network too
        opened, _ = await run(backend, task, "task", 'test "$(cat /got)" = hello -a ! -s /etc/resolv.conf')
        assert opened.reward == 1.0  # kept, and nothing of the proxy is in it
        other = build(tmp_path, "FROM host", f'RUN python3 -c "{fetch.format("evil.test", port)}"')
        failed, refused = await run(backend, other, allow, "true")
        assert failed.reward is None and refused == ["evil.test"]


def test_mirrors_are_told_where_they_are_allowed_and_hold_no_password(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/pip.conf").write_text(
        "[global]\nindex-url = https://a.test/simple\nextra-index-url = https://u:p@b.test/s file:///x https://c.test:8443/s\n"
    )
    (tmp_path / ".npmrc").write_text("registry=https://d.test/npm/\n//d.test/:_authToken=secret\n")
    own = {"HOME": str(tmp_path), "PIP_CERT": "/ca.pem"}
    found = find_mirrors(lambda host, port: (host, port) != ("d.test", 443), own, tmp_path)
    assert found == {
        "PIP_INDEX_URL": "https://a.test/simple",
        "PIP_EXTRA_INDEX_URL": "https://c.test:8443/s",
        "PIP_CERT": "/ca.pem",
    }
    assert find_mirrors(lambda host, port: True, own, tmp_path)["npm_config_registry"] == "https://d.test/npm/"
    assert find_mirrors(lambda host, port: False, {"HOME": "/nowhere"}, tmp_path) == {}


def pip_hosts() -> list[str]:
    """Where this machine's pip fetches from, by its own word."""
    from pip._internal.models.index import PyPI

    return [urlsplit(PyPI.simple_url).hostname or "", PyPI.file_storage_domain]


def apt_source() -> str:
    texts = [path.read_text() for path in Path("/etc/apt").glob("sources.list*/*.sources")]
    found = re.search(r"^URIs: *(http://\S+)", "\n".join(texts), re.MULTILINE)
    if found is None:
        pytest.skip("apt has no source in the new format")
    return found[1]


@pytest.mark.slow
async def test_pip_installs_in_a_build_that_may_reach_its_index(backend, tmp_path):
    task = build(tmp_path, "FROM host", "RUN python3 -m venv /v && /v/bin/pip install --retries 1 --no-cache-dir six")
    refused, _ = await run(backend, task, "task", "true")
    assert refused.reward is None and "--network" in refused.failure.message
    done, _ = await run(backend, task, f"allow:{','.join(pip_hosts())}", "/v/bin/python -c 'import six'")
    assert done.reward == 1.0, done.failure


@pytest.mark.slow
async def test_apt_installs_in_a_build_that_may_reach_its_mirror(backend, tmp_path):
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    source, tree, image = apt_source(), tmp_path / "tree", "debian-test:minbase"
    made = ["debootstrap", "--variant=minbase", "bookworm", str(tree), source]
    await asyncio.to_thread(subprocess.run, made, check=True, timeout=900, capture_output=True)
    await backend.images.add(str(tree), names=[image])
    (tmp_path / "context").mkdir()
    line = "RUN apt-get update && apt-get install -y --no-install-recommends hello"
    task = build(tmp_path / "context", f"FROM {image}", line, "WORKDIR /app")
    refused, _ = await run(backend, task, "task", "true")
    assert refused.reward is None
    done, _ = await run(backend, task, f"allow:{urlsplit(source).hostname}", "hello")
    assert done.reward == 1.0, done.failure
