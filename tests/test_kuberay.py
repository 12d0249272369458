"""The manifests of a Ray cluster on Kubernetes hang together: names that refer to each other, and a disk for sandboxes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import yaml

from rollyard.runs.run.ray_executor import MARK, choose_nodes

FOLDER = Path(__file__).parents[1] / "deploy" / "kuberay"
FOUND = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "raycluster.yaml").read_text())}
CLUSTER = FOUND["RayCluster"]


def containers():
    spec = CLUSTER["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_secrets_that_pods_read_are_there_with_their_keys():
    asked = [entry["valueFrom"]["secretKeyRef"] for one in containers() for entry in one["env"] if "valueFrom" in entry]
    assert asked
    for reference in asked:
        assert reference["name"] == FOUND["Secret"]["metadata"]["name"]
        assert reference["key"] in FOUND["Secret"]["stringData"]


def test_all_pods_run_the_image_that_the_dockerfile_names():
    assert {f"{one['image'].partition(':')[0]} -f" for one in containers()} == {"rollyard-ray -f"}
    assert "docker build -t rollyard-ray -f deploy/kuberay/Dockerfile" in (FOLDER / "Dockerfile").read_text()


def test_sandboxes_are_on_a_volume_and_not_on_the_containers_overlay():
    for group in CLUSTER["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        home = next(entry["value"] for entry in container["env"] if entry["name"] == "ROLLYARD_HOME")
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == home]
        assert "emptyDir" in next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])


def test_rollouts_run_on_workers_alone_which_have_no_privileges():
    assert "resources" not in CLUSTER["spec"]["headGroupSpec"]["rayStartParams"]
    for group in CLUSTER["spec"]["workerGroupSpecs"]:
        marks = json.loads(shlex.split(group["rayStartParams"]["resources"])[0])
        assert MARK in marks
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_only_the_cluster_itself_reaches_its_ports():
    policy = FOUND["NetworkPolicy"]["spec"]
    own = {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == own
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]


def test_workers_go_to_the_nodes_that_are_marked_or_to_all():
    alive = {"Alive": True, "Resources": {"CPU": 8.0}}
    marked = {"Alive": True, "Resources": {MARK: 1.0}}
    nodes = [{"NodeID": "head", **alive}, {"NodeID": "a", **marked}, {"NodeID": "b", **marked, "Alive": False}]
    assert choose_nodes(nodes) == ["a"]
    assert choose_nodes([{"NodeID": "y", **alive}, {"NodeID": "x", **alive}]) == ["x", "y"]
