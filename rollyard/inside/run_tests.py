"""Run tests and record how they ended, out of reach of what they run: `python3 -I -S run_tests.py < PLAN.json`.

The record says what pytest said of each test while it ran (`pytest_witness.py`), how the controls ended, the exit code and the
digest of the log. It is signed with the plan's `key`, which stands in no file and in no argument. The log is read through a pipe:
a test can add to it and take nothing away. A program of the same user that reads this process's memory could still sign a
record of its own. Runs on old Pythons.

Of the plan:
- `prepare`, a script that must succeed first; `command`, a shell text, or a list of words;
- `log` and `record`, the files to write; `key`; `echo`, whether the log is printed, too;
- `site`, a program (`pytest`, `tox`) whose Python gets the plugin, which `@WITNESS@` in the command then loads; or `witness`,
  the file that a list of words starts in place of pytest;
- `control`, of a runner that is not pytest: `path`, `argument` and `text`, in which NAME stands for a name that is chosen here.
"""

import hashlib
import hmac
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time

LINGER_S = 2.0  # for output of programs that the tests left running
MOST = 96 * 2**20  # bytes of messages


def main():
    plan = json.loads(sys.stdin.read())
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "pytest_witness.py")) as file:
        witness = file.read()  # before anything of the code under test runs
    chance = random.SystemRandom()
    place = tempfile.mkdtemp()
    channel = os.path.join(place, name_at_random(chance))
    os.mkfifo(channel, 0o600)
    reading = os.open(channel, os.O_RDONLY | os.O_NONBLOCK)
    key = "%032x" % chance.getrandbits(128)
    witness += "\nCHANNEL = {!r}\nKEY = {!r}\n".format(channel, key)
    record = {"prepared": True, "starts": 0, "ends": 0, "tests": [], "controls": [], "strange": 0, "control": None}
    record["places"] = ["", ""]
    if plan.get("prepare") and subprocess.call(["bash", "-c", plan["prepare"]], stdin=subprocess.DEVNULL):
        record["prepared"] = False
    else:
        run(plan, record, witness, channel, reading, key, chance)
    body = json.dumps(record).encode("ascii")
    signed = hmac.new(plan["key"].encode("ascii"), body, hashlib.sha256).hexdigest()
    with open(plan["record"], "wb") as file:
        file.write(signed.encode("ascii") + b"\n" + body)
    code = record.get("exit", 1)
    sys.exit(code if 0 <= code <= 255 else 1)


def run(plan, record, witness, channel, reading, key, chance):
    command = plan["command"]
    if plan.get("site"):
        module = name_at_random(chance)
        folder = find_packages(plan["site"])
        if not os.access(folder, os.W_OK):
            folder = os.path.dirname(channel)
            known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
            plan["variables"] = {"PYTHONPATH": os.pathsep.join([folder, *known])}
        with open(os.path.join(folder, module + ".py"), "w") as file:
            file.write(witness)
        plan["written"] = file.name
        command = command.replace("@WITNESS@", "-p " + module)
    elif plan.get("witness"):
        with open(plan["witness"], "w") as file:
            file.write(witness + START)
    if plan.get("control"):
        name = name_at_random(chance)
        control = dict((part, text.replace("NAME", name)) for part, text in plan["control"].items())
        with open(control["path"], "w") as file:
            file.write(control["text"])
        record["control"] = name
        command = command.replace("@CONTROL@", control["argument"])
    program = ["bash", "-c", command] if not isinstance(command, list) else command
    ended = threading.Event()
    hearing = threading.Thread(target=hear, args=(reading, key, record, ended))
    hearing.start()
    try:
        record.update(run_logged(program, plan))
    finally:
        ended.set()
        hearing.join()
        if plan.get("written"):
            os.remove(plan["written"])


START = """
if __name__ == "__main__":
    import importlib.util
    import types

    plugin = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # as with `-m pytest`, which programs that tests start ask
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("pytest.__main__")
    code = pytest.main(sys.argv[1:], plugins=[plugin])
    sys.stdout.flush()
    sys.exit(code)
"""


def find_packages(program):
    """The folder of packages of this program's Python; none where that Python does not say."""
    command = [find_python(program), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    try:
        return subprocess.check_output(command, cwd="/").decode().strip().splitlines()[-1]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def find_python(program):
    """The interpreter that a script of this name is started by."""
    path = shutil.which(program)
    with open(path, "rb") if path else open(os.devnull, "rb") as file:
        line = file.readline().decode("utf-8", "replace").strip()
    found = line[2:].strip() if line.startswith("#!") else ""
    return found if os.path.basename(found).startswith("python") and os.path.isfile(found) else "python"


def name_at_random(chance):
    """A name as a project's own: letters alone."""
    return "".join(chance.choice("abcdefghiklmnoprstuvy") for _ in range(12))


def run_logged(program, plan):
    """The exit code and the digest of all that was printed."""
    digest, size = hashlib.sha256(), 0
    child = subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a signal to the group of the tests does not end this process
        env=dict(os.environ, **plan.get("variables", {})),
    )
    source = child.stdout.fileno()
    os.set_blocking(source, False)
    until = None
    with open(plan["log"], "wb") as log:
        while True:
            if until is None and child.poll() is not None:
                until = time.time() + LINGER_S
            ready = select.select([source], [], [], 0.05)[0]
            data = os.read(source, 65536) if ready else None
            if data:
                digest.update(data)
                size += len(data)
                log.write(data)
                if plan.get("echo"):
                    os.write(1, data)
            elif data == b"" or until is not None:
                break
            if until is not None and time.time() > until:
                break
    return {"exit": child.wait(), "sha256": digest.hexdigest(), "size": size}


def hear(reading, key, record, ended):
    """Messages of the plugin, until the tests have ended and nothing is left to read."""
    rest, total = b"", 0
    while True:
        last = ended.is_set()
        ready = select.select([reading], [], [], 0.05)[0]
        try:
            data = os.read(reading, 65536) if ready else b""
        except OSError:
            data = b""
        total += len(data)
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        if total > MOST:
            record["strange"], lines = 1, []  # read on, so that no writer waits for ever
        for line in lines:
            note(line, key, record)
        if not data:
            if last:
                record["strange"] += bool(rest)
                return
            time.sleep(0.01)  # a FIFO without a writer is always ready, and empty


def note(line, key, record):
    try:
        message = json.loads(line.decode("ascii"))
        if message[0] != key:
            raise ValueError("another key")
        kind, values = message[1:]
    except (ValueError, LookupError, TypeError):
        record["strange"] += 1
        return
    if kind == "test":
        record["tests"].append([clean(value) for value in values] + [clean(show(values[0], *record["places"]))])
    elif kind == "control":
        record["controls"].append(values[1])
    elif kind == "start":
        record["starts"] += 1
        record["places"] = values
    else:
        record["ends"] += 1


def show(node, root, cwd):
    """The name of a test as pytest's summary prints it, from the working directory."""
    path, mark, rest = node.partition("::")
    return os.path.relpath(os.path.join(root, path), cwd) + mark + rest if path else node


def clean(value):
    """Text that is UTF-8, also of a name that was none."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


if __name__ == "__main__":
    main()
