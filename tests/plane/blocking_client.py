"""A script as people write them, against a server it starts itself: `python blocking_client.py FOLDER`."""

import subprocess
import sys
from pathlib import Path

import rollyard as ry
from rollyard import sync
from rollyard.core.errors import PlaneNotFound

folder = Path(sys.argv[1])
command = "from rollyard.cli.main import main; main()"
options = ["--store", str(folder / "p.db"), "--engine", "local", "--port", "0", "--print-env"]
server = subprocess.Popen(
    [sys.executable, "-c", command, "serve", "plane", *options, "--admin-key-file", str(folder / "key")],
    stdout=subprocess.PIPE,
    text=True,
)
try:
    env = {}
    while "ROLLYARD_KEY" not in env:  # the last one
        name, _, value = server.stdout.readline().strip().partition("=")
        assert name, "the server ended"
        env[name] = value
    with sync.wrap(ry.plane.connect(env["ROLLYARD_URL"], env["ROLLYARD_KEY"])) as plane:
        print(plane.envs.create("e", "1", image="host")["id"])
        made = plane.instances.create(env="e@1", labels={"a": "b"})
        print(str(plane.instances.exec(made["id"], "echo hi").stdout).replace(" ", ""))
        print(len(list(plane.instances.list(labels={"a": "b"}))))
        print(plane.instances.delete_many(labels={"a": "b"})[made["id"]])
        try:
            plane.instances.get(made["id"])
        except PlaneNotFound as error:
            print(type(error).__name__)
finally:
    server.terminate()
    server.wait(60)
