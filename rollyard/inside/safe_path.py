"""A judge's `sitecustomize.py`: a module that the agent left in its directory does not take the place of Python's own.

`python -c` and `python -m` put the working directory before the standard library, so that a planted `json.py` or `pytest/` would
run instead of the real one. Names of the standard library and of test runners are looked up elsewhere first. Not so for imports
of the agent's own code, for modules that were there before it, and for those that the task speaks of: `keep` beside this file
names the working directory, then these, one per line. Runs on every Python 3, and does nothing on Python 2.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_RUNNERS = frozenset(
    (
        "pytest",
        "_pytest",
        "py",
        "pluggy",
        "iniconfig",
        "packaging",
        "exceptiongroup",
        "tomli",
        "pygments",
        "typing_extensions",
        "attr",
        "attrs",
        "hypothesis",
        "coverage",
        "nose",
        "nose2",
        "xdist",
        "execnet",
    )
)
_NEVER_AGENTS = frozenset(("pytest", "_pytest", "pluggy"))


class _Finder:
    def __init__(self, workdir, kept, find, library):
        self.workdir, self.kept, self.find, self.library = workdir, kept, find, library

    def find_spec(self, name, path=None, target=None):
        if path is not None or "." in name or name in self.kept or not self._is_guarded(name) or self._agent_asks():
            return None
        places = [place for place in sys.path if not self._is_agents(place, name)]
        if len(places) == len(sys.path):
            return None
        spec = self.find(name, places)
        if (spec is None or spec.loader is None) and name in _NEVER_AGENTS:
            raise ImportError("No module named %r" % name)
        return spec if spec is not None and spec.loader is not None else None

    def _is_guarded(self, name):
        if name in _RUNNERS or name.startswith("pytest_"):
            return True
        known = getattr(sys, "stdlib_module_names", None)
        return name in known if known is not None else self.find(name, self.library) is not None

    def _agent_asks(self):
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and self._is_below(frame.f_code.co_filename)

    def _is_below(self, path):
        return path.startswith(self.workdir + "/")

    def _is_agents(self, place, name):
        place = os.path.abspath(place)
        if os.path.basename(place) in ("site-packages", "dist-packages", "lib-dynload"):
            return False
        inside = place == self.workdir or self._is_below(place)
        return inside and os.path.join(place, name) not in self.kept


def _install():
    from importlib.machinery import PathFinder

    with open(os.path.join(_HERE, "keep")) as file:
        workdir, kept = file.readline().rstrip("\n"), frozenset(file.read().splitlines())
    library = [os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload")]
    if workdir:
        sys.meta_path.insert(0, _Finder(workdir, kept, PathFinder.find_spec, library))
    # the sitecustomize of the image, which this one hides
    others = [place for place in sys.path if os.path.abspath(place) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if sys.version_info >= (3, 5):
    _install()
