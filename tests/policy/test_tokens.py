import asyncio
import json

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.call import Sampling, ids
from rollyard.core.errors import ConfigError, ContextFull, UpstreamError
from rollyard.core.experts import RoutedExperts
from rollyard.policy.renderers.bytelevel import END, ByteRenderer
from rollyard.trajectory.trajectory import Trajectory
from tests.servers.smollm import weights

from .conftest import matched, plain_call, user

pytestmark = pytest.mark.anyio

TEXT = [*b"hi", END]
LOGPROBS = [-0.5, -0.25, -0.125]


def content(values):
    return {"content": [{"token": "x", "logprob": value} for value in values]}


def vllm(sampled=TEXT, values=LOGPROBS, **more):
    choice = {"token_ids": sampled, "logprobs": content(values), "finish_reason": "stop"}
    return {"request_id": "q1", "choices": [choice | more]}


def span(version, start, end):
    """A span of one version as vLLM 0.32 writes it (`WeightVersionSpan` of vllm/outputs.py, in each choice)."""
    return {"version": version, "start": start, "end": end}


ANSWERS = {
    "vllm": vllm(),
    "torch": vllm(weight_versions=[span("3", 0, 1), span("4", 1, 3)]),
    "completions": {
        "choices": [{"token_ids": TEXT, "logprobs": {"token_logprobs": LOGPROBS}, "finish_reason": "stop"}]
    },
    "sglang": {
        "output_ids": TEXT,
        "meta_info": {
            "output_token_logprobs": [[lp, token, None] for lp, token in zip(LOGPROBS, TEXT, strict=True)],
            "finish_reason": {"type": "stop"},
            "weight_version": "4",
        },
    },
    "llamacpp": {
        "tokens": TEXT,
        "completion_probabilities": [{"id": token, "logprob": lp} for lp, token in zip(LOGPROBS, TEXT, strict=True)],
        "stop_type": "eos",
    },
}
PROMPTS = {
    "vllm": "token_ids",
    "torch": "token_ids",
    "completions": "prompt",
    "sglang": "input_ids",
    "llamacpp": "prompt",
}


async def asking(serving, kind, answer, seen, **options):
    async def handler(request):
        if request.method == "GET":
            return web.json_response({}, status=404)  # no list of models
        seen.append((request.path, json.loads(await request.read())))
        return web.json_response(answer)

    return ry.policy.tokens(await serving(handler), "m", kind=kind, renderer="bytes", **options)


@pytest.mark.parametrize("kind", sorted(ANSWERS))
async def test_each_engine_is_given_ids_and_its_ids_are_kept(serving, kind):
    seen = []
    policy = await asking(serving, kind, ANSWERS[kind], seen)
    reply = await policy(plain_call(user("yo"), sampling=Sampling(max_tokens=7, temperature=0.5)))
    path, body = seen[0]
    assert body[PROMPTS[kind]] == ByteRenderer().render((user("yo"),)).tolist()
    params = body.get("sampling_params", body)
    assert params["temperature"] == 0.5 and params["top_p"] == 1.0
    assert 7 in (params.get("max_tokens"), params.get("max_new_tokens"), params.get("n_predict"))
    if kind != "llamacpp":
        assert params["stop_token_ids"] == [END]
    assert reply.completion_ids.tolist() == TEXT and reply.logprobs.tolist() == LOGPROBS
    assert reply.message.text == "hi" and reply.capture == "tokens" and reply.finish == "stop"
    assert [t.text for t in reply.tokens] == ["h", "i", "<end>"]
    assert reply.sampling.temperature == 0.5 and reply.sampling.max_tokens == 7
    await policy.aclose()


async def test_versions_per_token_are_kept_where_the_server_gives_them(serving):
    policy = await asking(serving, "torch", ANSWERS["torch"], [])
    reply = await policy(plain_call())
    assert (reply.version_start, reply.version_end) == (3, 4)
    assert [(s.version, s.start, s.end) for s in reply.spans] == [(3, 0, 1), (4, 1, 3)]
    await policy.aclose()


async def test_the_version_that_a_server_was_started_with_has_no_number(serving):
    """vLLM calls it `default` until one is published: those tokens' version is not known, the others' is."""
    policy = await asking(serving, "vllm", vllm(weight_versions=[span("default", 0, 1), span("4", 1, 3)]), [])
    reply = await policy(plain_call())
    assert (reply.version_start, reply.version_end) == (None, 4)
    assert [(s.version, s.start, s.end) for s in reply.spans] == [(4, 1, 3)]
    await policy.aclose()


