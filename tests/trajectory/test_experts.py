"""Routed experts, kept per token: the shape is that of vLLM 0.32 (`GenerateChoiceBase.routed_experts` in
vllm/entrypoints/scale_out/token_in_token_out/protocol.py, the same in its chat and completions): a base64 `.npy` array
(tokens - 1, layers, top_k) of uint8, uint16 or int32 over prompt and answer."""

from __future__ import annotations

import base64
import io

import pytest

from rollyard.core.call import Call, Reply, Sampling, floats, ids
from rollyard.core.experts import RoutedExperts, join_experts, read_experts
from rollyard.core.message import Message, Text
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.store.exports.lines import sample_line
from rollyard.trajectory.laws import findings
from rollyard.trajectory.samples import samples
from rollyard.trajectory.trajectory import Trajectory

numpy = pytest.importorskip("numpy", reason="numpy is not installed")
LAYERS, TOP_K = 3, 2


def engine_text(array) -> str:
    """As vLLM writes it (`numpy2base64` in vllm/utils/serial_utils.py)."""
    with io.BytesIO() as buffer:
        numpy.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def routed(tokens, dtype="uint8"):
    """What a model does with each token depends on it and all before: here, on the sum of them."""
    sums = numpy.cumsum(tokens)[:-1]
    return (sums[:, None, None] + numpy.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K)).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_the_engines_array_is_read_and_written_as_it_was(dtype):
    array = routed([3, 1, 4, 1, 5], dtype)
    experts = read_experts(engine_text(array))
    assert (len(experts), experts.layers, experts.top_k) == (4, LAYERS, TOP_K)
    again = numpy.load(io.BytesIO(experts.to_npy()))
    assert again.dtype == array.dtype and (again == array).all()
    assert base64.b64decode(experts.to_base64()) == experts.to_npy()
    assert join_experts([experts.rows(0, 1), experts.rows(1)]) == experts
    assert join_experts([experts, None]) is None and read_experts(None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!", "no base64"),
        (base64.b64encode(b"hello").decode(), "no .npy"),
        (engine_text(numpy.zeros((2, 3))), "another shape"),
        (engine_text(numpy.zeros((2, 3, 4), dtype="float32")), "another shape"),
        (engine_text(numpy.zeros((2, 3, 4), dtype="uint8"))[:-8], "bytes for the shape"),
        (engine_text(numpy.asfortranarray(numpy.zeros((2, 3, 4), dtype="uint8"))), "bytes for the shape"),
    ],
)
def test_what_cannot_be_read_is_said(text, words):
    with pytest.raises(ValueError, match=words):
        read_experts(text)


USER = Message("user", (Text("go"),))


def said(text):
    return Message("assistant", (Text(text),))


def add(trajectory, id, messages, text, prompt, completion, *, experts=True, missing=0):
    whole = [*prompt, *completion]
    given = read_experts(engine_text(routed(whole)))
    call = Call(id=id, rollout_id="r1", dialect="chat", model="m", messages=messages)
    reply = Reply(
        message=said(text),
        prompt_ids=ids(prompt),
        completion_ids=ids(completion),
        logprobs=floats([-0.5] * len(completion)),
        capture="tokens",
        sampling=Sampling(temperature=1.0),
        experts=given.rows(missing) if experts else None,
    )
    return trajectory.add(call, reply)


def forked():
    """Two turns in a row, and a fork after the first answer."""
    t = Trajectory("r1")
    add(t, "c1", (USER,), "a", [1, 2], [3, 4])
    add(t, "c2", (USER, said("a"), USER), "b", [1, 2, 3, 4, 5], [6])
    add(t, "c3", (USER, said("a"), Message("user", (Text("no"),))), "c", [1, 2, 3, 4, 7, 8], [9, 10])
    return t


def rollout(trajectory):
    task = Task(id="t", instruction="x")
    return Rollout(id="r1", task=task, trajectory=trajectory, verdict=Verdict(reward=1.0))


def check_rows(rows):
    for row in rows:
        assert (numpy.load(io.BytesIO(row.experts.to_npy())) == routed(list(row.ids))).all()
        exported = numpy.load(io.BytesIO(base64.b64decode(sample_line(row)["routed_experts"])))
        assert exported.shape == (len(row.ids) - 1, LAYERS, TOP_K)


def test_bridged_turns_and_forks_have_the_experts_of_each_token_once():
    trajectory = forked()
    assert not findings(trajectory)
    rows = samples(rollout(trajectory)).rows
    assert [list(row.ids) for row in rows] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9, 10]]
    check_rows(rows)
    kept = sum(len(node.experts) for node in trajectory.nodes if node.experts is not None)
    assert kept == len({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) - 1, "shared tokens are kept once"


def test_an_answer_whose_parent_came_late_keeps_its_experts():
    t = Trajectory("r1")
    add(t, "c2", (USER, said("a"), USER), "b", [1, 2, 3, 4, 5], [6])
    add(t, "c1", (USER,), "a", [1, 2], [3, 4])
    (row,) = samples(rollout(t)).rows
    assert list(row.ids) == [1, 2, 3, 4, 5, 6]
    check_rows([row])


@pytest.mark.anyio
async def test_the_store_gives_them_back(tmp_path):
    trajectory = Trajectory("r1")
    added = [
        add(trajectory, "c1", (USER,), "a", [1, 2], [3, 4]),
        add(trajectory, "c2", (USER, said("a"), USER), "b", [1, 2, 3, 4, 5], [6]),
    ]
    async with Store.open(tmp_path / "runs.db") as store:
        for one in added:
            await store.commit(one.record, one.nodes, one.blobs)
        kept = await store.trajectory("r1")
    assert kept.nodes == trajectory.nodes
    check_rows(samples(rollout(kept)).rows)


def test_lengths_that_disagree_are_a_flaw_and_experts_that_are_not_known_for_all_are_left_out():
    t = Trajectory("r1")
    record = add(t, "c1", (USER,), "a", [1, 2], [3, 4], missing=1).record
    assert record.flaws == ("routed experts of 2 tokens, 3 wanted",) and not record.trainable
    assert "routed experts of 2 tokens" in str(samples(rollout(t)).refused[0].reasons)
    t = Trajectory("r1")
    add(t, "c1", (USER,), "a", [1, 2], [3, 4])
    add(t, "c2", (USER, said("a"), USER), "b", [1, 2, 3, 4, 5], [6], experts=False)
    (row,) = samples(rollout(t)).rows
    assert row.experts is None and sample_line(row)["routed_experts"] is None


def test_experts_of_another_shape_are_not_joined():
    assert join_experts([RoutedExperts(1, 2, 1, b"ab"), RoutedExperts(2, 1, 1, b"ab")]) is None
