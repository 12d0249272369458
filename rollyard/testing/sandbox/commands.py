"""`exec`: one program, its output and its end, exactly."""

from __future__ import annotations

import os
import secrets

import anyio

from rollyard.core.errors import Error, PathError
from rollyard.core.sandbox import Resources, at_least
from rollyard.testing.sandbox.fixture import (
    SandboxFixture,
    all_beat,
    eventually,
    hearts,
    none_beats,
    out,
    raises,
    scratch,
    sh,
)
from rollyard.testing.suite import Skip, case, check

AWKWARD = "a 'single' \"double\" $(echo no) `echo no` $HOME \\ \n line two\ttab ; & | * ? ~ ünïcode 日本 \x01"


@case("E1", "returns the exit code as it is, and a failure is no error")
async def exit_codes(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        for code in (0, 1, 7, 42, 255):
            done = await sh(box, f"exit {code}")
            check(done.exit_code == code and done.ok == (code == 0), f"exit {code} came back as {done.exit_code}")
            check(not done.timed_out and not done.lost and done.signal is None, f"exit {code} came back as {done}")


@case("E2", "tells a program that does not exist, or cannot run, from one that failed")
async def not_found(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        check((await sh(box, "no-such-program-here")).exit_code == 127, "a missing program in a script is not 127")
        await box.write(f"{tmp}/plain", "text", mode=0o644)
        for program, code, name in (("/no/such/program", 127, "ENOENT"), (f"{tmp}/plain", 126, "EACCES")):
            try:
                done = await box.exec([program], timeout=30)
            except PathError as error:
                check(
                    name in str(error) and program in str(error), f"{program}: the error does not say {name}: {error}"
                )
            else:
                check(done.exit_code == code, f"{program} is {done.exit_code}, not {code}")


@case("E3", "keeps stdout and stderr apart")
async def separate_streams(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await sh(box, "echo one; echo two >&2; echo three")
        check((done.stdout, done.stderr) == (b"one\nthree\n", b"two\n"), f"got {done.stdout!r} and {done.stderr!r}")


@case("E4", "passes environment values unchanged, whatever is in them")
async def environment(fixture: SandboxFixture) -> None:
    async with fixture.open(env={"FROM_SPEC": AWKWARD}) as box:
        for name in ("FROM_SPEC", "FROM_EXEC"):
            done = await box.exec(["sh", "-c", f'printf %s "${name}"'], env={"FROM_EXEC": AWKWARD}, timeout=30)
            check(done.stdout.decode() == AWKWARD, f"{name} came back as {done.stdout!r}")
        over = await box.exec(["sh", "-c", "echo $FROM_SPEC"], env={"FROM_SPEC": "mine"}, timeout=30)
        check(over.stdout == b"mine\n", "a value given to exec does not replace the sandbox's")


@case("E5", "never puts environment values into a command line")
async def environment_is_no_argument(fixture: SandboxFixture) -> None:
    secret = f"canary-{secrets.token_hex(8)}"
    async with fixture.open(env={"API_KEY": secret}) as box:
        await box.start(["sleep", "30"], env={"OTHER": secret})
        seen = await out(box, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
        check(secret not in seen, "an environment value is visible in a command line inside")


@case("E6", "shows nothing of the host's environment")
async def no_host_environment(fixture: SandboxFixture) -> None:
    allowed = {"PATH", "HOME", "LANG", "PWD", "SHLVL", "_", "TERM", "HOSTNAME", "OLDPWD", "USER", "SSL_CERT_FILE"}
    async with fixture.open() as box:
        inside = (await out(box, "env")).splitlines()
        leaked = [name for name, value in os.environ.items() if name not in allowed and f"{name}={value}" in inside]
        check(not leaked, f"the host's variables are inside: {leaked}")


@case("E7", "runs in the directory it is given, and names one that is missing")
async def working_directory(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        await box.mkdir(f"{tmp}/some dir")
        check(await out(box, "pwd", cwd=f"{tmp}/some dir") == f"{tmp}/some dir", "cwd is not honoured")
        error = await raises(PathError, sh(box, "true", cwd="/no/such/dir"), "a missing cwd")
        check("/no/such/dir" in str(error), f"the error does not name the directory: {error}")


@case("E8", "uses the spec's working directory", needs=())
async def spec_directory(fixture: SandboxFixture) -> None:
    async with fixture.open(workdir="/usr") as box:
        check(await out(box, "pwd") == "/usr", "SandboxSpec.workdir is not honoured")


@case("E9", "ends a program at its timeout and stays usable")
async def timeout(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await box.exec("echo before; sleep 600", timeout=1.5)
        check(done.timed_out and done.exit_code is None, f"a timed-out program came back as {done}")
        check(done.stdout == b"before\n", f"output before the timeout is {done.stdout!r}")
        check(await out(box, "echo still") == "still", "unusable after a timeout")


@case("E10", "kills every descendant at a timeout, also those that left the session", needs=("tree_kill",))
async def timeout_kills_tree(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        file = f"{await scratch(box)}/beats"
        done = await box.exec(hearts(file), timeout=1.5)
        check(done.timed_out, f"came back as {done}")
        check(await all_beat(box, file), "the three programs did not all start")
        await eventually(lambda: none_beats(box, file), within=10, why="descendants survived a timeout")


@case("E11", "caps output, says so, and does not stop the program")
async def output_cap(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await box.exec("yes 0123456789 | head -n 1000000; echo end >&2", timeout=60, max_output=100_000)
        check(done.exit_code == 0 and done.truncated, f"exit {done.exit_code}, truncated {done.truncated}")
        check(0 < len(done.stdout) <= 100_000, f"{len(done.stdout)} bytes for a cap of 100000")
        check(done.stdout.startswith(b"0123456789\n"), "the kept part is not the beginning")
        small = await sh(box, "echo small")
        check(not small.truncated, "a small output is called truncated")


@case("E12", "returns a million lines complete when they fit")
async def many_lines(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await box.exec("seq 1000000", timeout=60)
        check(len(done.stdout) == 6_888_896 and not done.truncated, f"{len(done.stdout)} bytes came back")


@case("E13", "returns bytes exactly: NUL, CRLF, invalid UTF-8", needs=("bytes_exact",))
async def exact_bytes(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await sh(box, r"printf '\000\001\r\n\377\376\200x\n\n'")
        check(done.stdout == b"\0\1\r\n\xff\xfe\x80x\n\n", f"got {done.stdout!r}")


@case("E14", "feeds stdin and closes it", needs=("stdin",))
async def stdin(fixture: SandboxFixture) -> None:
    data = bytes(range(256)) * 8192
    async with fixture.open() as box:
        done = await box.exec(["wc", "-c"], stdin=data, timeout=30)
        check(int(done.stdout) == len(data), f"{done.stdout!r} of {len(data)} bytes arrived")
        echoed = await box.exec(["cat"], stdin=b"\0\xff\n", timeout=30)
        check(echoed.stdout == b"\0\xff\n", f"got {echoed.stdout!r}")


@case("E15", "gives an empty stdin when none is given")
async def no_stdin(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await box.exec(["cat"], timeout=10)
        check(done.exit_code == 0 and done.stdout == b"", f"`cat` without stdin came back as {done}")


@case("E16", "does not wait for a background program that holds stdout")
async def held_stdout(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        with anyio.fail_after(20):
            done = await box.exec("sleep 30 & echo started", timeout=15)
        check(done.stdout == b"started\n", f"got {done}")


@case("E17", "runs no profile: output is the program's alone")
async def no_profile(fixture: SandboxFixture) -> None:
    home = "/tmp/profile-home"
    paths = [f"{home}/.profile", f"{home}/.bashrc", f"{home}/.bash_profile"]
    if at_least(fixture.can.isolation, "namespace"):  # below that these would be the machine's own files
        paths += ["/root/.profile", "/root/.bashrc", "/etc/profile.d/noise.sh"]
    async with fixture.open() as box:
        for path in paths:
            try:
                await box.write(path, "echo noise; export NOISE=1\n")
            except PathError:
                continue
        for own in ({}, {"HOME": home}):
            done = await box.exec('echo "[$NOISE]"', env=own, timeout=30)
            check(done.text == "[]\n", f"a profile was read: {done.text!r}")


@case("E18", "expands nothing in a list")
async def no_shell_for_lists(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        words = ["$HOME", "*", "`id`", "a b", "", "-n", "é'\"\\", "x\ny"]
        done = await box.exec(["printf", "%s|", *words], timeout=30)
        check(done.stdout.decode() == "".join(f"{word}|" for word in words), f"got {done.stdout!r}")


@case("E19", "tells death by a signal from an exit code")
async def signal_death(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await box.exec(["sh", "-c", "kill -9 $$"], timeout=30)
        check(done.signal == 9, f"a killed program came back as {done}")
        check(done.exit_code in (None, 137) and not done.timed_out, f"a killed program came back as {done}")


@case("E20", "runs programs side by side")
async def side_by_side(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        tmp = await scratch(box)
        got: dict[int, str] = {}

        async def one(n: int) -> None:
            got[n] = await out(
                box, f"echo {n} > {tmp}/in{n}; while [ $(ls {tmp}/in* | wc -l) -lt 6 ]; do sleep 0.05; done; echo {n}"
            )

        async with anyio.create_task_group() as group:
            for n in range(6):
                group.start_soon(one, n)
        check(got == {n: str(n) for n in range(6)}, f"six programs that wait for each other gave {got}")


@case("E21", "runs as another user when asked", needs=("users",))
async def as_user(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        check(await out(box, "id -u", user="nobody") == "65534", "user='nobody' is not uid 65534")
        check(await out(box, "id -u", user="1000") == "1000", "user='1000' is not uid 1000")
        denied = await sh(box, "echo x > /etc/owned", user="nobody")
        check(denied.exit_code != 0, "nobody can write to /etc")
        await raises(Error, sh(box, "true", user="no-such-user"), "an unknown user")


@case("E22", "is root inside when it says so", needs=("root",))
async def is_root(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        check(await out(box, "id -u") == "0", "the first user is not uid 0")


@case("E23", "stops a program that takes too much memory, says why, and lives on", needs=("memory_limit",))
async def memory(fixture: SandboxFixture) -> None:
    async with fixture.open(resources=Resources(memory_mb=96)) as box:
        done = await box.exec("head -c 400m /dev/zero | tail | wc -c", timeout=60)
        hungry = await box.exec(["sh", "-c", "exec tail /dev/zero"], timeout=60)
        check(hungry.exit_code != 0, f"a program may take all memory: {hungry} {done.exit_code}")
        check(hungry.oom, f"the end by memory limit is not reported as such: {hungry}")
        check(await out(box, "echo on") == "on", "unusable after a memory bomb")


@case("E24", "stops a fork bomb and lives on", needs=("pids_limit",))
async def fork_bomb(fixture: SandboxFixture) -> None:
    async with fixture.open(resources=Resources(pids=64)) as box:
        counted = "i=0; while [ $i -lt 300 ]; do (sleep 20 &) 2>/dev/null || exit 3; i=$((i+1)); done; ls -d /proc/[0-9]* | wc -l"
        done = await box.exec(counted, timeout=60)
        check(
            done.exit_code != 0 or int(done.stdout.split()[-1]) <= 70,
            f"300 programs run under a limit of 64: {done.text}",
        )
        await box.kill_processes()
        check(await out(box, "echo on") == "on", "unusable after a fork bomb")


@case("E25", "measures how long a program took")
async def duration(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        done = await sh(box, "sleep 1")
        check(0.9 <= done.duration_s < 30, f"`sleep 1` took {done.duration_s} s")


@case("E26", "passes a long command line or refuses it by name")
async def long_arguments(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        word = "x" * 100_000
        try:
            done = await box.exec(["sh", "-c", 'printf %s "$1" | wc -c', "sh", word], timeout=30)
        except Error as error:
            raise Skip(f"refused: {error}") from error
        check(done.stdout.strip() == b"100000", f"a word of 100000 bytes came back as {done}")
