"""Compose files: what is supported is read, and the rest is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import Capabilities, Volume
from rollyard.core.task import Site, Step, Task, VerifierSpec
from rollyard.tasks.harbor.compose import FILE_KEYS, MAIN_KEYS, SERVICE_KEYS, fold, read_services
from rollyard.tasks.harbor.write import to_folder
from rollyard.tasks.requirements import refuse

CAN = Capabilities(isolation="namespace", images=True, snapshot=True, services=True, network_allowlist=True)
DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"


@pytest.fixture
def write(tmp_path):
    def write(services: dict, **rest) -> str:
        path = tmp_path / "environment" / "docker-compose.yaml"
        path.parent.mkdir(exist_ok=True)
        for folder in (path.parent, path.parent / "api"):
            folder.mkdir(exist_ok=True)
            (folder / "Dockerfile").write_text("FROM host\n")
        path.write_text(yaml.safe_dump({"services": {"main": {"build": "."}, **services}, **rest}))
        return str(path)

    return write


def test_everything_that_is_supported_is_read(write):
    path = write(
        {
            "api": {
                "build": {"context": "api"},
                "command": "serve --port 80 'a b'",
                "entrypoint": ["tini", "--"],
                "environment": ["A=1", "KEY=${SECRET}", "PRICE=5$$"],
                "working_dir": "/srv",
                "user": 1000,
                "depends_on": {"db": {"condition": "service_healthy"}},
                "volumes": ["data:/data:ro"],
                "expose": [80],
                "hostname": "backend",
                "cpus": 0.5,
                "mem_limit": "512m",
                "x-rollyard": {"verify": "stop"},
            },
            "db": {
                "image": "postgres",
                "healthcheck": {"test": ["CMD", "ready", "a b"], "interval": "1m1.5s", "retries": 9},
            },
        },
        volumes={"data": None},
    )
    found = read_services(path)
    db, api = found.others
    assert (db.name, db.image, db.healthcheck.command, db.healthcheck.interval_s, db.healthcheck.retries) == (
        "db", "postgres", "ready 'a b'", 61.5, 9
    )  # fmt: skip
    assert (api.build, api.image) == (str(Path(path).parent / "api"), "host")
    assert (api.command, api.entrypoint) == (("serve", "--port", "80", "a b"), ("tini", "--"))
    assert (api.env, api.workdir, api.user) == ({"A": "1", "KEY": "${SECRET}", "PRICE": "5$"}, "/srv", "1000")
    assert api.volumes == (Volume(name="data", path="/data", writable=False),)
    assert (api.resources.cpus, api.resources.memory_mb, api.verify) == (0.5, 512, "stop")
    assert (found.names, found.kept) == (("main", "db", "api", "backend"), ("db",))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"ports": ["80:80"]}, "services.api: 'ports'"),
        ({"privileged": True}, "'privileged'"),
        ({"network_mode": "host"}, "'network_mode'"),
        ({"networks": ["a"]}, "'networks'"),
        ({"env_file": ".env"}, "'env_file'"),
        ({"volumes": ["./host:/data"]}, "'./host' is a folder of the machine"),
        ({"volumes": ["/etc:/data"]}, "'/etc' is a folder of the machine"),
        ({"volumes": ["other:/data"]}, "no volume that the file names"),
        ({"volumes": [{"type": "bind", "source": "/", "target": "/x"}]}, "volumes"),
        ({"volumes": ["data:/data:shared"]}, "is not 'name:/path'"),
        ({"build": {"context": "api", "args": {"A": "1"}}}, "services.api.build"),
        ({"build": "../.."}, "services.api.build"),
        ({"command": "echo $HOME"}, "names a variable of the machine"),
        ({"environment": {"A": "x${SECRET}"}}, "services.api.environment.A"),
        ({"depends_on": {"main": {}}}, "starts last"),
        ({"depends_on": ["gone"]}, "no such service"),
        ({"depends_on": {"db": {"condition": "service_healthy"}}}, "'db' has no healthcheck"),
        ({"depends_on": {"db": {"restart": True}}}, "'restart'"),
        ({"depends_on": {"db": {"condition": "ready"}}}, "'ready'"),
        ({"healthcheck": {"test": ["RUN", "x"]}}, "CMD-SHELL"),
        ({"healthcheck": {"test": "x", "interval": "soon"}}, "'soon'"),
        ({"mem_limit": "much"}, "'much'"),
        ({"x-rollyard": {"verify": "maybe"}}, "'maybe'"),
        ({"x-rollyard": {"judge": "keep"}}, "'judge'"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(write, said, named):
    path = write({"api": {"image": "x", **said}, "db": {"image": "x"}}, volumes={"data": {}})
    with pytest.raises(ConfigError) as refused:
        read_services(path)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("services", "rest", "named"),
    [
        ({"main": {"privileged": True}}, {}, "services.main: 'privileged'"),
        ({"main": {"user": "a"}}, {}, "services.main: 'user'"),
        ({"api": {"image": "x"}}, {"networks": {}}, "'networks'"),
        ({"api": {"image": "x"}}, {"volumes": {"data": {"driver": "nfs"}}}, "volumes.data: 'driver'"),
        ({"a": {"image": "x", "depends_on": ["b"]}, "b": {"image": "x", "depends_on": ["a"]}}, {}, "circle"),
        ({"A b": {"image": "x"}}, {}, "no name of a service"),
        ({"localhost": {"image": "x"}}, {}, "no name of a service"),
    ],
)
def test_the_rest_of_a_file_is_refused_by_name_too(write, services, rest, named):
    with pytest.raises(ConfigError, match=named):
        read_services(write(services, **rest))


def test_main_is_folded_into_the_task_and_the_file_stays_for_the_others(write):
    path = write({"main": {"build": "api", "environment": {"A": 1}, "working_dir": "/srv"}, "db": {"image": "x"}})
    site = fold(Site(compose=path, build="/other"))
    assert (site.compose, site.build, site.env, site.workdir) == (
        path,
        str(Path(path).parent / "api"),
        {"A": "1"},
        "/srv",
    )


def test_a_task_is_refused_where_its_services_cannot_be_what_it_asks(write):
    kept = write({"db": {"image": "x"}})
    base = {"id": "t", "instruction": "x", "compose": kept}
    refuse(Task(**base), "big", CAN)
    with pytest.raises(Unsupported, match="several services"):
        refuse(Task(**base), "small", Capabilities(isolation="container", images=True))
    own = VerifierSpec(kind="harbor", network="allowlist", allowed_hosts=("a.b",))
    with pytest.raises(Unsupported, match="network of its own"):
        refuse(Task(**base, verifier=own), "big", CAN)
    beside = VerifierSpec(kind="harbor", site=Site(compose=kept))
    with pytest.raises(Unsupported, match="several services"):
        refuse(Task(**base, verifier=beside), "big", CAN)
    stopped = write({"db": {"image": "x", "x-rollyard": {"verify": "stop"}}})
    refuse(Task(**{**base, "compose": stopped}, verifier=own), "big", CAN)
    with pytest.raises(Unsupported, match="gone after the first"):
        refuse(Task(**{**base, "compose": stopped}, steps=(Step(name="s", instruction="x"),)), "big", CAN)
    with pytest.raises(Unsupported, match="'ports'"):
        refuse(Task(**{**base, "compose": write({"db": {"image": "x", "ports": [1]}})}), "big", CAN)


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        ("sleep infinity", True),
        (["sh", "-c", "sleep infinity"], True),
        (["tail", "-f", "/dev/null"], True),
        (["sh", "-c", "python3 server.py & sleep infinity"], False),
        ("python3 server.py", False),
    ],
)
def test_a_command_of_main_is_kept_where_it_does_more_than_wait(write, command, waits):
    path = write({"main": {"build": ".", "command": command}})
    assert (fold(Site(compose=path)).compose is None) is waits
    assert (read_services(path).main.command is None) is waits


def test_a_written_folder_has_the_file_and_all_that_it_builds(write, tmp_path):
    path = write({"api": {"build": "api"}})
    task = Task(id="t", instruction="x", compose=path, build=str(Path(path).parent))
    written = to_folder(task, tmp_path / "out") / "environment"
    assert (written / "docker-compose.yaml").is_file() and (written / "api" / "Dockerfile").is_file()


def test_the_documentation_lists_the_keys_that_there_are():
    text = DOCS.read_text()
    for key, said in (*FILE_KEYS.items(), *SERVICE_KEYS.items()):
        assert f"| `{key}` | {said}" in text, key
    listed = text.split("## Tasks of several services")[1].split("\n## ")[0]
    rows = [line.split("`")[1] for line in listed.splitlines() if line.startswith("| `")]
    assert rows == [*FILE_KEYS, *SERVICE_KEYS]
    marked = [line.split("`")[1] for line in listed.splitlines() if line.startswith("| `") and line.endswith("| yes |")]
    assert marked == [key for key in SERVICE_KEYS if key in MAIN_KEYS]
