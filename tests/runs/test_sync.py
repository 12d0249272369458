"""The blocking facade: plain calls, also inside a running loop, and Ctrl-C that waits for clean-up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap

import rollyard as ry
from rollyard import sync
from tests.runs.conftest import CHECK, HELLO


def test_a_rollout_and_a_sandbox_are_used_without_await():
    done = sync.run_rollout("x", agent="shell-agent", policy=ry.policy.scripted(HELLO), verify=[CHECK])
    assert done.reward == 1.0
    with sync.wrap(ry.sandbox.backend("local")) as backend, backend.open(ry.SandboxSpec()) as box:
        assert box.exec("echo hi", timeout=10).stdout == b"hi\n"


def test_it_also_works_inside_a_running_loop():
    async def notebook():
        return sync.run_rollout("x", agent="nop", verify=["true"])

    assert asyncio.run(notebook()).reward == 1.0


def test_ctrl_c_waits_until_what_was_begun_is_cleaned_up():
    program = """
        import asyncio
        from rollyard import sync
        async def work():
            try:
                print("begun", flush=True)
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.3)
                print("cleaned", flush=True)
        try:
            sync.wait(work())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == "cleaned\ninterrupted\n"


def test_ctrl_c_while_work_is_handed_over_waits_for_its_clean_up_too():
    program = """
        import asyncio, signal, threading
        from rollyard import sync
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in its background
        begun = threading.Event()
        async def work():
            try:
                begun.set()
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.1)
                print("cleaned", flush=True)
        async def running_loop():
            return asyncio.get_running_loop()
        loop = sync.wait(running_loop())
        hand_over = loop.call_soon_threadsafe
        def hand_over_with_ctrl_c(*arguments, **options):
            handle = hand_over(*arguments, **options)
            if not begun.is_set():
                begun.wait(30)
                signal.raise_signal(signal.SIGINT)
            return handle
        loop.call_soon_threadsafe = hand_over_with_ctrl_c
        try:
            sync.wait(work())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "cleaned\ninterrupted\n", done.stderr[-2000:]