async def test_where_a_server_says_no_version_the_one_published_last_is_meant(serving):
    """vLLM's older endpoint gives none. An update while an answer is sampled leaves its version open."""
    posted, going, asked = [], asyncio.Event(), asyncio.Event()
    going.set()

    async def handler(request):
        posted.append(request.path_qs)
        if request.path == "/v1/completions":
            asked.set()
            await going.wait()
        return web.json_response(ANSWERS["completions"])

    policy = ry.policy.tokens(await serving(handler), "m", kind="completions", renderer="bytes")
    assert (await policy(plain_call())).version_start is None
    await policy.weights.publish("weights/5", version=5, mode="wait")
    assert posted[-4:] == ["/pause?mode=wait", "/collective_rpc", "/update_weight_version", "/resume"]
    assert (await policy(plain_call())).version_start == 5
    going.clear()
    asked.clear()
    under_way = asyncio.create_task(policy(plain_call()))
    await asked.wait()
    await policy.weights.pause("keep", sleep=1)
    await policy.weights.resume(version=6)
    assert posted[-3:] == ["/sleep?level=1&mode=keep", "/update_weight_version", "/wake_up"]
    going.set()
    assert (await under_way).version_start is None
    await policy.aclose()


@pytest.mark.parametrize(
    ("kind", "answer", "flaw"),
    [
        ("vllm", vllm(values=LOGPROBS[:2]), "2 logprobs for 3 tokens"),
        ("vllm", vllm(values=[-9999.0, -0.1, -0.1]), "placeholder"),
        ("vllm", vllm(values=[None, -0.1, -0.1]), "finite"),
        ("sglang", ANSWERS["sglang"] | {"output_ids": [1, 2, 3]}, "not the ids of the answer"),
        ("llamacpp", ANSWERS["llamacpp"] | {"completion_probabilities": [{"id": 1, "logprob": -1.0}]}, "others"),
    ],
)
async def test_a_turn_that_contradicts_itself_is_untrainable_and_says_why(serving, kind, answer, flaw):
    policy = await asking(serving, kind, answer, [])
    reply = await policy(plain_call())
    assert not reply.trainable and any(flaw in f for f in reply.flaws), reply.flaws
    assert reply.message.text  # the agent goes on
    await policy.aclose()


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{"text": "hi"}]}, {"choices": [{"token_ids": ["a"]}]}, []]
)
async def test_an_answer_without_ids_is_an_error_not_a_guess(serving, answer):
    policy = await asking(serving, "vllm", answer, [])
    with pytest.raises(UpstreamError) as broken:
        await policy(plain_call())
    assert broken.value.status == 502
    await policy.aclose()


async def test_the_server_says_which_engine_it_is(serving):
    seen = []

    async def handler(request):
        seen.append(request.path)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "served", "owned_by": "vllm", "max_model_len": 40}]})
        if request.path == "/inference/v1/generate":
            return web.json_response({}, status=404)
        return web.json_response(ANSWERS["completions"])

    policy = ry.policy.tokens(await serving(handler) + "/v1", renderer="bytes")
    reply = await policy(plain_call(user("yo")))
    assert policy.engine.name == "completions" and reply.model == "served" and reply.sampling.max_tokens == 40 - 5
    with pytest.raises(UpstreamError) as long:
        await policy(plain_call(user("y" * 60)))
    assert long.value.status == 400
    await policy.aclose()


async def test_a_prompt_that_the_engine_changed_never_trains(serving):
    answer = json.loads(json.dumps(ANSWERS["completions"]))
    policy = await asking(serving, "completions", answer, [])
    prompt = (await policy(plain_call(user("yo")))).prompt_ids
    for used, flaws in (
        (prompt.tolist(), ()),
        ([1, *prompt], ("the engine sampled from other prompt ids than it was given",)),
    ):
        answer["choices"][0]["prompt_token_ids"] = used
        reply = await policy(plain_call(user("yo")))
        assert reply.flaws == flaws and reply.trainable is not bool(flaws)
    await policy.aclose()


@pytest.mark.parametrize("kind", ["vllm", "completions"])
async def test_what_the_operator_adds_to_the_sampling_reaches_the_engine(serving, kind):
    seen = []
    extra = {"structured_outputs": {"regex": "a+"}}
    policy = await asking(serving, kind, ANSWERS[kind], seen, sampling={"extra": extra})
    await policy(plain_call(user("yo")))
    _, body = seen[-1]
    assert (body["sampling_params"] if kind == "vllm" else body)["structured_outputs"] == {"regex": "a+"}
    await policy.aclose()


