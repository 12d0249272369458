"""Real Ray nodes with GPUs and without: what needs some goes to those that have them. A GPU is a device node that only looks like
one, in a `/dev` of the Ray node's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.sandbox import Resources
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("ray"), pytest.mark.slow]
pytest.importorskip("ray", reason="the package ray is not installed (pip install 'rollyard[ray]')")

WITH_GPU = """
set -e
mount --make-rprivate /
mount -t tmpfs none "$0"
for name in null zero full random urandom tty fuse; do
  if [ -e /dev/$name ]; then touch "$0/$name"; mount --bind /dev/$name "$0/$name"; fi
done
for name in pts shm net; do
  if [ -e /dev/$name ]; then mkdir "$0/$name"; mount --rbind /dev/$name "$0/$name"; fi
done
ln -s pts/ptmx "$0/ptmx"
ln -s /proc/self/fd "$0/fd"
mknod -m 666 "$0/nvidia0" c 1 5
mount --move "$0" /dev
exec "$@"
"""
SCRIPT = "steps:\n  - shell: ls /dev | grep -c nvidia > gpus.txt; true\n  - text: done\n"


def has_a_dev_of_its_own(place: Path) -> bool:
    place.mkdir()
    tried = subprocess.run(
        ["unshare", "--mount", "sh", "-c", WITH_GPU, place, "true"], capture_output=True, check=False
    )
    return os.geteuid() == 0 and tried.returncode == 0


def tasks(count: int, gpus: int) -> list[Task]:
    verifier = VerifierSpec(kind="commands", options={"commands": [f"grep -x {gpus} gpus.txt"]})
    needs = Resources(gpus=gpus or None)
    return [Task(id=f"gpus{gpus}-{n}", instruction="x", resources=needs, verifier=verifier) for n in range(count)]


@pytest.fixture
def cluster(tmp_path):
    """The first node has no GPU and the second has one."""
    from tests.servers.ray_cluster import RayCluster

    if not has_a_dev_of_its_own(tmp_path / "dev"):
        pytest.skip("a mount namespace with device nodes cannot be made here (root with CAP_SYS_ADMIN and CAP_MKNOD)")
    with RayCluster(nodes=1, env={"ROLLYARD_HOME": str(tmp_path / "node{n}")}) as made:
        inside = ["unshare", "--mount", "sh", "-c", WITH_GPU, str(tmp_path / "dev")]
        made.add(inside=inside, options=["--num-gpus=1"])
        made.wait(2)
        yield made


async def test_what_needs_a_gpu_goes_to_the_node_that_has_one_and_more_than_it_has_is_refused(
    tmp_path, cluster, postgres_url
):
    (tmp_path / "script.yaml").write_text(SCRIPT)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})
    async with ry.Store.open(postgres_url) as store:
        options = {"config": config, "store": store, "executor": executor("ray", address=cluster.address)}
        with anyio.fail_after(250):
            async with ry.Run([*tasks(4, 0), *tasks(4, 1)], agent="shell-agent", parallel=2, **options) as run:
                done = [rollout async for rollout in run]
        assert [(rollout.reward, rollout.failure) for rollout in done] == [(1.0, None)] * 8
        with pytest.raises(ConfigError, match="needs 2 GPUs, and no node for rollouts has more than 1"):
            async with ry.Run(tasks(1, 2), agent="shell-agent", **options):
                pass


async def test_a_node_that_cannot_show_its_gpus_to_sandboxes_says_so(tmp_path, postgres_url):
    from tests.servers.ray_cluster import RayCluster

    (tmp_path / "script.yaml").write_text(SCRIPT)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})
    with RayCluster(nodes=0, env={"ROLLYARD_HOME": str(tmp_path / "node{n}")}) as cluster:
        cluster.add(options=["--num-gpus=1"])
        cluster.wait(1)
        async with ry.Store.open(postgres_url) as store:
            options = {"config": config, "store": store, "executor": executor("ray", address=cluster.address)}
            with anyio.fail_after(250), pytest.raises(ConfigError, match="said to have 1 GPUs, and sandboxes on it"):
                async with ry.Run(tasks(1, 1), agent="shell-agent", **options) as run:
                    assert [rollout async for rollout in run] == []
