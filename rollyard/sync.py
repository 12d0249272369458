"""The blocking facade for scripts and notebooks: `from rollyard import sync`.

Everything in Rollyard is async. This runs it on one background event loop, so it also works inside a running loop (a
notebook's). `sync.wait(coroutine)` waits for one coroutine; `sync.wrap(value)` gives an object whose async methods, context
manager and iteration block; `sync.run_rollout(...)` and the other functions are the async ones of the same name.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Loop:
    """The background loop, started on first use; its thread is a daemon and dies with the interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="rollyard-sync", daemon=True).start()
                self._loop = loop
            return self._loop


_portal = _Loop()


_CLEANUP_S = 60.0


def submit(value: Awaitable[T]) -> Future[T]:
    """Start an awaitable on the background loop."""

    async def awaited() -> T:
        return await value

    return asyncio.run_coroutine_threadsafe(awaited(), _portal.get())


class _Wait(Generic[T]):
    """One awaitable on the background loop and the thread that waits for it.

    Ctrl-C may interrupt the waiting thread at any line, also while it hands the work over. So `begin` and `cancel` both run on
    the loop, in the order in which they were sent: when `cancel` finds no task, none will ever begin.
    """

    def __init__(self, value: Awaitable[T], loop: asyncio.AbstractEventLoop) -> None:
        self._value = value
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._result: Future[T] = Future()
        self._over = threading.Event()

    def wait(self) -> T:
        try:
            self._loop.call_soon_threadsafe(self._begin)
            return self._result.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(self._cancel)
            self._over.wait(_CLEANUP_S)
            raise

    def _begin(self) -> None:
        async def awaited() -> T:
            return await self._value

        self._task = self._loop.create_task(awaited())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is None:
            self._over.set()
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        self._over.set()
        if task.cancelled():
            self._result.cancel()
        elif (error := task.exception()) is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(task.result())


def wait(value: Awaitable[T]) -> T:
    """Wait for an awaitable on the background loop. Ctrl-C cancels it and waits for its clean-up, a minute at most."""
    return _Wait(value, _portal.get()).wait()


class Blocking:
    """A value whose awaitables are waited for. `value` is the async one underneath."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        if not callable(found):
            return wrap(found)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return (
                wrap(wait(result))
                if inspect.isawaitable(result) and not hasattr(result, "__aenter__")
                else wrap(result)
            )

        return call

    def __enter__(self) -> Any:
        return wrap(wait(self.value.__aenter__()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return wait(self.value.__aexit__(kind, error, trace))

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.value, "__aiter__"):
            yield from self.value
            return
        items: AsyncIterator[Any] = aiter(self.value)
        while True:
            try:
                yield wrap(wait(anext(items)))
            except StopAsyncIteration:
                return


def wrap(value: Any) -> Any:
    """Values with async methods are wrapped; plain data comes back as it is."""
    kind = type(value)
    has_async = any(
        inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
        for name in dir(kind)
        if not name.startswith("_") or name in {"__aenter__", "__anext__"}
        for member in (inspect.getattr_static(kind, name, None),)
    )
    lively = has_async or hasattr(value, "__aenter__") or hasattr(value, "__anext__")
    return Blocking(value) if lively else value


class BlockingClass:
    """A class whose instances are made wrapped, by itself or by its class methods."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return wrap(self._kind(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(Blocking(self._kind), name)


def __getattr__(name: str) -> Callable[..., Any]:
    import rollyard

    function = getattr(rollyard, name)
    if inspect.isclass(function):
        return BlockingClass(function)
    if not callable(function):
        raise AttributeError(f"rollyard.{name} is not a function; use sync.wrap(...)")

    def blocking(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return wait(result) if inspect.iscoroutine(result) else wrap(result)

    blocking.__name__ = name
    return blocking
