"""Real SDKs that do not share an environment with everything else: each in a directory of its own, made on first use.

The directory goes to the end of the module path, so what is installed here keeps its versions and only what is missing is found
there. Other processes that tests start get it by `PYTHONPATH`.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from rollyard.core.cache import cache_home, make_once

PINNED = {"daytona": "daytona==0.226.1", "prime": "prime-sandboxes==0.5.1", "runloop": "runloop_api_client==3.0.0"}


def place(name):
    return cache_home() / "packages" / PINNED[name].replace("==", "-")


def ready(name):
    return place(name).exists()


def install(name, where):
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", where, PINNED[name]])
    if done.returncode:
        pytest.skip(f"{PINNED[name]} cannot be installed here: pip exited with {done.returncode}")


@contextlib.contextmanager
def sdk(name):
    """The SDK of this backend can be imported inside the block, here and in processes that are started."""
    if name not in PINNED:
        pytest.importorskip({"hf": "huggingface_hub"}[name], reason=f"the {name} SDK is not installed")
        yield
        return
    where = make_once(place(name), lambda aside: install(name, aside))
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
