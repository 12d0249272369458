"""shell-agent: small enough for the smallest model, and honest about how it ended."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.inside import __file__ as inside
from rollyard.testing.agent import AgentFixture

pytestmark = [pytest.mark.anyio, pytest.mark.agent]


@pytest.fixture
async def fixture():
    async with ry.sandbox.backend("local") as backend:
        yield AgentFixture(agent=ry.agents.get("shell-agent"), backend=backend)


async def test_its_first_request_is_under_500_bytes(fixture):
    seen = await fixture.run(instruction="Write hello into out.txt")
    seen.check_solved()
    assert len(seen.calls[0].raw) < 500


async def test_long_output_is_cut_in_the_middle_and_a_bad_exit_code_is_said(fixture):
    seen = await fixture.run([{"shell": "seq 100000; exit 3"}, {"text": "done"}])
    (result,) = seen.calls[1].messages[-1].tool_results
    text = result.parts[0].text
    assert len(text) < 4100
    assert text.startswith("1\n2\n")
    assert text.endswith("100000\nexit code 3")


async def test_its_commands_do_not_inherit_the_key(fixture):
    seen = await fixture.run([{"shell": "env > env.txt"}, {"text": "done"}], collect=["env.txt"])
    assert fixture.key.encode() not in seen.rollout.files["/workspace/env.txt"]


ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "hello"}}]}).encode()
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"5;x=y\r\n" + ANSWER[:5] + b"\r\n%x\r\n" % len(ANSWER[5:]) + ANSWER[5:] + b"\r\n0\r\n\r\n"
CUT = "the server closed the connection before its answer was complete"


@pytest.mark.parametrize(
    ("answers", "ok", "text"),
    [
        ([WHOLE + ANSWER], True, "hello"),
        ([CHUNKED + CHUNKS], True, "hello"),
        ([b"HTTP/1.0 200\r\n\r\n" + ANSWER], True, "hello"),
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", WHOLE + ANSWER], True, "hello"),
        ([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"], False, "OSError: HTTP Error 400: Bad Request"),
        ([WHOLE + ANSWER[:-1]], False, f"OSError: {CUT}"),
        ([CHUNKED + CHUNKS[:-20]], False, f"OSError: {CUT}"),
        ([WHOLE[:20]], False, f"OSError: {CUT}"),
    ],
)
async def test_it_takes_each_form_of_an_answer_whole_or_not_at_all(tmp_path, answers, ok, text):
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
        writer.write(left.pop(0))
        writer.close()

    (tmp_path / "words").write_text("x")
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    env = {"AGENT_LOOP_URL": f"http://127.0.0.1:{port}/v1", "AGENT_LOOP_MODEL": "m", "ROLLYARD_KEY": "k"}
    program = tmp_path / "agent_loop.py"
    program.write_bytes(Path(inside).with_name("agent_loop.py").read_bytes())
    argv = (sys.executable, "-I", "-S", program, tmp_path / "words", tmp_path / "words")
    async with server:
        agent = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
        printed, _ = await agent.communicate()
    assert json.loads(printed.splitlines()[-1]) == {"type": "done", "ok": ok, "text": text}
    assert not left
