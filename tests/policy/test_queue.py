import asyncio
import threading

import pytest

from rollyard.core.call import Reply, floats, ids
from rollyard.core.errors import PolicyClosed, ReplyRefused, UpstreamError
from rollyard.core.message import Message, Text
from rollyard.policy.queue import Queue
from rollyard.policy.renderers.bytelevel import END, ByteRenderer
from tests.waiting import settle

from .conftest import plain_call, user

pytestmark = pytest.mark.anyio


async def asked(queue, call):
    """Starts a call as the gate would, and waits until it is held."""
    task = asyncio.create_task(queue(call))
    before = queue.held
    while queue.held == before and not task.done():
        await asyncio.sleep(0)
    return task


async def test_a_trainer_takes_calls_of_all_rollouts_and_answers_them():
    queue = Queue()
    tasks = [await asked(queue, plain_call(rollout_id=f"r{n}")) for n in range(3)]
    batch = await queue.take(max=8, wait=0)
    assert {held.call.rollout_id for held in batch} == {"r0", "r1", "r2"}
    for held in batch:
        await held.reply(text=held.call.rollout_id)
    assert [(await task).message.text for task in tasks] == ["r0", "r1", "r2"]
    assert queue.held == 0


async def test_take_serves_rollouts_in_turn_so_that_a_noisy_one_does_not_starve_the_rest():
    queue = Queue()
    tasks = [await asked(queue, plain_call(rollout_id="noisy")) for _ in range(5)]
    tasks.append(await asked(queue, plain_call(rollout_id="quiet")))
    batch = await queue.take(max=2, wait=0)
    assert [held.call.rollout_id for held in batch] == ["noisy", "quiet"]
    await queue.aclose()
    assert all(isinstance(r, PolicyClosed) for r in await asyncio.gather(*tasks, return_exceptions=True))


async def test_take_is_empty_once_closed_and_raises_when_its_time_is_up():
    queue = Queue()
    with pytest.raises(TimeoutError):
        await queue.take(timeout=0.01)
    waiting = asyncio.create_task(queue.take())
    await settle()
    await queue.aclose()
    assert await waiting == []


async def test_a_cancelled_take_has_taken_nothing():
    queue = Queue()
    taking = asyncio.create_task(queue.take(wait=10))
    task = await asked(queue, plain_call())
    await settle()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    (held,) = await queue.take(wait=0)
    await held.reply(text="still there")
    assert (await task).message.text == "still there"


async def test_a_session_sees_its_own_calls_only_and_none_once_its_agent_has_exited():
    queue = Queue()
    other = await asked(queue, plain_call(rollout_id="other"))
    mine = await asked(queue, plain_call(rollout_id="mine"))
    session = queue.session("mine")
    held = await session.next_request(timeout=1)
    assert held is not None and held.call.rollout_id == "mine"
    await session.deliver(held, {"choices": [{"message": {"role": "assistant", "content": "as a dict"}}]})
    assert (await mine).message.text == "as a dict"
    waiting = asyncio.create_task(session.next_request(timeout=30))
    await settle()
    await queue.closed("mine")
    assert await waiting is None
    assert await session.next_request(timeout=30) is None
    await queue.aclose()
    with pytest.raises(PolicyClosed):
        await other


async def test_next_request_raises_when_nothing_comes_in_time():
    with pytest.raises(TimeoutError):
        await Queue().session("r1").next_request(timeout=0.01)


async def test_a_second_reply_is_refused_and_changes_nothing():
    queue = Queue()
    task = await asked(queue, plain_call())
    (held,) = await queue.take(wait=0)
    await held.reply(text="first")
    with pytest.raises(ReplyRefused):
        await held.reply(text="second")
    with pytest.raises(ReplyRefused):
        await held.fail("late")
    assert (await task).message.text == "first"


async def test_a_reply_after_the_reader_left_or_the_rollout_closed_is_refused():
    queue = Queue()
    gone = await asked(queue, plain_call(rollout_id="gone"))
    closed = await asked(queue, plain_call(rollout_id="closed"))
    held = {h.call.rollout_id: h for h in await queue.take(wait=0)}
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await queue.closed("closed")
    for one in held.values():
        with pytest.raises(ReplyRefused):
            await one.reply(text="late")
    with pytest.raises(PolicyClosed):
        await closed
    with pytest.raises(PolicyClosed):
        await queue(plain_call(rollout_id="closed"))
    assert queue.held == 0


async def test_a_call_whose_reader_left_is_never_handed_out():
    queue = Queue()
    task = await asked(queue, plain_call())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(TimeoutError):
        await queue.take(timeout=0.01)


