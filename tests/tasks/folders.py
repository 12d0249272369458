"""Task folders made on disk for tests."""

from pathlib import Path

FULL_TOML = """
schema_version = "1.4"
source = "registry/full"
artifacts = ["/app/out.txt", { source = "/app/build", destination = "built", exclude = ["*.o"] }]

[task]
name = "acme/full"
version = "2.0"
description = "every field"
authors = [{ name = "A. Author", email = "a@example.com" }, { name = "B" }]
keywords = ["one", "two"]

[metadata]
difficulty = "easy"
expert_time_estimate_min = 5.5
tags = ["x"]

[metadata.nested]
deep = true

[metadata.rollyard]
setup = ["echo ready"]
layers = ["pytest"]
limits = { boot = 20.0 }

[agent]
timeout_sec = 120.0
user = "agent"
network_mode = "no-network"

[verifier]
timeout_sec = 90.0
user = 0
env = { JUDGE_KEY = "${JUDGE_KEY}", MODE = "${MODE:-strict}" }
environment_mode = "separate"
network_mode = "allowlist"
allowed_hosts = ["Example.com.", "*.example.org", "192.0.2.0/24", "2001:DB8::1"]

[[verifier.collect]]
command = "pg_dump > /app/dump.sql"
timeout_sec = 12.0
user = "postgres"

[[verifier.collect]]
command = "redis-cli save"
service = "cache"

[verifier.environment]
docker_image = "acme/grader:1"
cpus = 1
memory_mb = 512
network_mode = "no-network"
workdir = "/grade"

[environment]
build_timeout_sec = 30.0
docker_image = "acme/full:1"
os = "Linux"
cpus = 1.5
memory_mb = 2048
storage_mb = 10240
gpus = 2
gpu_types = ["H100", "A100"]
skills_dir = "/skills"
workdir = "/app"
network_mode = "allowlist"
allowed_hosts = ["pypi.org"]
env = { PLAIN = "1", HOST_VALUE = "${HOST_VALUE:-none}" }

[environment.tpu]
type = "v6e"
topology = "2x4"

[environment.healthcheck]
command = "curl -f localhost"
interval_sec = 1.0
timeout_sec = 2.0
start_period_sec = 3.0
start_interval_sec = 0.5
retries = 4

[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "python3"
args = ["-m", "server"]

[[environment.mcp_servers]]
name = "web"
transport = "http"
url = "http://localhost:9000/mcp"
headers = { Authorization = "Bearer ${WEB_TOKEN}", X-Team = "a" }

[[environment.mcp_servers]]
name = "events"
url = "http://localhost:9001/sse"

[solution]
env = { ANSWER = "${ANSWER:-42}" }
"""

STEPS_TOML = """
schema_version = "1.3"
multi_step_reward_strategy = "final"

[environment]
docker_image = "host"

[agent]
timeout_sec = 50.0
user = "dev"

[verifier]
timeout_sec = 40.0
env = { A = "task", B = "task" }

[[steps]]
name = "first"
min_reward = 0.5

[[steps]]
name = "second"
min_reward = { correctness = 0.8, style = 0.1 }
artifacts = ["/app/second.txt"]

[steps.agent]
timeout_sec = 70.0
user = "root"

[steps.verifier]
timeout_sec = 10.0
env = { B = "step" }
environment_mode = "separate"

[steps.healthcheck]
command = "true"
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)
    return root


def simple(root: Path, toml: str = 'schema_version = "1.4"\n', **files: str) -> Path:
    """A task on `host` with a test that wants /app/done."""
    return write(
        root,
        {
            "task.toml": toml,
            "instruction.md": "Make the file `done`.\n",
            "tests/test.sh": "#!/bin/sh\ntest -e done\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "#!/bin/sh\ntouch done\n",
            **files,
        },
    )


def full(root: Path) -> Path:
    return write(
        root,
        {
            "task.toml": FULL_TOML,
            "instruction.md": "<!-- acme-canary GUID 1 -->\n# Canary: do not train\n\nDo all of it.\n# not a canary line\n",
            "trajectory.json": '{"schema_version": "ATIF-v1.8"}',
            "README.md": "# full\n",
            "environment/Dockerfile": "FROM acme/base\nWORKDIR /app\n",
            "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "#!/bin/bash\ntrue\n",
        },
    )


def steps(root: Path) -> Path:
    files = {"task.toml": STEPS_TOML, "tests/shared.py": "x = 1\n", "tests/test.sh": "#!/bin/sh\nexit 0\n"}
    for name in ("first", "second"):
        files[f"steps/{name}/instruction.md"] = f"Do the {name} thing.\n"
        files[f"steps/{name}/solution/solve.sh"] = "#!/bin/sh\ntrue\n"
    files["steps/second/tests/test.sh"] = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
    files["steps/second/workdir/setup.sh"] = "echo set up\n"
    files["steps/second/trajectory.json"] = "{}"
    return write(root, files)
