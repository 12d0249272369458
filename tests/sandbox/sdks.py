"""Real SDKs that do not share an environment with everything else: each in a directory of its own, made on first use.

The directory goes to the end of the module path, so what is installed here keeps its versions and only what is missing is found
there. Other processes that tests start get it by `PYTHONPATH`.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PINNED = {"daytona": "daytona==0.226.1", "prime": "prime-sandboxes==0.5.1"}


def place(name):
    cache = Path(os.environ.get("ROLLYARD_CACHE") or Path.home() / ".cache" / "rollyard")
    return cache / "sdks" / PINNED[name].replace("==", "-")


def ready(name):
    return (place(name) / ".ready").exists()


@contextlib.contextmanager
def sdk(name):
    """The SDK of this backend can be imported inside the block, here and in processes that are started."""
    if name not in PINNED:
        pytest.importorskip({"hf": "huggingface_hub"}[name], reason=f"the {name} SDK is not installed")
        yield
        return
    where = place(name)
    if not ready(name):
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", where, PINNED[name]])
        if done.returncode:
            pytest.skip(f"{PINNED[name]} cannot be installed here: pip exited with {done.returncode}")
        (where / ".ready").touch()
    before = os.environ.get("PYTHONPATH")
    sys.path.append(str(where))
    os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), str(where)])
    try:
        yield
    finally:
        sys.path.remove(str(where))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
