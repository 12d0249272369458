"""A process that runs rollouts takes the descriptors that the system lets it have."""

import subprocess
import sys

import pytest

CODE = """
import resource
from rollyard.runs.run.descriptors import raise_descriptor_limit
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 4096, "4096 4096"), (4096, 4096, "4096 4096")])
def test_the_limit_goes_up_to_what_is_allowed(soft, hard, then):
    limited = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", CODE]
    assert subprocess.run(limited, check=True, capture_output=True, text=True).stdout.strip() == then
