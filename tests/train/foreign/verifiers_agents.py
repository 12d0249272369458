"""Runs in an environment with verifiers: a real agent on a folder of Harbor tasks, by its environment (`environment`) or by its
command (`command`). The model server is a gate whose policy is a script: it speaks every agent's dialect. Words: the part, the
agent, a folder of tasks, a script, a folder for what is written."""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

import rollyard as ry
from rollyard.train.verifiers import load_environment


async def environment(agent, tasks, url, key, out):
    env = load_environment(tasks, agent=agent, sandbox="local", rewards={"calls": (count, 0.5)})
    assert isinstance(env, vf.Env) and len(env.dataset) == 1
    client = AsyncOpenAI(base_url=url, api_key=key)
    episodes = await env.evaluate(client, "scripted", rollouts_per_example=2, max_concurrent=2)
    return [trace for episode in episodes for trace in episode.traces], 1.5


def count(trace):
    return float(len(trace.calls) >= 4)


async def command(agent, tasks, url, key, out):
    words = ["rollyard-verifiers", "--env.taskset.source", tasks, "--env.agent.harness.id", "rollyard-verifiers"]
    words += ["--env.agent.harness.agent", agent, "-n", "1", "-r", "2", "-m", "scripted", "--no-push", "-o", out]
    words += ["--client.base-url", url, "--client.api-key-var", "MODEL_KEY"]
    program = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("vf-eval")), *words, env={**os.environ, "MODEL_KEY": key}
    )
    assert await program.wait() == 0
    (file,) = Path(out).rglob("traces.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(episode["ok"] for episode in episodes)
    return [vf.WireTrace.model_validate(trace) for episode in episodes for trace in episode["traces"]], 1.0


async def main(part, agent, tasks, script, out):
    async with ry.Gate(ry.policy.scripted(script), host="127.0.0.1") as gate:
        session = await gate.open_session("model")
        traces, reward = await globals()[part](agent, tasks, f"{gate.url}/v1", session.key, out)
    assert len(traces) == 2
    for trace in traces:
        told = trace.info["rollyard"]
        assert (told["agent"], told["status"], told["reward"]) == (agent, "completed", 1.0), told
        assert trace.errors == [] and trace.reward == reward, (trace.errors, trace.reward)
        assert len(trace.calls) >= 4 and len(trace.nodes) >= 8, (len(trace.calls), len(trace.nodes))
    print("\nok")


asyncio.run(main(*sys.argv[1:]))
