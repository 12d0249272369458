"""The page at size: `python -m bench.page [--rollouts 10000] [--calls 2000]`.

Fills a real store with one run of many rollouts (tasks x attempts x two agents x two policies, some failed, some unscored),
smaller runs beside it, and a rollout with a trajectory of very many calls; serves the page from a process of its own and asks
for every page, a few times each. Wall time as a client sees it, and the server's own CPU time, which does not grow with what else
the machine does; the first request apart. The budget is 1 s a page: without company, wall time is CPU time and a little more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median

from bench.figures import note
from rollyard.core.call import Call, Reply, Usage, floats, ids
from rollyard.core.events import Event
from rollyard.core.lease import Attempt
from rollyard.core.message import Message, Text, ToolCall, ToolResult
from rollyard.core.rollout import Failure, Rollout, StageRecord, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.trajectory.trajectory import Trajectory

BUDGET_S = 1.0
AGENTS, POLICIES, ATTEMPTS = ("pi", "codex"), ("small", "large"), 5
STAGES = ("provision", "prepare", "launch", "wait", "stop", "collect", "verify")
PRICES = {"small": {"prompt": 0.1, "completion": 0.4}, "large": {"prompt": 2.0, "completion": 8.0}}
LOST = Failure(
    boundary="sandbox", cause="SandboxGone", message="gone", stage="wait", retry=True, grade=False, trainable=False
)


def rollouts(run_id: str, count: int, seed: int = 0) -> Iterator[Rollout]:
    """Lines with the spread of a real run; each body is a few kB, as a real one is."""
    random = Random(seed)
    cells = len(AGENTS) * len(POLICIES) * ATTEMPTS
    for number in range(count):
        task, rest = divmod(number, cells)
        agent, rest = AGENTS[rest // (len(POLICIES) * ATTEMPTS)], rest % (len(POLICIES) * ATTEMPTS)
        policy, attempt = POLICIES[rest // ATTEMPTS], rest % ATTEMPTS
        failed = random.random() < 0.03
        at = 1_800_000_000 + number * 2.0
        spans = [random.uniform(0.05, 2.0) for _ in STAGES]
        starts = [at + sum(spans[:n]) for n in range(len(STAGES))]
        yield Rollout(
            id=f"ro_{run_id}_{number:06}",
            task=Task(id=f"group/task-{task:04}", instruction="Make the failing test pass. " * 10),
            attempt=attempt,
            run_id=run_id,
            group_id=f"{run_id}/group/task-{task:04}/{agent}/{policy}",
            agent=agent,
            sandbox="local",
            isolation="namespace",
            labels={"policy": policy},
            status="infra_error" if failed else "completed",
            failure=LOST if failed else None,
            verdict=None if failed else Verdict(reward=float(random.random() < 0.3 + 0.3 * (policy == "large"))),
            stages=tuple(
                StageRecord(name=name, started_at=start, duration_s=took)
                for name, start, took in zip(STAGES, starts, spans, strict=True)
            ),
            log_tail="the agent's last words " * 150,
            calls=random.randrange(3, 40),
            usage={"prompt_tokens": random.randrange(10_000, 200_000), "completion_tokens": random.randrange(9000)},
            started_at=at,
            wall_s=sum(spans),
        )


async def long_trajectory(store: Store, rollout_id: str, calls: int) -> None:
    """An agent that went on and on: each turn a command and its output, ids and logprobs on all of them."""
    trajectory = Trajectory(rollout_id)
    messages = [Message("system", (Text("You are an agent. " * 200),)), Message("user", (Text("go on"),))]
    prompt = ids(range(1500))
    for turn in range(calls):
        at = 1_800_000_000 + turn * 1.5
        answer = Message(
            "assistant",
            (Text(f"step {turn}"), ToolCall(f"c{turn}", "bash", json.dumps({"command": f"make step-{turn}"}))),
        )
        call = Call(
            id=f"call_{turn:05}", rollout_id=rollout_id, dialect="chat", model="m", messages=tuple(messages),
            raw=b'{"turn": %d}' % turn, received_at=at,
        )  # fmt: skip
        sampled = ids(range(40))
        reply = Reply(
            message=answer, finish="tool_calls", prompt_ids=prompt, completion_ids=sampled, capture="tokens",
            logprobs=floats([-0.3 * (n % 7) for n in range(40)]), version_start=turn // 100,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=40), finished_at=at + 1.0,
        )  # fmt: skip
        added = trajectory.add(call, reply)
        await store.commit(added.record, added.nodes, added.blobs)
        result = Message("tool", (ToolResult(f"c{turn}", (Text(f"output of step {turn}\n" * 12),)),))
        messages += [answer, result]
        prompt = prompt + sampled + ids(range(60))
    await store.event(
        *(Event(at=1_800_000_000 + n, name="agent.tool", rollout_id=rollout_id, fields={"n": n}) for n in range(calls))
    )


async def fill(store: Store, count: int, calls: int) -> tuple[str, str]:
    """Gives the ids of the run and of the long rollout in it."""
    run_id = await store.create_run(
        {"tasks": "bench", "agents": list(AGENTS), "prices": PRICES, "policies": {n: "upstream:u" for n in POLICIES}},
        id="run_bench",
    )
    for small in range(60):
        other = await store.create_run({"tasks": f"other-{small}", "agents": ["pi"]}, id=f"run_other_{small:02}")
        for rollout in rollouts(other, 4, small):
            await store.commit_rollout(rollout)
    made = list(rollouts(run_id, count))
    await store.add_attempts(
        run_id,
        (
            Attempt(
                id=f"att_{n}", run_id=run_id, task_id=r.task.id, agent=r.agent, policy=r.labels["policy"],
                number=r.attempt, state="done",
            )
            for n, r in enumerate(made)
        ),
    )  # fmt: skip
    await long_trajectory(store, made[0].id, calls)
    waiting = iter(made)

    async def committer() -> None:
        for rollout in waiting:
            await store.commit_rollout(rollout)

    await asyncio.gather(*(committer() for _ in range(32)))
    return run_id, made[0].id


def paths(run_id: str, rollout_id: str, count: int, calls: int) -> dict[str, str]:
    half, late = count // 2, max(0, calls - 30)
    return {
        "runs": "/",
        "runs, searched and sorted": "/?q=other&sort=mean_reward",
        "run": f"/runs/{run_id}",
        "run, page in the middle": f"/runs/{run_id}?offset={half}",
        "run, sorted by reward": f"/runs/{run_id}?sort=reward&down=1",
        "run, filtered and searched": f"/runs/{run_id}?status=infra_error&q=task-00",
        "tasks": f"/runs/{run_id}/tasks",
        "task": f"/runs/{run_id}/tasks/group/task-0001",
        "rollout": f"/rollouts/{rollout_id}",
        "steps near the end": f"/rollouts/{rollout_id}/steps?from={2 * late}",
        "tokens": f"/rollouts/{rollout_id}/tokens",
        "tokens near the end": f"/rollouts/{rollout_id}/tokens?from={late * 100}",
        "raw call": f"/rollouts/{rollout_id}/raw/call_{late:05}",
        "compare": f"/compare?a={run_id}&b={run_id}",
        "live news": f"/live?run={run_id}",
    }


def ask(url: str) -> tuple[float, int]:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=120) as answer:
        size = len(answer.read())
    return time.perf_counter() - began, size


def cpu(pid: int) -> float:
    """Seconds of CPU a process has used, in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def measure(store: Path | str, urls: dict[str, str], repeat: int, what: str = "") -> bool:
    command = [sys.executable, "-m", "rollyard", "view", str(store), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"].rstrip("/")
            most = longest = 0.0
            print(f"{'page':28} {'first ms':>9} {'cpu ms':>7} {'again ms':>9} {'cpu ms':>7} {'kB':>6}")
            for name, path in urls.items():
                before = cpu(server.pid)
                first, size = ask(url + path)
                middle = cpu(server.pid)
                again = median(ask(url + path)[0] for _ in range(repeat))
                used, later = middle - before, (cpu(server.pid) - middle) / repeat
                slow = "  over" if used > BUDGET_S else ""
                times = f"{first * 1e3:9.0f} {used * 1e3:7.0f} {again * 1e3:9.0f} {later * 1e3:7.0f}"
                print(f"{name:28} {times} {size / 1e3:6.0f}{slow}")
                most, longest = max(most, used), max(longest, first)
            note(f"MB that the page's process held{what}", peak_mb(server.pid))
            note(f"s of wall time for the slowest first page{what}", longest, BUDGET_S)
            return note(f"s of CPU for the slowest first page{what}", most, BUDGET_S)
        finally:
            server.terminate()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--store", type=Path, help="fill this one, or use it when it is there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as folder:
        where = options.store or Path(folder) / "runs.db"
        if not where.exists():

            async def make() -> None:
                async with Store.open(where) as store:
                    await fill(store, options.rollouts, options.calls)

            began = time.perf_counter()
            asyncio.run(make())
            took, size = time.perf_counter() - began, where.stat().st_size / 1e6
            print(
                f"{options.rollouts} rollouts and a trajectory of {options.calls} calls: {size:.0f} MB in {took:.0f} s"
            )
        urls = paths("run_bench", "ro_run_bench_000000", options.rollouts, options.calls)
        return 0 if measure(where, urls, options.repeat) else 1


if __name__ == "__main__":
    sys.exit(main())
