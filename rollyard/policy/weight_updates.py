"""New weights for model servers while agents run: `policy.weights` of `tokens`.

    await policy.weights.publish("checkpoints/7", version=7, mode="abort")   # all servers read that folder

or, where the trainer brings the weights its own way (NCCL, shared memory):

    await policy.weights.pause("keep")
    ...
    await policy.weights.resume(version=7)

Answers under way while the servers pause (`mode`): `abort` ends them, and the policy goes on from the ids so far; `wait` lets
them end first; `keep` stops them between two tokens, and they go on with the new weights. No turn is lost in any. All servers of
a policy are paused before the first one takes new weights. What it is not: a way to move tensors. A server reads the folder
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.call import PauseMode
from rollyard.core.errors import ConfigError, Error, Unsupported, UpstreamError
from rollyard.policy.connection import ModelConnection

DEV_MODE = "vLLM serves this where it was started with VLLM_SERVER_DEV_MODE=1"
ABSENT = (403, 404, 405)


class UpdateRoute(msgspec.Struct, frozen=True):
    path: str
    body: Mapping[str, Any] | None = None


class UpdateRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are sent to one kind of server. `say_version` is None where weights come with their version, and no other
    way."""

    load: Callable[[str, int], UpdateRoute]
    say_version: Callable[[int], UpdateRoute] | None = None
    sleeps: bool = False


VLLM = UpdateRoutes(
    load=lambda folder, _: UpdateRoute(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    ),
    say_version=lambda version: UpdateRoute("/update_weight_version", {"new_version": str(version)}),
    sleeps=True,
)
TORCH = UpdateRoutes(load=lambda folder, version: UpdateRoute("/weights", {"path": folder, "version": version}))
ROUTES: Mapping[str, UpdateRoutes] = {"vllm": VLLM, "completions": VLLM, "torch": TORCH}


class WeightUpdates:
    """`version` is the one published last by this policy; None before the first."""

    def __init__(
        self,
        urls: tuple[str, ...],
        connection: ModelConnection,
        headers: Mapping[str, str],
        engine: Callable[[], Awaitable[str]],
    ) -> None:
        self._urls = urls
        self._connection = connection
        self._headers = headers
        self._engine = engine
        self._slept = False
        self._one = asyncio.Lock()
        self.version: int | None = None

    async def publish(self, folder: str | Path, *, version: int, mode: PauseMode = "abort") -> None:
        """All servers read the weights in `folder`, a path on their machines, and say `version` from then on. Where one cannot,
        the error names it, and all go on; those before it have the new weights then."""
        self._check(version)
        async with self._one:
            routes = await self._routes()
            try:
                await self.pause(mode)
                await self._update_all(routes.load(str(folder), version))
                if routes.say_version is not None:
                    await self._update_all(routes.say_version(version))
            except BaseException:  # cancelled too: servers are not left paused
                with suppress(Error):
                    await self.resume()
                raise
            self.version = version
            await self.resume()

    async def pause(self, mode: PauseMode = "abort", *, sleep: int | None = None) -> None:
        """Ends when nothing is computed on any server. `sleep` is vLLM's level, for a trainer on the same GPU: 1 moves the
        weights to the host's memory, 2 drops them."""
        routes = await self._routes()
        if sleep is not None and not routes.sleeps:
            raise Unsupported("this model server has no sleep", hint="leave out sleep=")
        self._slept = sleep is not None
        await self._update_all(
            UpdateRoute(f"/pause?mode={mode}" if sleep is None else f"/sleep?level={sleep}&mode={mode}")
        )

    async def resume(self, version: int | None = None) -> None:
        """`version` is that of weights which came another way than by `publish`."""
        routes = await self._routes()
        if version is not None:
            self._check(version)
            if routes.say_version is None:
                raise Unsupported("this model server takes a version with its weights only", hint="use publish(folder)")
            await self._update_all(routes.say_version(version))
            self.version = version
        await self._update_all(UpdateRoute("/wake_up" if self._slept else "/resume"))

    def _check(self, version: int) -> None:
        if self.version is not None and version <= self.version:
            raise ConfigError(f"version {version} was published already (the last one is {self.version})")

    async def _routes(self) -> UpdateRoutes:
        name = await self._engine()
        if name not in ROUTES:
            raise Unsupported(f"{name} takes no new weights from here", hint=f"known: {', '.join(ROUTES)}")
        return ROUTES[name]

    async def _update_all(self, route: UpdateRoute) -> None:
        """On every server; the first error after all have answered."""
        body = msgspec.json.encode(route.body if route.body is not None else {})
        answers = await asyncio.gather(
            *(self._post(url + route.path, body) for url in self._urls), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _post(self, url: str, body: bytes) -> None:
        try:
            await self._connection.post(url, body, self._headers)
        except UpstreamError as error:
            if error.status in ABSENT:
                raise ConfigError(f"{error}", hint=DEV_MODE) from error
            raise