async def test_overflow_is_an_error_not_a_drop():
    queue = Queue(max_held=1)
    first = await asked(queue, plain_call())
    with pytest.raises(UpstreamError) as refused:
        await queue(plain_call())
    assert refused.value.status == 503
    (held,) = await queue.take(wait=0)
    await held.reply(text="ok")
    assert (await first).message.text == "ok"


async def test_an_error_from_the_trainer_reaches_the_gate_with_its_status():
    queue = Queue()
    task = await asked(queue, plain_call())
    (held,) = await queue.take(wait=0)
    await held.fail("out of memory on rank 3", status=500)
    with pytest.raises(UpstreamError) as failed:
        await task
    assert failed.value.status == 500


async def test_nobody_answering_ends_the_call_with_504():
    queue = Queue(hold_s=0.01)
    with pytest.raises(UpstreamError) as late:
        await queue(plain_call())
    assert late.value.status == 504 and queue.held == 0


async def test_a_plain_thread_drains_the_queue_without_a_loop():
    queue = Queue()
    seen = []

    def trainer():
        session = queue.session("r1")
        while (held := session.next_request_sync(timeout=10)) is not None:
            seen.append(held.call.id)
            held.reply_sync(text=f"answer {len(seen)}")

    thread = threading.Thread(target=trainer)
    thread.start()
    replies = [await queue(plain_call()) for _ in range(20)]
    await queue.closed("r1")
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive() and len(seen) == 20
    assert [r.message.text for r in replies] == [f"answer {n}" for n in range(1, 21)]


async def test_trainers_in_other_loops_and_threads_never_lose_or_double_an_answer():
    queue = Queue()
    answered: list[str] = []

    def another_loop():
        async def drain():
            while batch := await queue.take(max=4, wait=0):
                for held in batch:
                    await held.reply(text=held.call.id)
                    answered.append(held.call.id)

        asyncio.run(drain())

    def blocking():
        while batch := queue.take_sync(max=3, wait=0):
            for held in batch:
                held.reply_sync(text=held.call.id)
                answered.append(held.call.id)

    threads = [threading.Thread(target=target) for target in (another_loop, another_loop, blocking, blocking)]
    for thread in threads:
        thread.start()
    calls = [plain_call(rollout_id=f"r{n % 7}") for n in range(300)]
    replies = await asyncio.gather(*(queue(call) for call in calls))
    await queue.aclose()
    for thread in threads:
        await asyncio.to_thread(thread.join, 10)
    assert [r.message.text for r in replies] == [c.id for c in calls]
    assert sorted(answered) == sorted(c.id for c in calls)


async def test_the_recorded_ids_are_the_ones_the_trainer_gave():
    """R2: ids, logprobs and version of the trainer's own forward pass."""
    queue = Queue(renderer=ByteRenderer())
    task = await asked(queue, plain_call(user("2+2?")))
    (held,) = await queue.take(wait=0)
    assert ByteRenderer().decode(held.call.prompt_ids) == "<user>2+2?<end><assistant>"
    sampled = [*b"four", END]
    await held.reply(sampled, [-0.5] * 5, version=7)
    reply = await task
    assert list(reply.completion_ids) == sampled and reply.logprobs == floats([-0.5] * 5)
    assert reply.capture == "tokens" and reply.version_start == 7 and reply.message.text == "four"
    assert reply.finish == "stop" and reply.prompt_ids == held.call.prompt_ids


async def test_a_turn_without_its_stop_token_is_recorded_as_cut():
    queue = Queue(renderer=ByteRenderer())
    task = await asked(queue, plain_call())
    (held,) = await queue.take(wait=0)
    await held.reply([*b"fou"], [-1.0] * 3)
    assert (await task).finish == "length"


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (([1, 2], [-0.1]), {}),
        (([1], [0.5]), {}),
        (([1], [float("nan")]), {}),
        (([1], [-9999.0]), {}),
        (([-1], [-0.1]), {}),
        ((["x"], [-0.1]), {}),
        ((), {}),
    ],
)
async def test_an_answer_that_contradicts_itself_is_refused_and_the_call_stays_open(args, fields):
    queue = Queue(renderer=ByteRenderer())
    task = await asked(queue, plain_call())
    (held,) = await queue.take(wait=0)
    with pytest.raises(ReplyRefused):
        await held.reply(*args, **fields)
    await held.reply([END], [-0.1])
    assert list((await task).completion_ids) == [END]


async def test_the_gate_can_answer_by_call_id():
    queue = Queue()
    call = plain_call()
    task = await asked(queue, call)
    reply = Reply(message=Message("assistant", (Text("by id"),)), completion_ids=ids([5]), logprobs=floats([-1.0]))
    await queue.reply(call.id, reply)
    assert (await task).completion_ids == ids([5])
    with pytest.raises(ReplyRefused):
        await queue.reply(call.id, reply)
    with pytest.raises(ReplyRefused):
        await queue.cancel("call_unknown", "no")
