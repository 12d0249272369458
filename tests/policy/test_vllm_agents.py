"""Real agents on a real vLLM 0.32, ten turns each: every id is the engine's, every turn begins with all that was sampled before.

SmolLM2 does not call tools by itself, so the engine is held to a grammar: one shell command of the model's choice per turn. Its
template here has tool calls and no list of tools, since agents offer more tools than the context holds. Logprobs are compared
where nothing holds the model: a grammar changes the distribution that the engine reports.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from pathlib import Path

import openai
import pytest

import rollyard as ry
from rollyard.trajectory.laws import findings
from tests.servers.vllm import model_folder, python, vllm_server

from .conftest import plain_call, user

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(3600)]
TEMPLATE = Path(__file__).parent / "models/calls.jinja"
TURNS = 10
LONG, UPDATES = 64, 3  # tokens of an answer that new weights meet, and how often
BASE = {"abort": 0, "wait": 10, "keep": 20}  # the version that a test begins with: a server's never goes back
BLOCK = 128  # tokens that vLLM's CPU backend caches as one
# agent -> its shell's name and the arguments it needs
SHELLS = {
    "shell-agent": ("shell", '"command": "echo [a-z]{2,5}"'),
    "pi": ("bash", '"command": "echo [a-z]{2,5}"'),
    "mini-swe-agent": ("bash", '"command": "echo [a-z]{2,5}"'),
    "codex": ("exec_command", '"cmd": "echo [a-z]{2,5}"'),
    "claude-code": ("Bash", '"command": "cd /workspace && echo [a-z]{2,5}"'),
}
TOLERANCE = 1e-3
# the model as torch computes it, in float32: the logprob of every token given those before it
RECOMPUTE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for line in sys.stdin:
    ids = torch.tensor([json.loads(line)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    print(json.dumps(logits.gather(1, ids[0, 1:, None])[:, 0].tolist()))
"""

# versions of a model that differ in the last norm
SHARPEN = """
import sys, pathlib, torch
from transformers import AutoModelForCausalLM
for version in range(int(sys.argv[3]) + 1):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.model.norm.weight.data *= 1 + 0.1 * version
    model.save_pretrained(pathlib.Path(sys.argv[2]) / str(version))
"""


@pytest.fixture(scope="module")
def vllm_url():
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out")
    template = ("--chat-template", str(TEMPLATE), "--chat-template-content-format", "string")
    with vllm_server(*options, *template, context=8192, pauses=True) as url:
        yield url


def renderer():
    return ry.policy.renderer(model_folder(), template=TEMPLATE.read_text(), parser="hermes", tools="omit")


def policy_of(kind: str, url: str, agent: str, **options):
    name, arguments = SHELLS[agent]
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{{arguments}}}}}\n</tool_call>'
    grammar = re.sub(r"([{}])(?![0-9,])(?<![0-9]\})", r"\\\1", call)
    sampling = {"temperature": 1.0, "top_p": 1.0, "extra": {"structured_outputs": {"regex": grammar}}}
    if kind == "upstream":
        return ry.policy.upstream(f"{url}/v1", sampling=sampling, max_tokens_cap=64, **options)
    return ry.policy.tokens(
        url, renderer=renderer(), kind=kind, sampling=sampling, max_tokens_cap=64, check="always", **options
    )


def metric(url: str, begins: str, label: str = "") -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begins) and label in line)


def cached_tokens(url: str) -> float:
    """Prompt tokens that the engine found in its prefix cache, so far."""
    return metric(url, "vllm:prefix_cache_hits_total")


