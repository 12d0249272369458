"""Calls as an agent makes them, a real llama.cpp server, and a small HTTP server whose answers a test decides."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from rollyard.core.call import Call, Sampling
from rollyard.core.ids import new_id
from rollyard.core.message import Message, Text, ToolSpec
from rollyard.trajectory.trajectory import Trajectory
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest
from tests.servers.smollm import llama_server

BASH = ToolSpec(
    "bash", "Runs a command", '{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}'
)


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def chat_call(body: dict, *, rollout_id: str = "r1", **fields) -> Call:
    """A call decoded from the bytes a chat client would send."""
    request = WireRequest(
        call_id=new_id("call"),
        rollout_id=rollout_id,
        body=msgspec.json.encode({"model": "agent-model", **body}),
        headers={},
    )
    return msgspec.structs.replace(CODECS["chat"].decode(request), **fields)


def plain_call(*messages: Message, rollout_id: str = "r1", tools: tuple[ToolSpec, ...] = (), **fields) -> Call:
    return Call(
        id=new_id("call"),
        rollout_id=rollout_id,
        dialect="chat",
        model="agent-model",
        messages=messages or (user("hello"),),
        tools=tools,
        sampling=fields.pop("sampling", Sampling()),
        **fields,
    )


def matched(trajectory: Trajectory, call: Call) -> Call:
    """The call with what it continues, as the gate hands it to a policy."""
    found = trajectory.match(call)
    return msgspec.structs.replace(call, continues=found.continues, fork_reason=found.reason)


@pytest.fixture(scope="session")
def smollm_url():
    pytest.importorskip("xllamacpp", reason="the llama.cpp server (pip install xllamacpp) is not installed")
    with llama_server() as url:
        yield url


@pytest.fixture
async def serving():
    """`url = await serving(handler)`: a real HTTP server on loopback that answers every request with `handler`."""
    runners: list[web.AppRunner] = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
        app = web.Application(client_max_size=2**27)
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


MODELS = Path(__file__).parent / "models"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_model(folder: Path, template: str, specials: tuple[str, ...] = SPECIALS) -> Path:
    """A model's files: a small byte-level BPE trained here, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        MODELS.joinpath("tools.jinja").read_text(),
        "hello world, the quick brown fox; echo hello > out.txt\n",
    ] * 40
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(msgspec.json.encode({"eos_token": "<|im_end|>"}).decode())
    (folder / "chat_template.jinja").write_text(MODELS.joinpath(f"{template}.jinja").read_text())
    return folder


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tool-model", "tools")
