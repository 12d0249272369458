"""Texts of rollouts are found by their words, on SQLite and on PostgreSQL; what people say is kept beside them."""

import re
from functools import partial

import pytest

from rollyard.core.call import Call, Reply
from rollyard.core.errors import ConfigError, StoreError
from rollyard.core.message import Message, Text, ToolCall, ToolResult
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import texts
from rollyard.store.search import compile_text, index_missing, matching_line, search
from rollyard.trajectory.trajectory import Trajectory

pytestmark = pytest.mark.anyio


async def ended(store, name, said, *, log="", calls=True):
    trajectory = Trajectory(name)
    asked = Message("user", (Text("fix it"),))
    first = Message("assistant", (Text(said), ToolCall("c1", "bash", '{"command": "pytest -q"}')))
    result = Message("tool", (ToolResult("c1", (Text("No module named 'requests'\nend\0"),)),))
    for number, history in enumerate(([asked], [asked, first, result])):
        call = Call(id=f"{name}_{number}", rollout_id=name, dialect="chat", model="m", messages=tuple(history))
        added = trajectory.add(call, Reply(message=first if not number else Message("assistant", (Text("done"),))))
        await store.commit(added.record, added.nodes, added.blobs)
    rollout = Rollout(
        id=name, run_id="run1", task=Task(id=f"task-{name}", instruction="x"), agent="pi", calls=2,
        verdict=Verdict(reward=0.0, log=log), trajectory=trajectory if calls else None,
    )  # fmt: skip
    await store.commit_rollout(rollout)
    return rollout


async def places(store, query, **options):
    return {(one.rollout_id, one.place) for one in await store.find_texts(query, **options)}


async def test_words_are_found_in_messages_calls_results_logs_and_task_names(store):
    await store.create_run({}, id="run1")
    await ended(store, "ro1", "the Cause is clear", log="assertion failed: 3 != 4")
    await ended(store, "ro2", "something else")
    assert await places(store, "cause clear") == {("ro1", "message")}
    assert await places(store, '"clear cause"') == set()
    assert await places(store, '"cause is"') == {("ro1", "message")}
    assert await places(store, "pytest") == {("ro1", "tool call"), ("ro2", "tool call")}
    assert await places(store, "module requests") == {("ro1", "tool result"), ("ro2", "tool result")}
    assert await places(store, "assertion") == {("ro1", "verdict")}
    assert await places(store, "ro2") == {("ro2", "task")}
    assert await places(store, "requests", run_id="run2") == set()
    assert await places(store, "zebra") == set()
    (found,) = await store.find_texts("assertion")
    assert (found.task_id, found.agent, found.reward, found.call) == ("task-ro1", "pi", 0.0, None)
    assert matching_line("one\n  the word stands here\nlast", "stands") == "the word stands here"


@pytest.mark.parametrize(
    "query", ['"', "*", "a AND", "NEAR(", "body:x", "'; DROP TABLE texts; --", "-", "", "(((", '"x" OR "']
)
async def test_no_query_is_an_error_or_a_command(store, query):
    await ended(store, "ro1", "hello")
    await store.find_texts(query)
    assert await places(store, "hello") == {("ro1", "message")}


async def test_rollouts_without_texts_are_put_in_and_those_judged_again_anew(store):
    await ended(store, "ro1", "hello", calls=False)
    await ended(store, "ro2", "hello", calls=False)
    assert await places(store, "hello") == set()
    assert await index_missing(store, limit=1) == 1
    assert len(await places(store, "hello")) == 1
    assert await index_missing(store, limit=9) == 0
    assert len(await places(store, "hello")) == 2
    await store.add_verdict("ro1", Verdict(reward=1.0, log="all is well"))
    assert await store.missing_texts(9) == ["ro1"]
    await index_missing(store, limit=9)
    assert await places(store, "well") == {("ro1", "verdict")}


async def test_a_run_that_is_removed_leaves_no_words_and_no_notes(store):
    await store.create_run({}, id="run1")
    await ended(store, "ro1", "hello")
    await store.add_note("ro1", "note", author="ann", text="odd")
    await store.delete_run("run1")
    assert await places(store, "hello") == set()
    assert await store.notes(["ro1"]) == {}