def vllm_shape(models, generate=403, completions=None):
    """A server with the answers that a real vLLM 0.32 was seen to give with its defaults (`test_vllm.py` asks a real one):
    the generate endpoint is 403, the model list has `owned_by`, `root` and `max_model_len`."""
    seen = []

    async def handler(request):
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": models})
        seen.append((request.path, json.loads(await request.read())))
        if request.path == "/inference/v1/generate":
            return web.json_response({"error": "Forbidden"}, status=generate)
        return web.json_response(completions or ANSWERS["completions"])

    return handler, seen


SMOL = {"id": "smol", "object": "model", "owned_by": "vllm", "root": "/models/smol", "max_model_len": 40}


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_without_vllms_generate_endpoint_completions_is_asked_and_that_is_said_once(serving, status, caplog):
    handler, seen = vllm_shape([SMOL], status)
    policy = ry.policy.tokens(await serving(handler), renderer="bytes")
    with caplog.at_level("WARNING", "rollyard.policy"):
        await policy.check("policy")
        for _ in range(2):
            reply = await policy(plain_call(user("yo")))
    assert [path for path, _ in seen] == ["/inference/v1/generate", "/v1/completions", "/v1/completions"]
    assert [body["model"] for _, body in seen[1:]] == ["smol", "smol"] and reply.model == "smol"
    assert len([line for line in caplog.messages if f"answered {status}" in line]) == 1
    await policy.aclose()


async def test_of_several_models_one_must_be_named_and_a_name_that_is_served_is_kept(serving):
    handler, seen = vllm_shape([SMOL, SMOL | {"id": "tuned", "max_model_len": 80}])
    url = await serving(handler)
    unnamed = ry.policy.tokens(url, renderer="bytes")
    with pytest.raises(ConfigError, match="smol, tuned"):
        await unnamed.check("policy")
    named = ry.policy.tokens(url, "tuned", renderer="bytes")
    assert (await named(plain_call(user("yo")))).sampling.max_tokens == 80 - 5
    assert (await unnamed(plain_call(user("yo"), options={"model": "smol"}))).sampling.max_tokens == 40 - 5
    await unnamed.aclose()
    await named.aclose()


async def test_the_context_is_known_where_the_kind_was_given_too(serving):
    handler, seen = vllm_shape([SMOL])
    policy = ry.policy.tokens(await serving(handler), kind="completions", renderer="bytes")
    reply = await policy(plain_call(user("yo")))
    assert [path for path, _ in seen] == ["/v1/completions"] and reply.sampling.max_tokens == 40 - 5
    with pytest.raises(ContextFull):
        await policy(plain_call(user("y" * 60)))
    await policy.aclose()


async def test_without_a_renderer_the_files_that_the_server_names_are_used_and_no_code(serving, tool_model):
    handler, _ = vllm_shape([SMOL | {"root": str(tool_model), "max_model_len": 4000}])
    policy = ry.policy.tokens(await serving(handler))
    reply = await policy(plain_call(user("yo")))
    assert reply.prompt_ids == ry.policy.renderer(tool_model).render((user("yo"),))
    await policy.aclose()
    for root in ("/nowhere/smol", "os:getcwd", None):
        handler, _ = vllm_shape([SMOL | {"root": root}])
        policy = ry.policy.tokens(await serving(handler))
        with pytest.raises(ConfigError, match="renderer="):
            await policy(plain_call(user("yo")))
        await policy.aclose()


async def test_a_turn_aborted_for_new_weights_goes_on_and_is_one_completion(serving):
    """Partial rollouts: the second part is asked for with the ids of the first, and each keeps its version."""
    seen = []

    async def handler(request):
        seen.append(json.loads(await request.read()))
        part = len(seen) - 1
        finish = "stop" if part == 2 else "abort"
        one, version = slice(part, part + 1), span(str(5 + part), 0, 1)
        return web.json_response(vllm(TEXT[one], LOGPROBS[one], finish_reason=finish, weight_versions=[version]))

    policy = ry.policy.tokens(await serving(handler), "m", kind="torch", renderer="bytes")
    reply = await policy(plain_call(user("yo"), sampling=Sampling(max_tokens=9)))
    prompt = ByteRenderer().render((user("yo"),)).tolist()
    assert [body["token_ids"] for body in seen] == [prompt, prompt + TEXT[:1], prompt + TEXT[:2]]
    assert [body["sampling_params"]["max_tokens"] for body in seen] == [9, 8, 7]
    assert reply.completion_ids.tolist() == TEXT and reply.logprobs.tolist() == LOGPROBS and reply.finish == "stop"
    assert [(s.version, s.start, s.end) for s in reply.spans] == [(5, 0, 1), (6, 1, 2), (7, 2, 3)]
    assert (reply.version_start, reply.version_end) == (5, 7)
    await policy.aclose()


