"""Run by a Python that has some version of the real e2b SDK: drives a server through it and prints what it saw as JSON."""

import io
import json
import sys
import time

import e2b
from e2b import Sandbox, SandboxQuery

url = sys.argv[1]
key = sys.argv[2] if len(sys.argv) > 2 else "e2b_" + "0" * 40
options = {"api_key": key, "api_url": url, "sandbox_url": url}
seen = {}


def raised(call):
    try:
        call()
    except Exception as error:  # the kind is what the test asks for
        return type(error).__name__
    return None


box = Sandbox.create(timeout=120, metadata={"who": "a b&c"}, envs={"COLOUR": "blue", "HOME": "/tmp"}, **options)
run = box.commands.run
profile = run("true").stdout  # what the login shell of this machine says by itself
done = run("echo out; echo err >&2; echo $COLOUR $SHAPE", envs={"SHAPE": "round"})
seen["run"] = [done.exit_code, done.stdout.removeprefix(profile), done.stderr]
seen["failed"] = raised(lambda: run("exit 7"))
seen["bad_cwd"] = raised(lambda: run("true", cwd="/no/such/place"))
seen["timeout"] = raised(lambda: run("sleep 30", timeout=1))

handle = run("for i in 1 2 3; do echo $i; sleep 0.1; done; exit 5", background=True)
pid = handle.pid
seen["listed"] = pid in [process.pid for process in box.commands.list()]
handle.disconnect()
try:
    box.commands.connect(pid).wait()
except e2b.CommandExitException as error:
    seen["rejoined"] = error.exit_code
sleeper = run("sleep 60 & sleep 60", background=True)
seen["killed"] = [sleeper.kill(), box.commands.kill(sleeper.pid), box.commands.kill(99999)]
seen["killed_as"] = raised(sleeper.wait)
reader = run("cat", background=True, stdin=True)
box.commands.send_stdin(reader.pid, "over the wire\n")
if hasattr(box.commands, "close_stdin"):
    box.commands.close_stdin(reader.pid)
    seen["stdin"] = reader.wait().stdout.removeprefix(profile)
else:
    time.sleep(0.5)
    reader.kill()

odd = bytes(range(256)) * 1000
box.files.write("/tmp/deep/er/file", odd)
seen["bytes"] = bytes(box.files.read("/tmp/deep/er/file", format="bytes")) == odd
box.files.write("/tmp/text", "grüße")
seen["text"] = box.files.read("/tmp/text")
box.files.write("/tmp/big", io.BytesIO(odd * 12))
seen["big"] = run("wc -c < /tmp/big").stdout.removeprefix(profile).strip()
if hasattr(box.files, "write_files"):
    box.files.write_files([{"path": "/tmp/many/1", "data": "one"}, {"path": "/tmp/many/2", "data": "two"}])
    seen["many"] = sorted(entry.name for entry in box.files.list("/tmp/many"))
seen["exists"] = [box.files.exists("/tmp/text"), box.files.exists("/tmp/none")]
seen["made"] = [box.files.make_dir("/tmp/d"), box.files.make_dir("/tmp/d")]
box.files.rename("/tmp/text", "/tmp/d/moved")
seen["moved"] = [box.files.exists("/tmp/text"), box.files.read("/tmp/d/moved"), box.files.get_info("/tmp/d").type.value]
box.files.remove("/tmp/d")
seen["removed"] = box.files.exists("/tmp/d")
seen["missing"] = raised(lambda: box.files.read("/tmp/none"))

info = box.get_info()
seen["info"] = [info.sandbox_id == box.sandbox_id, info.metadata, info.state.value]
seen["running"] = box.is_running()
box.set_timeout(300)
again = Sandbox.connect(box.sandbox_id, **options)
seen["connected"] = again.commands.run("cat /tmp/deep/er/file | wc -c").stdout.removeprefix(profile).strip()
other = Sandbox.create(timeout=120, **options)
plain = {name: value for name, value in options.items() if name != "sandbox_url"}
pages = Sandbox.list(query=SandboxQuery(metadata={"who": "a b&c"}), **plain)
seen["by_metadata"] = [one.sandbox_id for one in pages.next_items()] == [box.sandbox_id]
pages = Sandbox.list(limit=1, **plain)
both = {one.sandbox_id for one in pages.next_items()}
seen["more"] = pages.has_next
both |= {one.sandbox_id for one in pages.next_items()}
seen["paged"] = both == {box.sandbox_id, other.sandbox_id} and not pages.has_next
other.kill()
seen["kill"] = [box.kill(), box.kill()]
seen["running_after"] = box.is_running()
seen["use_after"] = raised(lambda: run("true")) is not None
print(json.dumps(seen))
