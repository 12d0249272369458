"""One logger: its lines without any configuration, and as a server's JSON."""

import json
import logging
import subprocess
import sys

import pytest

from rollyard.core.log import Log
from rollyard.plane.server.logs import JsonLogFormatter


def test_unconfigured_a_warning_is_one_line_on_stderr_and_stdout_stays_clean():
    said = "log.info('no'); log.warning('it.broke', why='two words', n=3)"
    code = f"from rollyard.core.log import Log; log = Log('rollyard.x', a=1); {said}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", 'it.broke a=1 why="two words" n=3\n')


@pytest.fixture
def lines():
    class Kept(logging.Handler):
        def __init__(self):
            super().__init__()
            self.found = []

        def emit(self, record):
            self.found.append(json.loads(JsonLogFormatter().format(record)))

    kept, logger = Kept(), logging.getLogger("rollyard.log-test")
    logger.addHandler(kept)
    yield kept.found
    logger.removeHandler(kept)


def test_fields_are_members_of_the_json_line_and_secrets_are_taken_out(lines):
    Log("rollyard.log-test").bind(place="there", name="n").bind(place="here").warning(
        "%s is %d%%", "disk", 90, key="ryk-" + "a" * 20, more=[1, "b"]
    )
    [line] = lines
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "disk is 90%",
        "level": "warning",
        "place": "here",
        "name": "n",
        "key": "***",
        "more": [1, "b"],
    }


def test_a_line_with_a_percent_sign_and_no_arguments_is_kept_as_it_is(lines):
    Log("rollyard.log-test").warning("100% of it", url="http://h/%20")
    assert lines[0]["event"] == "100% of it" and lines[0]["url"] == "http://h/%20"


def test_the_exception_is_told(lines):
    log = Log("rollyard.log-test")
    try:
        raise ValueError("why")
    except ValueError as error:
        log.exception("it failed")
        log.error("again", exc_info=error)
    assert all("ValueError: why" in line["exception"] for line in lines) and len(lines) == 2


def test_lines_of_other_libraries_are_json_too(lines):
    logging.getLogger("rollyard.log-test").warning("plain %s", "words")
    assert lines[0]["event"] == "plain words"
