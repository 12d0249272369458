"""Scripts of `foreign/` in environments with a trainer's package, made once and kept in the cache; ours is appended to
their path, so that a trainer uses its own versions of what both need."""

import os
import subprocess
import sys
from pathlib import Path

from tests.plane.venvs import venv_or_skip

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def foreign(name, *packages, alone=False):
    """A function that runs a script of `foreign/` in an environment with these packages, and returns what it printed.
    `alone` takes the first without what it asks for: a trainer's data types rarely need its whole stack."""
    installs = [["--no-deps", packages[0]], [*packages[1:]]] if alone else [[*packages]]
    python = venv_or_skip(f"trainer-{name}", *installs)

    def run(script, *words):
        ours = [path for path in sys.path if path.endswith("site-packages")]
        start = f"import runpy, sys; sys.path += {ours!r}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
        command = [python, "-c", start, HERE / "foreign" / script, *words]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout.strip().splitlines()[-1]

    return run
