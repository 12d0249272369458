"""The manifests of a Ray cluster on Kubernetes hang together: names that refer to each other, and a disk for sandboxes."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rollyard.runs.run.ray_executor import MARK, choose_nodes

FOLDER = Path(__file__).parents[1] / "deploy" / "kuberay"
FILES = ("raycluster.yaml", "raycluster-e2b.yaml")


@pytest.fixture(params=FILES)
def manifest(request):
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / request.param).read_text())}


def containers(manifest):
    spec = manifest["RayCluster"]["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def workers(manifest):
    return [group["template"]["spec"] for group in manifest["RayCluster"]["spec"]["workerGroupSpecs"]]


def test_there_are_no_other_manifests():
    assert sorted(path.name for path in FOLDER.glob("*.yaml")) == sorted(FILES)


def test_secrets_that_pods_read_are_there_with_their_keys(manifest):
    asked = [
        entry["valueFrom"]["secretKeyRef"]
        for one in containers(manifest)
        for entry in one["env"]
        if "valueFrom" in entry
    ]
    assert asked
    for reference in asked:
        assert reference["name"] == manifest["Secret"]["metadata"]["name"]
        assert reference["key"] in manifest["Secret"]["stringData"]


def test_all_pods_run_the_image_that_the_dockerfile_names(manifest):
    assert {f"{one['image'].partition(':')[0]} -f" for one in containers(manifest)} == {"rollyard-ray -f"}
    assert "docker build -t rollyard-ray -f deploy/kuberay/Dockerfile" in (FOLDER / "Dockerfile").read_text()


def test_the_image_has_the_part_of_ray_that_answers_the_operators_health_probes():
    """With plain `ray` nothing listens on port 52365: no pod would become ready, and all would restart after ten minutes."""
    assert "'ray[default]'" in (FOLDER / "Dockerfile").read_text()


def test_what_workers_keep_is_on_a_volume_and_not_on_the_containers_overlay(manifest):
    for pod in workers(manifest):
        (container,) = pod["containers"]
        home = next(entry["value"] for entry in container["env"] if entry["name"] == "ROLLYARD_HOME")
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == home]
        assert "emptyDir" in next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])


def test_rollouts_run_on_workers_alone_which_have_no_privileges(manifest):
    spec = manifest["RayCluster"]["spec"]
    assert "resources" not in spec["headGroupSpec"]["rayStartParams"]
    for group in spec["workerGroupSpecs"]:
        marks = json.loads(shlex.split(group["rayStartParams"]["resources"])[0])
        assert MARK in marks
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_only_the_cluster_itself_reaches_its_ports(manifest):
    policy = manifest["NetworkPolicy"]["spec"]
    own = {"ray.io/cluster": manifest["RayCluster"]["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == own
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]


def test_workers_with_hosted_sandboxes_have_the_variables_that_the_backend_reads_and_its_package():
    manifest = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "raycluster-e2b.yaml").read_text())}
    (pod,) = workers(manifest)
    named = {entry["name"] for entry in pod["containers"][0]["env"] if entry["name"].startswith("E2B_")}
    assert named == {"E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"}
    read = inspect.getsource(pytest.importorskip("e2b.connection_config", reason="the package e2b is not installed"))
    assert named <= set(re.findall(r"E2B_[A-Z_]+", read))
    assert "e2b" in re.findall(r"/src\[([a-z0-9,]+)\]", (FOLDER / "Dockerfile").read_text())[0].split(",")


def test_workers_go_to_the_nodes_that_are_marked_or_to_all():
    alive = {"Alive": True, "Resources": {"CPU": 8.0}}
    marked = {"Alive": True, "Resources": {MARK: 1.0}}
    nodes = [{"NodeID": "head", **alive}, {"NodeID": "a", **marked}, {"NodeID": "b", **marked, "Alive": False}]
    assert choose_nodes(nodes) == ["a"]
    assert choose_nodes([{"NodeID": "y", **alive}, {"NodeID": "x", **alive}]) == ["x", "y"]
