"""The manifests on a real API server, where `kube-apiserver` and `etcd` are on the PATH. It takes them, refuses unknown fields,
keeps every field that they say, and lets their pods into a namespace of the strictest level of pod security."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.servers.postgres import free_port

FOLDER = Path(__file__).parents[1] / "deploy"
FILES = ("kubernetes/plane.yaml", "kuberay/raycluster.yaml", "kuberay/raycluster-e2b.yaml")
LABEL = "pod-security.kubernetes.io/enforce"
READY_S = 120.0
PATHS = {
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}


class ApiServer:
    def __init__(self, url: str) -> None:
        self._url = url
        self._trust = ssl.create_default_context()
        self._trust.check_hostname, self._trust.verify_mode = False, ssl.CERT_NONE

    def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> dict:
        headers = {"Authorization": "Bearer admin", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, context=self._trust, timeout=30) as answer:
            return json.loads(answer.read() or b"{}")

    def apply(self, one: dict, namespace: str) -> dict:
        """As `kubectl apply --server-side --validate=strict` does."""
        path = f"{PATHS[one['kind']].format(namespace)}/{one['metadata']['name']}"
        path += "?fieldManager=rollyard&fieldValidation=Strict"
        return self.ask("PATCH", path, one, "application/apply-patch+yaml")


@contextmanager
def programs(folder: Path):
    """An API server and its database, on loopback."""
    etcd, peer, port = free_port(), free_port(), free_port()
    (folder / "tokens.csv").write_text('admin,admin,1,"system:masters"\n')
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
    commands = (
        ["etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync",
         "--listen-client-urls", f"http://127.0.0.1:{etcd}", "--advertise-client-urls", f"http://127.0.0.1:{etcd}",
         "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
         "--initial-cluster", f"default=http://127.0.0.1:{peer}"],
        ["kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1",
         "--advertise-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder}",
         f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC", "--endpoint-reconciler-type=none",
         "--service-cluster-ip-range=10.99.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
         f"--service-account-key-file={folder}/sa.key", f"--service-account-signing-key-file={folder}/sa.key",
         "--disable-admission-plugins=ServiceAccount"],
    )  # fmt: skip
    started: list[subprocess.Popen] = []
    try:
        for words in commands:
            with (folder / f"{words[0]}.log").open("w") as log:
                started.append(subprocess.Popen(list(map(str, words)), stdout=log, stderr=log))
        yield f"https://127.0.0.1:{port}"
    finally:
        for one in reversed(started):
            one.kill()
            one.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if missing := [name for name in ("kube-apiserver", "etcd", "openssl") if shutil.which(name) is None]:
        pytest.skip(f"not on the PATH: {', '.join(missing)}")
    with programs(tmp_path_factory.mktemp("kube")) as url:
        found, until = ApiServer(url), time.monotonic() + READY_S
        while True:
            try:
                for name in ("manifests", "restricted"):
                    level = {LABEL: "restricted"} if name == "restricted" else {}
                    found.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": level}})
                break
            except OSError:
                assert time.monotonic() < until, "the API server did not come up"
                time.sleep(0.5)
        yield found


def read(file: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def pods(file: str) -> list[dict]:
    """One for each template of pods."""
    found = {}
    for one in read(file):
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        if one["kind"] == "Deployment":
            found[name] = spec["template"]
        if one["kind"] == "RayCluster":
            groups = [("head", spec["headGroupSpec"]), *((g["groupName"], g) for g in spec["workerGroupSpecs"])]
            found |= {f"{name}-{part}": group["template"] for part, group in groups}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        for name, template in found.items()
    ]


def missing_fields(said, kept, at: str = "") -> list[str]:
    """What was said and is not in what the server keeps. It adds fields, and writes quantities its own way."""
    if isinstance(said, dict):
        if not isinstance(kept, dict):
            return [at]
        return [
            gone
            for key, value in said.items()
            if key != "stringData"  # kept as `data`
            for gone in (missing_fields(value, kept[key], f"{at}.{key}") if key in kept else [f"{at}.{key}"])
        ]
    if isinstance(said, list):
        if not isinstance(kept, list) or len(said) != len(kept):
            return [at]
        return [gone for n, value in enumerate(said) for gone in missing_fields(value, kept[n], f"{at}[{n}]")]
    return [] if str(said) == str(kept) else [f"{at}: {said!r} became {kept!r}"]


@pytest.mark.parametrize("file", FILES)
def test_the_server_keeps_every_field_of_a_manifest(server, file):
    objects = [one for one in read(file) if one["kind"] != "RayCluster"]  # a kind that its operator adds to a server
    assert objects
    for one in objects:
        assert missing_fields(one, server.apply(one, "manifests")) == []


@pytest.mark.parametrize("file", FILES)
def test_pods_are_let_into_a_namespace_of_the_strictest_level(server, file):
    found = pods(file)
    assert found
    for pod in found:
        assert missing_fields(pod, server.apply(pod, "restricted")) == []


def test_the_server_refuses_a_field_that_it_does_not_know_and_a_pod_that_is_not_strict_enough(server):
    (pod,) = pods("kubernetes/plane.yaml")
    for path, value, said in (
        (("securityContext", "runAsNonRot"), True, "field not declared in schema"),
        (("securityContext", "runAsNonRoot"), False, "violates PodSecurity"),
    ):
        changed = json.loads(json.dumps(pod))
        changed["metadata"]["name"] = "changed"
        changed["spec"][path[0]][path[1]] = value
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.apply(changed, "restricted")
        assert said in refused.value.read().decode()
