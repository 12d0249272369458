"""Laws of the graph over random rollouts: several conversations, echoes that agents rewrote, retries, re-rendered prompts,
compactions, sub-agents, turns without ids, failures, and parents that arrive after their children."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.core.call import Call, Reply, floats, ids
from rollyard.core.message import Message, Text, Thinking, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.trajectory.trajectory import Trajectory

TOOLS = (ToolSpec("sh"),)
OPS = ("turn", "turn", "turn", "retry", "drift", "edit", "compact", "spawn", "blind", "fail", "late")


class World:
    """Plays agents against a trajectory and remembers what the model was really given and what it sampled."""

    def __init__(self, data):
        self.data = data
        self.trajectory = Trajectory("r")
        self.prompts, self.completions = {}, {}
        self.kept, self.committed = {}, []  # as a store has them
        self.conversations = []
        self.count = 0
        self.delayed = []
        self.start("agent")

    def draw(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def number(self, low, high):
        return self.data.draw(st.integers(low, high))

    def start(self, kind):
        name = f"{kind} {len(self.conversations)}" if self.draw(True, False) else kind
        messages = [Message("system", (Text(name),)), Message("user", (Text("go"),))]
        self.conversations.append({"kind": kind, "messages": messages, "ids": [1, len(name), 3], "thread": name})

    def answer(self):
        self.count += 1
        parts = [Thinking("hm")] if self.draw(True, False) else []
        parts += [Text(self.draw("ok ", "so", ""))]
        parts += [ToolCall(f"t{self.count}-{n}", "sh", '{"a": 1}') for n in range(self.number(0, 2))]
        return Message("assistant", tuple(parts))

    def echo(self, answer):
        """What an agent sends back: sometimes re-serialised, trimmed, without thinking, or split."""
        parts = (
            tuple(p for p in answer.parts if not isinstance(p, Thinking)) if self.draw(True, False) else answer.parts
        )
        parts = tuple(Text(p.text.strip()) if isinstance(p, Text) else p for p in parts)
        parts = tuple(ToolCall(p.id, p.name, '{"a":1}') if isinstance(p, ToolCall) else p for p in parts)
        calls = [p for p in parts if isinstance(p, ToolCall)]
        results = [Message("tool", (ToolResult(c.id, (Text(self.draw("x", "y")),)),)) for c in calls]
        if len(calls) == 2 and self.draw(True, False):
            head = tuple(p for p in parts if p is not calls[1])
            return [Message("assistant", head), results[0], Message("assistant", (calls[1],)), results[1]]
        user = [] if calls else [Message("user", (Text(self.draw("go on", "more")),))]
        return [Message("assistant", parts), *results, *user]

    def ask(self, conversation, *, blind=False, fail=False):
        self.count += 1
        call = Call(
            id=f"c{self.count}",
            rollout_id="r",
            dialect="chat",
            model="m",
            messages=tuple(conversation["messages"]),
            tools=TOOLS,
            tools_digest=tools_digest(TOOLS),
            kind=conversation["kind"],
            thread=conversation["thread"],
            raw=repr(conversation["messages"]).encode(),
        )
        prompt, completion = list(conversation["ids"]), [self.number(0, 9) for _ in range(self.number(1, 4))]
        if fail:
            return call, None, prompt, completion
        reply = Reply(
            message=self.answer(),
            prompt_ids=None if blind else ids(prompt),
            completion_ids=None if blind else ids(completion),
            logprobs=None if blind else floats([-1.0] * len(completion)),
        )
        return call, reply, prompt, completion

    def add(self, call, reply, prompt, completion):
        added = self.trajectory.add(call, reply, error=None if reply else "broken")
        self.committed.append(added.record)
        for node in added.nodes:
            self.kept[node.id] = node
        if reply is not None and reply.completion_ids is not None:
            self.prompts[call.id], self.completions[call.id] = prompt, completion
        return added

    def go_on(self, conversation, answer, prompt, completion):
        conversation["messages"] += self.echo(answer)
        conversation["ids"] = [*prompt, *completion, *(self.number(10, 19) for _ in range(self.number(1, 3)))]

    def step(self):
        op = self.draw(*OPS)
        conversation = self.conversations[self.number(0, len(self.conversations) - 1)]
        if op == "spawn":
            self.start("subagent")
            return
        if op == "drift":
            cut = self.number(0, len(conversation["ids"]) - 1)
            conversation["ids"][cut] += 100
        if op == "edit":
            at = self.number(0, len(conversation["messages"]) - 1)
            conversation["messages"][at] = Message(conversation["messages"][at].role, (Text("edited"),))
            conversation["ids"] = [n + 200 for n in conversation["ids"]]
        if op == "compact":
            conversation["messages"] = [conversation["messages"][0], Message("user", (Text(f"sum {self.count}"),))]
            conversation["ids"] = [1, 5, self.count]
        asked = self.ask(conversation, blind=op == "blind", fail=op == "fail")
        call, reply, prompt, completion = asked
        if op == "late" and reply is not None:
            self.delayed.append(asked)
        else:
            self.add(*asked)
        if op == "retry":
            again = self.ask(conversation)
            self.add(*again)
            if self.draw(True, False):
                call, reply, prompt, completion = again
        if reply is not None:
            self.go_on(conversation, reply.message, prompt, completion)

    def finish(self):
        for asked in self.delayed:
            self.add(*asked)
        self.delayed.clear()


def check(world):
    t = world.trajectory
    for call_id, prompt in world.prompts.items():
        assert list(t.prompt_ids(call_id)) == prompt
        assert list(t.sequence(call_id)) == prompt + world.completions[call_id]
        assert list(t.answer(call_id).ids) == world.completions[call_id]
    trained = {}
    for branch in t.branches:
        if branch.ids is None:
            assert branch.trained == 0
            continue
        last = next(call_id for call_id in reversed(branch.call_ids) if call_id in world.prompts)
        assert list(branch.ids) == list(t.sequence(last))
        assert len(branch.mask) == len(branch.logprobs) == len(branch.versions) == len(branch.ids)
        for span in branch.spans:
            masked = branch.mask[span.start : span.end].count(1)
            assert masked in (0, span.end - span.start)
            assert span.sampled or not masked
            if masked:
                trained[span.node] = trained.get(span.node, 0) + 1
    leafs = {t.record(call_id).leaf for call_id in world.prompts}
    assert trained == dict.fromkeys(leafs, 1)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_token_changes_and_each_answer_trains_once(data):
    world = World(data)
    for _ in range(data.draw(st.integers(1, 14))):
        world.step()
        check(world)
    world.finish()
    check(world)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_restored_graph_is_the_same_graph(data):
    world = World(data)
    for _ in range(data.draw(st.integers(1, 10))):
        world.step()
    world.finish()
    t = world.trajectory
    again = Trajectory.restore("r", world.committed, world.kept.values())
    assert again.records == t.records
    assert again.nodes == t.nodes
    assert again.branches == t.branches
    for conversation in world.conversations:
        call = world.ask(conversation)[0]
        assert again.match(call) == t.match(call)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_straight_conversation_is_one_branch_whatever_the_agent_does_to_echoes(data):
    world = World(data)
    conversation = world.conversations[0]
    for turn in range(data.draw(st.integers(1, 12))):
        call, reply, prompt, completion = world.ask(conversation)
        parent = world.trajectory.match(call).continues
        assert (parent is None) == (turn == 0)
        assert parent is None or list(parent.ids()) == prompt[: len(parent.ids())]
        added = world.add(call, reply, prompt, completion)
        assert added.record.edge == ("extends" if turn else "root")
        assert added.record.break_reason == (None if turn else "new_root")
        assert len(added.nodes) <= 4
        world.go_on(conversation, reply.message, prompt, completion)
    assert len(world.trajectory.branches) == 1
