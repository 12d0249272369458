"""Without the `mcp` package the rest works, and the first use of a tool names the command that installs it."""

import subprocess
import sys

PROGRAM = """
import asyncio, sys
import importlib.machinery
real = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in ("mcp", "mcp_types") else real(name, path, target)
)
import rollyard
from rollyard.core.errors import MissingExtra
from rollyard.tools.endpoint import Endpoint
try:
    asyncio.run(Endpoint("http://127.0.0.1:1/mcp").list())
except MissingExtra as error:
    print(error.hint)
"""


def test_the_first_use_of_a_tool_names_the_extra():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "pip install 'rollyard[mcp]'", done.stderr
