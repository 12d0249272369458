"""`max_staleness`: a rollout whose answers fall too many policy versions behind ends, or those answers do not train."""

from __future__ import annotations

import json

import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.store import Store
from rollyard.store.exports.lines import sample_line
from rollyard.trajectory.samples import samples

pytestmark = pytest.mark.anyio
THREE_TURNS = {"steps": [{"shell": "true"}, {"shell": "touch made"}, {"text": "done"}]}
PARKED = {"steps": [{"shell": "sleep 900"}, {"text": "done"}]}


class LearningPolicy:
    """Answers by a script; each answer is of the version that its turn gives, and `version` is the newest there is."""

    def __init__(self, script, versions):
        self._script, self._versions = ry.policy.scripted(script), list(versions)
        self.version = None

    async def __call__(self, call):
        reply = await self._script(call)
        sampled, self.version = self._versions.pop(0)
        return msgspec.structs.replace(reply, version_start=sampled, version_end=sampled)

    async def closed(self, rollout_id):
        await self._script.closed(rollout_id)

    async def aclose(self):
        await self._script.aclose()


async def run(backend, script, versions, **options):
    policy = LearningPolicy(script, versions)
    return await ry.run_rollout(
        "x", agent="shell-agent", policy=policy, sandbox=backend, verify=["test -f made"], **options
    )


async def test_a_rollout_that_is_too_old_is_ended_and_not_run_again(backend):
    """The agent waits for a command of 15 minutes when newer weights come."""
    done = await run(backend, PARKED, [(1, 4)], max_staleness=2)
    assert (done.status, done.reward, done.failure.cause) == ("cancelled", None, "RolloutStale")
    assert (done.failure.boundary, done.failure.retry, done.failure.trainable) == ("policy", False, False)
    assert "version 1 are too old: the newest is 4, and max_staleness is 2" in done.error
    assert samples(done).rows == ()


async def test_a_rollout_that_is_too_old_when_its_agent_ends_is_not_judged(backend):
    done = await run(backend, THREE_TURNS, [(1, 1), (1, 1), (1, 4)], max_staleness=2)
    assert (done.status, done.reward) == ("cancelled", None)


async def test_masked_answers_are_context_in_the_rows_and_exports_name_them(backend, tmp_path):
    done = await run(backend, THREE_TURNS, [(1, 1), (2, 3), (4, 4)], max_staleness=2, when_stale="mask")
    assert (done.status, done.reward, done.failure, done.stale_before) == ("completed", 1.0, None, 2)
    async with Store.open(tmp_path / "runs.db") as store:
        await store.commit_rollout(done)
        kept = await store.get_rollout(done.id)
    assert kept.stale_before == 2
    first, *later = (record.id for record in done.trajectory.records)
    (row,) = samples(done).rows
    spans = {span.call_id: range(span.start, span.end) for span in row.spans if span.sampled}
    assert row.stale_call_ids == (first,)
    for at in spans[first]:
        assert (row.mask[at], row.logprobs[at], row.versions[at]) == (0, 0.0, -1)
    assert all(row.mask[at] for call in later for at in spans[call])
    assert json.loads(json.dumps(sample_line(row)))["stale_call_ids"] == [first]
    whole = msgspec.structs.replace(done, stale_before=None)
    assert samples(whole).rows[0].trained > row.trained > 0


async def test_where_every_answer_is_too_old_there_is_no_row_and_the_reason(backend):
    done = await run(backend, THREE_TURNS, [(1, 1), (1, 1), (1, 9)], max_staleness=2, when_stale="mask")
    made = samples(done)
    assert done.reward == 1.0 and made.rows == ()
    assert made.refused[0].reasons == ("3 answers are of policy versions before 7",)


async def test_within_the_limit_nothing_changes(backend):
    done = await run(backend, THREE_TURNS, [(1, 1), (2, 2), (3, 3)], max_staleness=2)
    (row,) = samples(done).rows
    assert (done.status, done.reward, row.stale_call_ids) == ("completed", 1.0, ())


async def test_the_newest_version_is_also_what_other_rollouts_were_answered_with_and_what_the_trainer_says():
    """At a gate that several rollouts share."""
    policy = LearningPolicy(THREE_TURNS, [(1, None), (5, None)])
    async with ry.Gate(policy, host="127.0.0.1") as gate:
        old, new = await gate.open_session("old"), await gate.open_session("new")
        for session in (old, new):
            await ask(gate, session)
        assert (old.staleness, new.staleness) == (4, 0)
        gate.calls.policy_version = 8
        assert (old.staleness, new.staleness) == (7, 3)


async def ask(gate, session):
    import openai

    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])


def test_what_cannot_hold_is_refused_by_name():
    with pytest.raises(Unsupported, match="max_staleness"):
        choose(RolloutOptions(max_staleness=1, mode="black_box", base_url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="without max_staleness"):
        RolloutOptions(when_stale="mask")
    with pytest.raises(ConfigError, match="max_staleness"):
        RolloutOptions(max_staleness=-1)
