"""A run asks Ray's own autoscaler for the nodes that it needs, and gives them back; nodes are real, of Ray's fake provider."""

from __future__ import annotations

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from rollyard.runs.run.ray_executor import MARK, choose_nodes
from tests.runs import executor_law as law

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("ray")]
ray = pytest.importorskip("ray", reason="the package ray is not installed (pip install 'rollyard[ray]')")


@pytest.mark.slow
async def test_a_run_gets_the_nodes_it_asks_for_and_gives_them_back(tmp_path):
    from tests.servers.postgres import PostgresServer
    from tests.servers.ray_cluster import RayCluster

    (tmp_path / "script.yaml").write_text("steps:\n  - shell: sleep 4; echo hello > out.txt\n  - text: done\n")
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"}, parallel=4)
    server = PostgresServer(durable=False)
    try:
        with RayCluster(1, grown={MARK: 1}) as cluster:
            found = cluster.connect()
            assert choose_nodes(found.nodes(), marked=True) == []
            on_ray = executor("ray", address=cluster.address, nodes=2)
            async with ry.Store.open(server.url) as store:
                async with ry.Run(
                    law.tasks(16), agent="shell-agent", config=config, store=store, executor=on_ray
                ) as run:
                    seen: list[tuple[float | None, int]] = []
                    with anyio.fail_after(240):
                        async for rollout in run:
                            seen.append((rollout.reward, len(choose_nodes(found.nodes(), marked=True))))
            assert [reward for reward, _ in seen] == [1.0] * 16
            assert max(nodes for _, nodes in seen) == 2
            with anyio.fail_after(120):
                while choose_nodes(found.nodes(), marked=True):
                    await anyio.sleep(0.5)
    finally:
        server.close()


def test_fewer_than_one_node_is_refused():
    with pytest.raises(ConfigError, match="nodes must be at least 1"):
        executor("ray", nodes=0)
