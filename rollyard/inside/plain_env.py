"""An environment's server in one file of the standard library: tools, functions, a reward and health out of plain functions.

    from plain_env import function, reward, tool

    @tool
    def weather(city: str) -> dict: ...

    @function
    def double(number: int) -> int: ...

    @reward
    def score(answer: str) -> dict: ...

`python3 plain_env.py FILE_OR_FOLDER --port 8081` serves them: tools over MCP at `/mcp`, functions at `POST /functions/NAME` and
`GET /functions/list`, the reward at `POST /task/reward`, health at `GET /health`. These are the paths of AEnvironment's server:
its client and the plane's gateway find everything. A file that cannot be imported ends the server: an environment with half of
its tools would look like a bad agent. It lies beside `plain_mcp.py`, and any Python from 3.9 runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if __package__:
    from rollyard.inside.plain_mcp import ToolFailure, Tools
else:
    from plain_mcp import ToolFailure, Tools  # pyright: ignore[reportMissingImports] - where it lies beside this file

_MARK = "__environment__"
_JSON = "application/json"
Reply = tuple[int, str, bytes]


def tool(made: Callable[..., Any]) -> Callable[..., Any]:
    """Something an agent may call."""
    return _mark(made, "tool")


def function(made: Callable[..., Any]) -> Callable[..., Any]:
    """Something the trainer may call, and no agent."""
    return _mark(made, "function")


def reward(made: Callable[..., Any]) -> Callable[..., Any]:
    """What the trainer calls at the end. One per environment."""
    return _mark(made, "reward")


def health(made: Callable[..., Any]) -> Callable[..., Any]:
    """Whether the environment is ready: a dict with a `status`. Without one it is healthy once it listens."""
    return _mark(made, "health")


def _mark(made: Callable[..., Any], kind: str) -> Callable[..., Any]:
    setattr(made, _MARK, kind)
    return made


class DecoratedFunctions:
    """The decorated functions of some modules."""

    def __init__(self, name: str, functions: Iterable[Callable[..., Any]]) -> None:
        self.tools = Tools(name)
        self.functions: dict[str, Callable[..., Any]] = {}
        self._single: dict[str, Callable[..., Any]] = {}
        for made in functions:
            kind = getattr(made, _MARK)
            if kind == "tool":
                self.tools.tool(_make_blocking(made))
            elif kind == "function":
                self.functions[made.__name__] = made
            elif kind in self._single:
                raise ValueError(f"two functions are the {kind}: {self._single[kind].__name__} and {made.__name__}")
            else:
                self._single[kind] = made

    def serve(self, port: int) -> None:
        """Blocks."""
        self.tools.serve(port, page=self.page, health=self._health)

    def page(self, method: str, path: str, body: bytes) -> Reply:
        place = path.partition("?")[0]
        if method == "GET" and place == "/functions/list":
            return _reply(200, {"success": True, "data": self._list_functions()})
        if method != "POST":
            return _reply(404, _refuse(f"{method} {place} is not served"))
        if place == "/task/reward":
            called = self._single.get("reward")
        else:
            called = self.functions.get(place.removeprefix("/functions/")) if place.startswith("/functions/") else None
        if called is None:
            return _reply(404, _refuse(f"there is nothing at {place}"))
        return _call(called, body)

    def _health(self) -> dict[str, Any]:
        made = self._single.get("health")
        if made is None:
            return {"success": True, "data": {"status": "healthy"}}
        return {"success": True, "data": _make_blocking(made)()}

    def _list_functions(self) -> dict[str, Any]:
        def describe(made: Callable[..., Any], endpoint: str) -> dict[str, Any]:
            named = {name: {"type": str(one.annotation)} for name, one in inspect.signature(made).parameters.items()}
            return {
                "name": made.__name__,
                "endpoint": endpoint,
                "description": inspect.getdoc(made) or "",
                "parameters": named,
            }

        functions = [describe(made, f"/functions/{name}") for name, made in self.functions.items()]
        single = {"reward": "/task/reward", "health": "/health"}
        others = {
            kind: [describe(self._single[kind], at)] if kind in self._single else [] for kind, at in single.items()
        }
        return {"total": len(functions) + sum(map(len, others.values())), "functions": functions, **others}


def load(target: str | Path) -> DecoratedFunctions:
    """From a file, or from all of a folder's (its `src`, where it has one) whose names begin with no underscore."""
    place = Path(target).resolve()
    if place.is_dir():
        place = place / "src" if (place / "src").is_dir() else place
        files = sorted(file for file in place.rglob("*.py") if not file.name.startswith("_"))
    else:
        files = [place]
    sys.modules.setdefault("plain_env", sys.modules[__name__])
    sys.path.insert(0, str(place if place.is_dir() else place.parent))
    found: dict[int, Callable[..., Any]] = {}
    for number, file in enumerate(files):
        for made in vars(_import_file(file, number)).values():
            if callable(made) and getattr(made, _MARK, None):
                found[id(made)] = made  # one that two modules name is one
    if not found:
        raise ValueError(f"nothing in {target} is a tool, a function, a reward or health")
    return DecoratedFunctions(place.name, found.values())


def _import_file(file: Path, number: int) -> Any:
    spec = importlib.util.spec_from_file_location(f"environment_{number}_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _make_blocking(made: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function as an ordinary one, with the same parameters."""
    if not inspect.iscoroutinefunction(made):
        return made

    def called(*args: Any, **fields: Any) -> Any:
        return asyncio.run(made(*args, **fields))

    for name in ("__name__", "__doc__", "__annotations__", "__module__"):
        setattr(called, name, getattr(made, name))
    called.__wrapped__ = made  # pyright: ignore[reportFunctionMemberAccess] - inspect reads its signature from here
    return called


def _call(made: Callable[..., Any], body: bytes) -> Reply:
    try:
        arguments = json.loads(body or b"{}")
        inspect.signature(made).bind(**arguments)
    except (ValueError, TypeError) as error:
        return _reply(400, _refuse(f"{made.__name__}: {error}"))
    try:
        return _reply(200, {"success": True, "data": _make_blocking(made)(**arguments)})
    except Exception as error:  # noqa: BLE001 - the caller gets the error, whatever it was
        words = str(error) if isinstance(error, ToolFailure) else f"{type(error).__name__}: {error}"
        return _reply(500, _refuse(words))


def _refuse(words: str) -> dict[str, Any]:
    return {"success": False, "error": words}


def _reply(status: int, value: Any) -> Reply:
    return status, _JSON, json.dumps(value, default=str).encode()


def serve_tools(target: str | Path, *, port: int = 8081) -> None:
    """Serve the decorated functions of a file or folder on 127.0.0.1:`port`. Blocks."""
    load(target).serve(port)


def main() -> None:
    parser = argparse.ArgumentParser(description="serve an environment's tools, functions, reward and health")
    parser.add_argument("target", help="a Python file, or a folder of them")
    parser.add_argument("--port", type=int, default=8081)
    given = parser.parse_args()
    serve_tools(given.target, port=given.port)


if __name__ == "__main__":
    main()
