"""Between two steps of one rollout the old key is dead, and the next step gets a fresh one on the same trajectory."""

from __future__ import annotations

import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.gate.conftest import open_gate

pytestmark = pytest.mark.anyio


async def ask(gate, key):
    async with AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=key, max_retries=0) as client:
        return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


async def test_a_locked_session_answers_nobody_and_goes_on_under_a_new_key(log):
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1")
        first = session.key
        await ask(gate, first)
        await session.lock()
        with pytest.raises(APIStatusError) as refused:
            await ask(gate, first)
        assert refused.value.status_code == 409
        second = await session.unlock()
        await ask(gate, second)
        with pytest.raises(APIStatusError):
            await ask(gate, first)
        assert session.calls == len(session.trajectory.records) == 2
        assert log.kept["r1"].key_hash == session.key_hash
