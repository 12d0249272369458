"""An environment table of `task.toml` as a `Site`: image or Dockerfile, resources, network, healthcheck, MCP servers."""

from __future__ import annotations

from pathlib import Path

from rollyard.core.sandbox import Resources
from rollyard.core.task import Healthcheck, McpServer, Site
from rollyard.tasks.harbor import schema
from rollyard.tasks.harbor.compose import fold
from rollyard.tasks.harbor.taskfile import TaskFolder

COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def read_site(load: TaskFolder, table: schema.EnvironmentTable, directory: Path) -> Site:
    network, hosts = load.network(table)
    compose = next((directory / name for name in COMPOSE if (directory / name).is_file()), None)
    found = Site(
        image=load.extra.image or table.docker_image or "host",
        build=str(directory) if (directory / "Dockerfile").is_file() and load.extra.image is None else None,
        compose=str(compose) if compose is not None else None,
        layers=tuple(load.extra.layers),
        env=table.env,
        workdir=table.workdir,
        resources=Resources(
            cpus=table.cpus,
            memory_mb=schema.megabytes(table.memory) if table.memory else table.memory_mb,
            disk_mb=schema.megabytes(table.storage) if table.storage else table.storage_mb,
            pids=load.extra.pids,
            gpus=table.gpus,
            gpu_types=tuple(table.gpu_types or ()),
            tpu=f"{table.tpu.type}:{table.tpu.topology.strip()}" if table.tpu is not None else None,
        ),
        network=network,
        allowed_hosts=hosts,
        healthcheck=healthcheck(table.healthcheck),
        mcp=tuple(_mcp(server) for server in table.mcp_servers),
        skills=table.skills_dir,
        os="windows" if table.os.lower() == "windows" else "linux",
        build_timeout_s=table.build_timeout_sec,
    )
    return fold(found)


def healthcheck(table: schema.HealthcheckTable | None) -> Healthcheck | None:
    if table is None:
        return None
    return Healthcheck(
        command=table.command,
        interval_s=table.interval_sec,
        timeout_s=table.timeout_sec,
        start_period_s=table.start_period_sec,
        start_interval_s=table.start_interval_sec,
        retries=table.retries,
    )


def _mcp(table: schema.McpTable) -> McpServer:
    return McpServer(
        name=table.name,
        transport="stdio" if table.transport == "stdio" else "sse" if table.transport == "sse" else "http",
        url=table.url,
        command=(table.command, *table.args) if table.command else (),
        headers=table.headers,
    )
