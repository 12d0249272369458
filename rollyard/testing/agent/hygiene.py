"""H: keys, the network, and ordinary users."""

from __future__ import annotations

from fnmatch import fnmatch
from importlib.resources import files

from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.rollout.prepare import HOME
from rollyard.testing.agent.fixture import DONE, WRITE, AgentFixture
from rollyard.testing.suite import Skip, case, check

_LISTENER = "/tmp/names.py"
_NAMES = "/tmp/names.txt"


@case("H1", "shows its key in no argument, and leaves it in no file", needs=("model", "shell"), timeout=300)
async def key(fixture: AgentFixture) -> None:
    found: list[str] = []

    async def look(sandbox: Sandbox, rollout: Rollout) -> None:
        script = f'grep -rlaF -- "$NEEDLE" {HOME} /workspace /tmp 2>/dev/null; true'
        done = await sandbox.exec(script, env={"NEEDLE": fixture.key}, timeout=60)
        found.extend(done.stdout.decode("utf-8", "replace").split())

    listing = {"shell": "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p; echo; done > /workspace/arguments.txt"}
    steps = fixture.script(listing, WRITE, DONE)
    seen = await fixture.run(steps, hooks=Hooks(teardown=(look,)), collect=["arguments.txt"])
    seen.check_solved()
    arguments = seen.rollout.files.get("/workspace/arguments.txt", b"")
    check(arguments, "the list of processes was not written")
    check(fixture.key.encode() not in arguments, "the key is in the arguments of a process")
    check(not found, f"the key lies in {found}")


@case("H2", "looks for nothing outside its loopback", needs=("model",), timeout=300)
async def names(fixture: AgentFixture) -> None:
    listens: list[bool] = []

    async def listen(sandbox: Sandbox, rollout: Rollout) -> None:
        user = "root" if sandbox.capabilities.users else None
        await sandbox.write(_LISTENER, files("rollyard.testing.agent").joinpath("names.py").read_bytes(), user=user)
        await sandbox.start(["python3", _LISTENER, _NAMES], user=user)
        waiting = f"for i in $(seq 50); do test -s {_NAMES} && exit 0; sleep 0.1; done; exit 1"
        listens.append((await sandbox.exec(waiting, timeout=60)).ok)

    seen = await fixture.run(collect=[_NAMES], hooks=Hooks(after_setup=(listen,)))
    if listens != [True]:
        raise Skip("nothing can listen on port 53 in this sandbox")
    seen.check_solved()
    names = sorted(set(seen.rollout.files.get(_NAMES, b"").decode().split()) - {"listening"})
    unknown = [name for name in names if not any(fnmatch(name, known) for known in fixture.agent.asks_for)]
    check(not unknown, f"it asked for {', '.join(unknown)}")


@case("H3", "works as an ordinary user", needs=("model",), timeout=300)
async def ordinary(fixture: AgentFixture) -> None:
    if fixture.agent.root == "needs":
        raise Skip("it needs root, and says so")
    if not fixture.backend.capabilities.users:
        raise Skip(f"backend {fixture.backend.name!r} has no other users")
    other = AgentFixture(agent=fixture.agent, backend=fixture.backend, user="nobody", provision=fixture.provision)
    (await other.run()).check_solved()
