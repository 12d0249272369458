"""A program as a value, and the calls that are written over it once."""

import pytest

from rollyard.core.errors import ConfigError, PathError
from rollyard.core.program import MAX_OUTPUT, Program, ProgramCalls

pytestmark = pytest.mark.anyio


class Recorder(ProgramCalls):
    """Answers every call with the program it was given."""

    async def _exec(self, program, timeout):
        return program, timeout

    async def _start(self, program):
        return program


async def test_keywords_become_fields_of_the_program():
    options = {"env": {"A": "1"}, "cwd": "/x", "user": "me", "stdin": b"in", "timeout": 3, "max_output": 9}
    program, timeout = await Recorder().exec(["ls", "-l"], **options)
    assert program == Program(argv=("ls", "-l"), **options)
    assert timeout == 3
    assert await Recorder().start("ls", stdin=True, job_id="j") == Program(
        argv=("/bin/sh", "-c", "ls"), stdin=True, job_id="j"
    )


async def test_none_is_the_default_and_empty_input_is_input():
    program, _ = await Recorder().exec("true", env=None, cwd=None, user=None, stdin=None, timeout=1)
    assert (program.env, program.input, program.output_limit) == ({}, None, MAX_OUTPUT)
    program, _ = await Recorder().exec("true", stdin=b"", timeout=1, max_output=0)
    assert (program.input, program.output_limit) == (b"", 0)


async def test_a_program_is_passed_on_as_it_is():
    program = Program(argv=("true",), timeout=2.0)
    assert await Recorder().exec(program) == (program, 2.0)


@pytest.mark.parametrize(
    ("call", "program", "options", "error"),
    [
        ("exec", "true", {}, TypeError),
        ("exec", Program(argv=("true",)), {}, TypeError),
        ("exec", Program(argv=("true",)), {"timeout": 3}, TypeError),
        ("exec", "true", {"timeout": 1, "wait": True}, TypeError),
        ("exec", "true", {"timeout": 1, "stdin": True}, ConfigError),
        ("exec", "true", {"timeout": 1, "job_id": "j"}, ConfigError),
        ("start", "true", {"timeout": 1}, ConfigError),
        ("start", "true", {"stdin": b"x"}, ConfigError),
        ("start", "true", {"max_output": 1}, ConfigError),
        ("start", "true", {"job_id": "../j"}, PathError),
        ("start", "true", {"job_id": ""}, PathError),
        ("start", [], {}, PathError),
        ("start", ["a\0b"], {}, PathError),
        ("start", "true", {"env": {"A=B": ""}}, PathError),
        ("start", "true", {"env": {"A": "\0"}}, PathError),
    ],
)
async def test_what_cannot_act_is_refused(call, program, options, error):
    with pytest.raises(error):
        await getattr(Recorder(), call)(program, **options)


def test_defaults_fill_what_was_left_open():
    program = Program(argv=("true",), env={"A": "own"}, cwd="/own", timeout=1.0)
    assert program.with_defaults(env={"A": "place", "B": "place"}, cwd="/place", user="u") == Program(
        argv=("true",), env={"A": "own", "B": "place"}, cwd="/own", user="u", timeout=1.0
    )
