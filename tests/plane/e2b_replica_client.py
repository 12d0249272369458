"""Run by a Python that has the real e2b SDK: starts programs at one server, or goes on with them at another."""

import json
import os
import sys

from e2b import CommandExitException, Sandbox

options = {"api_key": os.environ["E2B_API_KEY"], "api_url": os.environ["E2B_API_URL"]}
options["sandbox_url"] = options["api_url"]
if sys.argv[1] == "start":
    box = Sandbox.create(timeout=300, **options)
    reader = box.commands.run("echo begun; read line; echo got $line; exit 3", background=True, stdin=True)
    counter = box.commands.run("for i in 1 2 3; do echo $i; done", background=True)
    counter.wait()
    for out, _, _ in reader:  # read up to here, and left
        if "begun" in (out or ""):
            break
    reader.disconnect()
    told = {"id": box.sandbox_id, "pid": reader.pid, "ended": counter.pid}
else:
    box = Sandbox.connect(sys.argv[2], **options)
    pid = int(sys.argv[3])
    listed = [one.pid for one in box.commands.list()]
    new = box.commands.run("echo new", background=True)
    box.commands.send_stdin(pid, "it\n")
    try:
        box.commands.connect(pid).wait()
        said = None
    except CommandExitException as error:
        said = [error.exit_code, error.stdout]
    told = {"listed": listed, "said": said, "new": new.pid, "killed": box.commands.kill(99999)}
    box.kill()
print(json.dumps(told))
