"""W: the agent does its work, says how it went, and leaves nothing running."""

from __future__ import annotations

from rollyard.core.limits import Limits
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.rollout.prepare import HOME
from rollyard.testing.agent.fixture import DONE, LIMITS, WRITE, AgentFixture
from rollyard.testing.suite import Skip, case, check


@case("W1", "solves a task in two turns through the gate", needs=("model",), timeout=1800)
async def two_turns(fixture: AgentFixture) -> None:
    seen = await fixture.run()
    seen.check_solved()
    # None: it lingered after its last word
    check(seen.rollout.exit_code in (0, None), f"exit code {seen.rollout.exit_code}")
    check(len(seen.rollout.captured.branches) == 1, f"{len(seen.rollout.captured.branches)} branches, not one")
    check(all(turn.completion_ids for turn in seen.rollout.turns), "a turn has no sampled ids")


@case("W2", "speaks every dialect that it declares", needs=("model",), timeout=600)
async def dialects(fixture: AgentFixture) -> None:
    for dialect in list(fixture.agent.wires)[1:]:
        seen = await fixture.run(dialect=dialect)
        seen.check_solved()
        check({call.dialect for call in seen.calls} == {dialect}, f"it was told to speak {dialect}")


@case("W3", "prints events that say what it did and how it ended", needs=("model", "says_done"), timeout=300)
async def events(fixture: AgentFixture) -> None:
    seen = await fixture.run()
    kinds = [event.kind for event in seen.rollout.events]
    check("done" in kinds, f"no event says that it is done: {kinds}")
    check([e.ok for e in seen.rollout.events if e.kind == "done"][-1] is True, "its last `done` is not ok")


@case("W4", "ends as a failure, in time, when the model fails for good", needs=("model", "shell"), timeout=300)
async def failing_model(fixture: AgentFixture) -> None:
    seen = await fixture.run([{"error": 400, "times": 50}, DONE])
    check(seen.rollout.failure is not None, f"it ended as {seen.rollout.status} and reward {seen.rollout.reward}")
    check(seen.rollout.reward is None, f"a failed model gave the reward {seen.rollout.reward}")


@case("W5", "is found parked when it waits for nothing", needs=("model", "shell"), timeout=300)
async def parks(fixture: AgentFixture) -> None:
    limits = Limits(install=LIMITS.install, agent=90, idle=5)
    seen = await fixture.run(fixture.script({"shell": "tail -f /dev/null"}, DONE), limits=limits)
    failure = seen.rollout.failure
    if failure is None and len(seen.calls) > 1:
        raise Skip("its own shell gave up waiting first, or it is busy while it waits")
    check(failure is not None and failure.cause == "AgentParked", f"it ended as {failure}")


@case("W6", "is gone with its whole tree before it is judged", needs=("model", "shell"), timeout=300)
async def tree_gone(fixture: AgentFixture) -> None:
    left: list[str] = []

    async def look(sandbox: Sandbox, rollout: Rollout) -> None:
        script = "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p 2>/dev/null; echo; done"
        done = await sandbox.exec(script, timeout=20)
        left.extend(line for line in done.stdout.decode("utf-8", "replace").splitlines() if "stays-behind" in line)
        own = fixture.agent.argv[0].rpartition("/")[2] if fixture.agent.argv else "\0"
        left.extend(line for line in done.stdout.decode("utf-8", "replace").splitlines() if f"/bin/{own}" in line)

    daemon = {"shell": "(setsid sh -c 'sleep 300; : stays-behind' >/dev/null 2>&1 &) ; echo started"}
    seen = await fixture.run(fixture.script(daemon, WRITE, DONE), hooks=Hooks(teardown=(look,)))
    seen.check_solved()
    check(not left, f"still running: {left}")


@case("W7", "leaves its session's record behind as artifacts", needs=("model", "artifacts"), timeout=300)
async def artifacts(fixture: AgentFixture) -> None:
    seen = await fixture.run()
    kept = [path for path in seen.rollout.files if path.startswith(HOME)]
    check(kept, f"none of {fixture.agent.artifacts} matched a file")
