"""Run by a Python that has the real rl-rock package, with ROCK_BASE_URL and nothing else: prints what it saw as JSON."""

import asyncio
import json
import logging
import os
import sys
import tempfile

import rock
from rock.actions import BashAction, Command, CreateBashSessionRequest, ReadFileRequest, WriteFileRequest
from rock.sdk.sandbox.client import Sandbox
from rock.sdk.sandbox.config import SandboxConfig

logging.disable(logging.CRITICAL)


async def raised(call):
    try:
        await call
    except Exception as error:  # the words are what the test asks for
        return str(error)
    return None


async def boxes():
    seen = {}
    where = os.environ["ROCK_BASE_URL"]
    config = SandboxConfig(base_url=where, image="host", memory="512m", cpus=1, disk="1g", auto_clear_seconds=120)
    box = Sandbox(config)
    await box.start()
    seen["alive"] = bool(await box.is_alive())
    done = await box.execute(Command(command=["sh", "-c", "echo out; echo err >&2; exit 3"]))
    seen["execute"] = [done.stdout, done.stderr, done.exit_code]
    await box.create_session(CreateBashSessionRequest(session="one", env={"COLOUR": "blue"}))
    await box.arun("cd /tmp && SHAPE=round", session="one")
    seen["shell"] = (await box.arun("pwd; echo $COLOUR $SHAPE; cat", session="one")).output
    seen["raised"] = await raised(box.arun("ls /no/such/place", session="one"))
    quiet = BashAction(command="echo grüße; false", session="one", check="silent")
    silent = await box._run_in_session(quiet)
    seen["silent"] = [silent.output, silent.exit_code]
    seen["again"] = (await box.arun("pwd", session="one")).output
    seen["nohup"] = (await box.arun("echo slept", session="one", mode="nohup", wait_interval=5)).output
    await box.write_file(WriteFileRequest(content="written", path="/tmp/a"))
    seen["read"] = (await box.read_file(ReadFileRequest(path="/tmp/a"))).content
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("uploaded")
        file.flush()
        seen["upload"] = (await box.upload_by_path(file.name, "/tmp/b")).success
    seen["uploaded"] = (await box.arun("cat /tmp/b", session="one")).output
    other = Sandbox(SandboxConfig(base_url=where))
    await other.attach(box.sandbox_id)
    seen["attached"] = [other.config.image, other.config.memory]
    seen["restart"] = await raised(box.restart())
    await box.stop()
    await box.delete()
    seen["gone"] = await raised(box.get_status())
    seen["kata"] = await raised(Sandbox(SandboxConfig(base_url=where, image="host", use_kata_runtime=True)).start())
    return seen


def game(name):
    env = rock.make(name)
    first = env.reset(seed=7)
    steps = [env.step("2"), env.step("7")]
    env.close()
    return {"first": first, "steps": steps}


print(json.dumps({**asyncio.run(boxes()), "game": game(sys.argv[1])}))