async def run(agent: str, policy):
    done = await ry.run_rollout("Work.", agent=agent, policy=policy, max_calls=TURNS)
    await policy.aclose()
    assert not findings(done.trajectory)
    records = [r for r in done.trajectory.records if r.leaf is not None and r.finish != "budget" and r.kind == "agent"]
    assert len(records) == TURNS, (done.status, done.error, len(records))
    assert all(record.capture == "tokens" and not record.flaws for record in records)
    return done, records


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        ("shell-agent", "vllm"),
        ("pi", "completions"),
        ("mini-swe-agent", "vllm"),
        ("codex", "completions"),
        ("claude-code", "completions"),
    ],
)
async def test_ten_turns_of_an_agent_are_one_row_of_the_engines_ids(vllm_url, agent, kind):
    """With `completions` the engine says which prompt ids it used, and a turn with others has a flaw."""
    before = cached_tokens(vllm_url)
    policy = policy_of(kind, vllm_url, agent)
    done, records = await run(agent, policy)
    sources = [record.prompt_source for record in records]
    wanted = "bridged_by_id" if agent == "claude-code" else "bridge"
    assert sources == ["render"] + [wanted] * (TURNS - 1)
    (branch,) = [branch for branch in done.trajectory.branches if branch.trained]  # budget stops train nothing
    assert branch.trained == sum(record.usage.completion_tokens for record in records)
    hit = cached_tokens(vllm_url) - before
    follow_ups = sum(record.usage.prompt_tokens for record in records[1:])
    print(f"{agent} {kind}: {len(branch.ids)} tokens, {branch.trained} sampled, {dict(policy.prompts.counts)}")
    print(f"prefix cache: {hit:.0f} of {follow_ups} prompt tokens of follow-up calls")
    kept = sum((r.usage.prompt_tokens + r.usage.completion_tokens - 1) // BLOCK * BLOCK for r in records[:-1])
    assert hit >= kept > 0, "whole blocks of the turn before are found again"


@pytest.mark.parametrize("agent", ["shell-agent", "claude-code", "codex"])
async def test_a_chat_server_says_which_ids_it_used(vllm_url, agent):
    """One agent for each of Chat, Messages and Responses. Forks are where the engine's own render left what was sampled."""
    done, records = await run(agent, policy_of("upstream", vllm_url, agent))
    assert {record.prompt_source for record in records} == {"engine"}
    breaks = [record.break_reason for record in records if record.break_reason not in (None, "new_root")]
    print(agent, "upstream", len(done.trajectory.branches), "rows", breaks)
    rewritten = {"assistant_rewritten"} if agent == "claude-code" else set()
    assert set(breaks) <= {"bridge_unproven"} | rewritten, "the words came back; a render of them may be other tokens"


@pytest.mark.parametrize("kind", ["vllm", "completions", "upstream"])
async def test_logprobs_are_those_that_torch_computes(vllm_url, kind):
    """Eight turns of talk through the gate, sampled freely; the same weights in float32."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    if kind == "upstream":
        policy = ry.policy.upstream(f"{vllm_url}/v1", sampling=sampling, max_tokens_cap=24)
    else:
        policy = ry.policy.tokens(vllm_url, renderer=renderer(), kind=kind, sampling=sampling, max_tokens_cap=24)
    async with ry.Gate(policy, host="127.0.0.1") as gate:
        session = await gate.open_session("talk")
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key) as client:
            messages = []
            for turn in range(8):
                messages.append({"role": "user", "content": f"Tell me about the number {turn}."})
                said = await client.chat.completions.create(model="m", messages=messages)
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
        branches = session.trajectory.branches
    await policy.aclose()
    if kind != "upstream":
        assert len(branches) == 1 and policy.prompts.counts["bridge"] == 7
    gaps = [
        gap
        for branch, row in zip(branches, recompute([b.ids for b in branches]), strict=True)
        for gap in gaps_of(branch, row)
    ]
    print(kind, len(branches), "rows", len(gaps), "sampled tokens, largest gap", max(gaps))
    assert len(gaps) >= 8 and max(gaps) < TOLERANCE


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The model's folder for each version: the same model, a little more sure of itself each time."""
    root = tmp_path_factory.mktemp("versions")
    subprocess.run([python(), "-c", SHARPEN, model_folder(), root, str(UPDATES)], check=True, timeout=600)
    return [root / str(version) for version in range(UPDATES + 1)]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_new_weights_lose_no_turn_and_each_token_says_its_version(vllm_url, versions, mode):
    """Three updates while four long answers are sampled, by vLLM's own pause, reload and resume."""
    sampling = {"temperature": 1.0, "extra": {"ignore_eos": True}}
    policy = ry.policy.tokens(vllm_url, renderer=renderer(), kind="vllm", sampling=sampling, max_tokens_cap=LONG)
    first = version = BASE[mode]
    await policy.weights.publish(versions[0], version=first, mode="wait")
    aborted = metric(vllm_url, "vllm:request_success_total{", 'finished_reason="abort"')
    calls = []
    for version in range(first + 1, first + UPDATES + 1):
        if not calls or mode == "wait":
            calls += [
                asyncio.create_task(policy(plain_call(user(f"Count to {n}."), rollout_id=f"r{n}"))) for n in range(4)
            ]
        await generated_more(vllm_url, 16)
        await policy.weights.publish(versions[version - first], version=version, mode=mode)
    replies = await asyncio.gather(*calls)
    await policy.aclose()
    aborted = metric(vllm_url, "vllm:request_success_total{", 'finished_reason="abort"') - aborted
    assert (aborted > 0) == (mode == "abort")
    assert max(len(reply.spans) for reply in replies) == (1 if mode == "wait" else UPDATES + 1)
    gaps = []
    for reply in replies:
        assert reply.finish == "length" or reply.completion_ids[-1] in policy.renderer.stop_ids, "no turn is lost"
        assert len(reply.logprobs) == len(reply.completion_ids) and not reply.flaws
        assert [s.start for s in reply.spans] == [0, *(s.end for s in reply.spans[:-1])]
        assert reply.spans[-1].end == len(reply.completion_ids)
    for number, folder in enumerate(versions):
        ours = recompute([reply.prompt_ids + reply.completion_ids for reply in replies], folder)
        for reply, row in zip(replies, ours, strict=True):
            at = len(reply.prompt_ids) - 1
            own = [n for s in reply.spans if s.version == first + number for n in range(s.start, s.end)]
            gaps += [abs(row[at + n] - reply.logprobs[n]) for n in own]
    print(mode, f"{len(replies)} answers, {len(gaps)} tokens, {aborted:.0f} aborted parts, largest gap {max(gaps)}")
    assert max(gaps) < TOLERANCE


async def test_a_server_that_slept_goes_on(vllm_url):
    """vLLM's CPU backend frees nothing, and answers under way wait all the same."""
    policy = ry.policy.tokens(vllm_url, renderer=renderer(), kind="vllm", max_tokens_cap=LONG)
    call = asyncio.create_task(policy(plain_call(user("Count."))))
    await generated_more(vllm_url, 4)
    await policy.weights.pause("keep", sleep=1)
    await policy.weights.resume()
    reply = await call
    assert reply.capture == "tokens" and not reply.flaws
    await policy.aclose()


async def generated_more(url: str, count: int) -> None:
    """Until the engine has sampled `count` tokens more."""
    goal = metric(url, "vllm:generation_tokens_total{") + count
    async with asyncio.timeout(600):
        while metric(url, "vllm:generation_tokens_total{") < goal:
            await asyncio.sleep(0.05)


def recompute(sequences, folder=None) -> list[list[float]]:
    rows = "\n".join(json.dumps(sequence.tolist()) for sequence in sequences)
    done = subprocess.run(
        [python(), "-c", RECOMPUTE, folder or model_folder()],
        input=rows,
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def gaps_of(branch, row: list[float]) -> list[float]:
    return [
        abs(row[at - 1] - branch.logprobs[at])
        for span in branch.spans
        if span.sampled
        for at in range(span.start, span.end)
        if branch.mask[at]
    ]
