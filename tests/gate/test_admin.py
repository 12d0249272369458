"""The operator's API: sessions opened, shown, read and closed over HTTP, as OpenEnv's capture proxy does it."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from rollyard.core.errors import StoreError
from tests.gate.conftest import Answers, MemoryLog, ask, chat, open_gate, said

pytestmark = pytest.mark.anyio
KEY = "admin-" + "a" * 20
CHAT = "/v1/chat/completions"


async def admin(gate, method, path, body=b""):
    return await ask(gate, method, path, key=KEY, body=body)


async def test_a_session_is_opened_used_read_and_closed(log):
    policy = Answers(lambda call: said(f"answer {len(policy.asked)}", sampled=(1, 2), prompt=(7, 8, 9)))
    async with open_gate(policy, log=log, admin_key=KEY) as gate:
        opened = await admin(
            gate,
            "POST",
            "/sessions",
            {
                "session_id": "ro1",
                "metadata": {"task": "t1"},
                "max_model_calls": 5,
                "sampling": {"temperature": 1.0},
                "model": "tiny",
            },
        )
        assert opened.status == 200
        said_back = opened.json
        assert said_back["session_id"] == "ro1"
        assert said_back["base_url"].endswith("/v1")
        assert said_back["max_model_calls"] == 5
        async with AsyncOpenAI(base_url=gate.url + "/v1", api_key=said_back["api_key"]) as client:
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
        assert policy.asked[0].options == {"model": "tiny", "sampling": {"temperature": 1.0}}
        listed = (await admin(gate, "GET", "/sessions")).json["sessions"]
        assert [(s["session_id"], s["turns"]) for s in listed] == [("ro1", 1)]
        shown = (await admin(gate, "GET", "/sessions/ro1")).json
        assert shown["n_turns"] == 1 and shown["metadata"] == {"task": "t1"} and "-> stop" in shown["log"]
        assert said_back["api_key"] not in str(listed) + str(shown)
        assert (await admin(gate, "DELETE", "/sessions/ro1")).json == {"deleted": True}
        assert (await admin(gate, "DELETE", "/sessions/ro1")).status == 404
        assert (await ask(gate, "POST", CHAT, key=said_back["api_key"], body=chat())).status == 409
        document = (await admin(gate, "GET", "/sessions/ro1/rollout")).json
        assert document["stats"]["n_turns"] == 1, "a closed rollout is read from the log"


async def test_the_rollout_document_holds_training_rows(log):
    prompt = (5, 6, 7)

    def answer(call):
        turn = sum(m.role == "assistant" for m in call.messages)
        history = tuple(prompt) + (20, 21, 30, 31) * turn
        return said(f"word {turn}", sampled=(20, 21), prompt=history)

    async with open_gate(Answers(answer), log=log, admin_key=KEY) as gate:
        session = await gate.open_session("ro1", metadata={"task": "t"})
        body = chat("go", tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
        await ask(gate, "POST", CHAT, key=session.key, body=body)
        body["messages"] += [{"role": "assistant", "content": "word 0"}, {"role": "user", "content": "more"}]
        await ask(gate, "POST", CHAT, key=session.key, body=body)
        document = (await admin(gate, "GET", "/sessions/ro1/rollout?include_messages=true")).json
        (row,) = document["sequences"]
        assert row["role"] == "agent" and row["trainable"]
        assert row["input_ids"] == [5, 6, 7, 20, 21, 30, 31, 20, 21]
        assert row["loss_mask"] == [0, 0, 0, 1, 1, 0, 0, 1, 1]
        assert row["turn_lengths"] == [2, 2]
        assert document["trainable"] and document["capture_level"] == "tokens" and document["rollout_type"] == "train"
        assert document["metadata"] == {"task": "t"}
        second = document["turns"][1]
        assert [m["role"] for m in second["request_messages"]] == ["user", "assistant", "user"]
        assert second["request_tools"][0]["function"]["name"] == "f"
        assert second["response_message"]["content"] == "word 1"
        entries = (await admin(gate, "GET", "/sessions/ro1/trace_entries")).json["entries"]
        assert [e["prompt_token_ids"] for e in entries] == [[5, 6, 7], [5, 6, 7, 20, 21, 30, 31]]
        assert entries[1]["completion_token_ids"] == [20, 21]
        assert entries[1]["loss_mask"] == [0] * 7 + [1, 1]
        assert entries[1]["per_token_logps"] == [-0.5, -0.5]
        assert entries[0]["metadata"]["node_id"] != entries[1]["metadata"]["node_id"]


async def test_what_cannot_be_trained_on_is_409():
    async with open_gate(admin_key=KEY) as gate:
        session = await gate.open_session("ro1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat())
        refused = await admin(gate, "GET", "/sessions/ro1/trace_entries")
        assert refused.status == 409 and "text" in refused.json["error"]
        document = (await admin(gate, "GET", "/sessions/ro1/rollout")).json
        assert not document["trainable"] and document["rollout_type"] == "eval"


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": "a/b"},
        {"unknown_field": 1},
        {"max_model_calls": -1},
        {"purpose": "dream"},
        {"eval_sampling": {"temperature": 0}},
        {"api_key": "x"},
        b"{",
        b"[]",
    ],
)
async def test_a_session_that_makes_no_sense_is_refused(body):
    async with open_gate(admin_key=KEY) as gate:
        refused = await admin(gate, "POST", "/sessions", body)
        assert refused.status == 400
        assert not gate.sessions


async def test_an_unknown_session_is_404():
    async with open_gate(admin_key=KEY) as gate:
        for path in ("/sessions/nope", "/sessions/nope/rollout", "/sessions/nope/trace_entries"):
            assert (await admin(gate, "GET", path)).status == 404


async def test_a_budget_stop_is_counted_in_the_document():
    async with open_gate(admin_key=KEY) as gate:
        key = (await admin(gate, "POST", "/sessions", {"session_id": "ro1", "max_model_calls": 1})).json["api_key"]
        for number in range(3):
            await ask(gate, "POST", CHAT, key=key, body=chat(f"{number}"))
        document = (await admin(gate, "GET", "/sessions/ro1/rollout")).json
        assert document["budget_stop_count"] == 2


async def test_metrics_count_what_happened():
    async with open_gate(admin_key=KEY) as gate:
        session = await gate.open_session("ro1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat())
        await ask(gate, "POST", CHAT, key="wrong-key-of-some-length", body=chat())
        await ask(gate, "POST", CHAT, key=session.key, body=b"{")
        text = (await admin(gate, "GET", "/metrics")).body.decode()
        assert 'rollyard_gate_calls_total{dialect="chat",kind="agent"} 1.0' in text
        assert 'rollyard_gate_refusals_total{status="400"} 1.0' in text
        assert "rollyard_gate_bad_keys_total 1.0" in text
        assert "rollyard_gate_sessions 1.0" in text
        assert 'rollyard_gate_call_seconds_bucket{le="+Inf"} 1.0' in text


async def test_a_store_that_takes_nothing_is_said_and_no_session_is_left():
    class FullLog(MemoryLog):
        async def save_session(self, session):
            raise StoreError("cannot use the store runs.db: database or disk is full", hint="free space on its disk")

    async with open_gate(Answers(lambda call: said("hi")), log=FullLog(), admin_key=KEY) as gate:
        refused = await admin(gate, "POST", "/sessions", {"session_id": "ro1"})
        assert refused.status == 503 and "disk is full (free space" in refused.json["error"]
        assert (await admin(gate, "GET", "/sessions")).json["sessions"] == []