async def test_an_unknown_engine_is_refused(serving):
    with pytest.raises(ConfigError):
        ry.policy.tokens("http://127.0.0.1:1", kind="tgi", renderer="bytes")

    async def handler(request):
        return web.json_response({"data": [{"id": "m", "owned_by": "somebody"}]})

    policy = ry.policy.tokens(await serving(handler), renderer="bytes")
    with pytest.raises(ConfigError, match="kind="):
        await policy(plain_call())
    await policy.aclose()


async def test_turn_by_turn_on_a_real_server_every_prompt_begins_with_what_was_sampled(smollm_url):
    """SmolLM2 on llama.cpp: token in, token out, bridged; and the graph holds one branch of exactly these ids."""
    policy = ry.policy.tokens(smollm_url, renderer=ry.policy.renderer(weights()), sampling={"seed": 7}, check="always")
    trajectory = Trajectory("r1")
    messages, before = [user("Name a colour.")], ids()
    for turn in range(3):
        call = matched(trajectory, plain_call(*messages, sampling=Sampling(max_tokens=24 if turn else 3)))
        reply = await policy(call)
        trajectory.add(call, reply)
        assert reply.capture == "tokens" and not reply.flaws and reply.logprobs_mode == "raw"
        assert reply.prompt_ids[: len(before)] == before
        assert reply.prompt_source == ("bridge" if turn else "render")
        before = reply.prompt_ids + reply.completion_ids
        messages += [reply.message, user("Another?")]
        if turn == 0:
            assert reply.finish == "length"  # cut: the next prompt closes it with an inserted token
        if turn == 1:
            assert len(reply.inserted) == 1
    assert policy.engine.name == "llamacpp" and policy.prompts.counts["bridge"] == 2
    (branch,) = trajectory.branches
    assert branch.ids == before and sum(branch.mask) == sum(len(n.ids) for n in branch.nodes if n.sampled)
    await policy.aclose()


async def test_the_logprobs_of_a_real_server_are_the_models_own(smollm_url):
    """Greedy sampling of one prompt twice gives the same ids, and logprobs that differ by no more than rounding."""
    policy = ry.policy.tokens(smollm_url, renderer=ry.policy.renderer(weights()), sampling={"temperature": 0.0})
    assert (await policy.probe()).level == "tokens"
    one = await policy(plain_call(user("What is 2+2?"), sampling=Sampling(max_tokens=8)))
    two = await policy(plain_call(user("What is 2+2?"), sampling=Sampling(max_tokens=8), rollout_id="r2"))
    assert one.completion_ids == two.completion_ids
    assert all(abs(a - b) < 0.05 for a, b in zip(one.logprobs, two.logprobs, strict=True))
    await policy.aclose()


def experts_text(rows):
    """Routed experts as vLLM writes them: one layer, one expert for each row."""
    return RoutedExperts(1, 1, 1, bytes(rows)).to_base64()


@pytest.mark.parametrize("kind", ["vllm", "completions"])
async def test_routed_experts_are_kept_where_the_server_gives_them(serving, kind):
    prompt = len(ByteRenderer().render((user("yo"),)))
    for rows, flaws in ((prompt + 2, ()), (prompt, (f"routed experts of {prompt} tokens, {prompt + 2} wanted",))):
        answer = json.loads(json.dumps(ANSWERS[kind]))
        answer["choices"][0]["routed_experts"] = experts_text(range(rows))
        policy = await asking(serving, kind, answer, [])
        reply = await policy(plain_call(user("yo")))
        assert (len(reply.experts), reply.flaws, reply.trainable) == (rows, flaws, not flaws)
        await policy.aclose()
    answer["choices"][0]["routed_experts"] = "?"
    policy = await asking(serving, kind, answer, [])
    reply = await policy(plain_call(user("yo")))
    assert reply.experts is None and "no base64" in reply.flaws[0] and not reply.trainable
    await policy.aclose()


async def test_experts_of_a_turn_in_parts_are_those_of_the_part_that_sampled(serving):
    """Each part says those of all tokens before its end; the tokens of the first went through the first part's."""
    prompt = len(ByteRenderer().render((user("yo"),)))
    seen = []

    async def handler(request):
        seen.append(json.loads(await request.read()))
        first = len(seen) == 1
        part, size = (slice(0, 1), prompt) if first else (slice(1, 3), prompt + 2)
        finish, experts = "abort" if first else "stop", experts_text([len(seen)] * size)
        return web.json_response(vllm(TEXT[part], LOGPROBS[part], finish_reason=finish, routed_experts=experts))

    policy = ry.policy.tokens(await serving(handler), "m", kind="torch", renderer="bytes")
    reply = await policy(plain_call(user("yo")))
    assert reply.experts.data == bytes([1] * prompt + [2] * 2) and not reply.flaws
    await policy.aclose()