async def test_a_pattern_reads_only_rollouts_that_can_have_it(store):
    await ended(store, "ro1", "the quick brown fox")
    await ended(store, "ro2", "the slow brown fox")
    await ended(store, "ro3", "a quick brown cat", calls=False)
    plain = partial(compile_text, regex=False)
    assert plain("the quick brown fox", ignore_case=True).words == ("quick", "brown")
    assert plain("quick", ignore_case=True).words == ()
    assert await store.rollouts_with(["quick"]) == {"ro1", "ro3"}
    for ignore_case in (False, True):
        for sought, there in (
            ("a quick brown", ["ro3"]),
            ("quick brown", ["ro1", "ro3"]),
            ("Quick", ["ro1", "ro3"] * ignore_case),
        ):
            found = search(store, plain(sought, ignore_case=ignore_case))
            assert [one.rollout_id async for one in found] == there


async def test_of_a_very_long_rollout_the_beginning_is_there_and_a_pattern_still_reads_it(store):
    await ended(store, "ro1", "start " + "x" * texts.MOST)
    assert await places(store, "start") == {("ro1", "message")}
    assert await store.rollouts_with(["nothing"]) == {"ro1"}


async def test_a_pattern_is_found_where_two_pieces_of_a_long_text_meet_and_at_the_ends_of_lines(store):
    diffs = {"ro1": "x" * 63_996 + "a needle in two pieces", "ro2": "first\nsecond line\nthird", "ro3": "no such"}
    for name, diff in diffs.items():
        await store.commit_rollout(Rollout(id=name, task=Task(id="t", instruction="x"), agent="pi", diff=diff))
    for pattern, rollout_id in (("needle", "ro1"), ("needle in", "ro1"), ("^second line$", "ro2")):
        for regex in (True, False) if pattern.isalpha() else (True,):
            sought = compile_text(pattern, regex=regex, ignore_case=False)
            assert [one.rollout_id async for one in search(store, sought)] == [rollout_id]
    read_whole = partial(texts.find_matching, ids=list(diffs), pattern=re.compile("^second line$"))
    assert await store.database.read(read_whole) == {"ro1", "ro2"}
    for text, others in (("second", {"ro2"}), ("Second", set()), ("such", {"ro3"}), ("%", set()), ("t", {"ro2"})):
        for plain in (text, None):
            read = partial(texts.find_matching, ids=[*diffs, "unknown"], pattern=re.compile(text), plain=plain)
            assert await store.database.read(read) == {"ro1", "unknown", *others}


async def test_notes_labels_and_scores_are_kept_replaced_and_removed(store):
    await ended(store, "ro1", "hello")
    first = await store.add_note("ro1", "note", author="ann", text="odd")
    await store.add_note("ro1", "note", author="ann", text="odder")
    await store.add_note("ro1", "label", author="ann", name="reward hack")
    await store.add_note("ro1", "score", author="ann", name="style", score=0.5)
    await store.add_note("ro1", "score", author="ann", name="style", score=0.75)
    await store.add_note("ro1", "score", author="bob", name="style", score=0.0)
    kept = (await store.notes(["ro1", "ro9"]))["ro1"]
    assert [(n.author, n.kind, n.name, n.text, n.score) for n in kept] == [
        ("ann", "note", "", "odd", None),
        ("ann", "note", "", "odder", None),
        ("ann", "label", "reward hack", "", None),
        ("ann", "score", "style", "", 0.75),
        ("bob", "score", "style", "", 0.0),
    ]
    assert await store.remove_note("ro1", first.id)
    assert not await store.remove_note("ro2", kept[1].id)
    assert len((await store.notes(["ro1"]))["ro1"]) == 4
    with pytest.raises(StoreError, match="no rollout ro9"):
        await store.add_note("ro9", "note", author="ann", text="x")
    odd = {"name": "x", "score": float("nan")}
    for kind, fields in (("note", {"text": " "}), ("label", {}), ("score", {"name": "x"}), ("score", odd)):
        with pytest.raises(ConfigError):
            await store.add_note("ro1", kind, author="ann", **fields)
