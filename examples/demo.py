"""The whole thing, small: a real agent in a local sandbox solves a bundled task, every model call answered by a policy we own.

    make demo                                     pi against a scripted policy
    make demo AGENT=opencode                      another agent
    make demo BASE_URL=http://host/v1 MODEL=name  a model server of yours
    make demo DEMO=llm                            shell-agent against a real 135M model on llama.cpp, from PyPI

The scripted policy plays a fixed list of answers; the small model is real and will most likely fail the task. Both are judged by
the same verifier.
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import rollyard as ry
from rollyard.cli.main import INFRASTRUCTURE, OK, ROLLOUTS_FAILED
from rollyard.core.events import Event

HERE = Path(__file__).parent
TASK = HERE / "tasks" / "bug-fix"


async def show(event: Event) -> None:
    fields = event.fields
    if event.name == "stage.finished":
        print(f"  {fields['stage']:<10} {fields['duration_s']:8.3f} s" + ("  failed" if fields.get("error") else ""))
    elif event.name == "sandbox.opened":
        print(f"  sandbox {fields['sandbox_id']} on {fields['backend']}, isolation {fields['isolation']}")
    elif event.name == "agent.tool_call":
        print(f"      the agent runs {fields.get('tool')}: {str(fields.get('fields') or fields.get('text', ''))[:100]}")


async def policy_for(stack: AsyncExitStack) -> tuple[object, str, str]:
    """Who answers, which agent asks, and a word for people."""
    agent = os.environ.get("AGENT") or "pi"
    if url := os.environ.get("BASE_URL"):
        return ry.policy.upstream(url, os.environ.get("MODEL")), agent, f"the model server at {url}"
    if os.environ.get("DEMO") == "llm":
        from rollyard.testing import smollm

        url = await asyncio.to_thread(stack.enter_context, smollm.llama_server(context=4096, parallel=1))
        return ry.policy.upstream(f"{url}/v1"), os.environ.get("AGENT") or "shell-agent", "SmolLM2-135M on llama.cpp"
    return ry.policy.scripted(str(HERE / "scripts" / "bug-fix.yaml")), agent, "a scripted policy"


async def main() -> int:
    store_path = Path("runs.db").resolve()
    (task,) = ry.Taskset.load(TASK)
    async with AsyncExitStack() as stack:
        policy, agent, word = await policy_for(stack)
        stack.push_async_callback(policy.aclose)
        print(f"{agent} on the task {task.id!r}, answered by {word}\n")
        store = await stack.enter_async_context(ry.Store.open(store_path))
        done = await ry.run_rollout(
            task,
            agent=agent,
            policy=policy,
            store=store,
            sink=show,
            limits=ry.Limits(agent=240, install=900),
            max_calls=12,
        )
    print_outcome(done)
    print(f"kept in {store_path}; look closer with: rollyard show {done.id} --store {store_path}")
    if done.status == "infra_error":
        return INFRASTRUCTURE
    scripted = not os.environ.get("BASE_URL") and os.environ.get("DEMO") != "llm"
    return ROLLOUTS_FAILED if scripted and done.reward != 1.0 else OK


def print_outcome(done: ry.Rollout) -> None:
    print(f"\nstatus {done.status}, reward {done.reward}, agent exit code {done.exit_code}, {done.wall_s:.1f} s")
    for turn in done.turns:
        ids = len(turn.completion_ids or ())
        print(f"  call {turn.call_id}: {turn.kind}, {ids} sampled tokens, finish {turn.finish_reason}")
    if done.trajectory is not None:
        branches = done.trajectory.branches
        print(f"  {len(branches)} branch(es), {sum(b.trained for b in branches)} tokens to train on")
    if done.verdict is not None:
        print(f"verdict ({done.verdict.grade}): {dict(done.verdict.checks) or done.verdict.error}")
    if done.failure is not None:
        print(
            f"failed at {done.failure.boundary} ({done.failure.cause}, in {done.failure.stage}): {done.failure.message}"
        )
        print(done.log_tail[-1500:], end="")
        if done.failure.cause == "AgentInstallFailed":
            print("or try an agent that needs no installation: make demo AGENT=shell-agent")
    if done.sandbox_id is not None:
        print(f"\n{done.diff or 'no file was changed'}")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
