"""`plane.at(instance_id)`: one instance as its users see it. Tools, functions, reward and health are asked of the environment's
own server, through the gateway; the rest is the control API.

With `data_plane=False` nothing but the control API is ever touched, and what would touch more raises an error that names the
switch. Health is what the instance said, never made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from rollyard.core.errors import ConfigError, EnvError, PlaneUnavailable
from rollyard.core.ids import new_id
from rollyard.core.message import ToolSpec

if TYPE_CHECKING:
    from rollyard.plane.client.plane import Plane
    from rollyard.tools.remote import RemoteTools


class InstanceClient:
    """Made by `Plane.at`. `data` are calls of the environment's own server."""

    def __init__(self, plane: Plane, instance_id: str) -> None:
        self._plane, self.id = plane, instance_id
        self._tools: RemoteTools | None = None

    async def list_tools(self) -> list[ToolSpec]:
        return await self._remote("list_tools").list()

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> str:
        """The result as text; a tool's own error raises `EnvError` with its words."""
        return await self._remote("call_tool").call(name, arguments or {})

    async def list_functions(self) -> list[str]:
        found = await self._ask("list_functions", "GET", "functions/list")
        if isinstance(found, dict):
            found = found.get("functions", list(found))
        if not isinstance(found, list):
            raise PlaneUnavailable(f"the functions of {self.id} are not a list")
        return [str(one.get("name") if isinstance(one, dict) else one) for one in found]

    async def call_function(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        return await self._ask("call_function", "POST", f"functions/{quote(name, safe='')}", arguments or {})

    async def call_reward(self, arguments: Mapping[str, Any] | None = None) -> Any:
        return await self._ask("call_reward", "POST", "task/reward", arguments or {})

    async def check_health(self) -> dict[str, Any]:
        """What the environment's server says of itself."""
        found = await self._ask("check_health", "GET", "health")
        if not isinstance(found, dict):
            raise PlaneUnavailable(f"the health of {self.id} is not an object")
        return found

    async def presign(self, port: int, *, minutes: float = 5.0) -> str:
        return await self._plane.instances.presign(self.id, port, minutes=minutes)

    async def wait(self, port: int, path: str = "/", *, within_s: float = 45.0) -> str:
        return await self._plane.instances.wait(self.id, port, path, within_s=within_s)

    async def delete(self) -> None:
        await self._plane.instances.delete(self.id)

    async def aclose(self) -> None:
        if self._tools is not None:
            await self._tools.aclose()
            self._tools = None

    def _needs(self, what: str) -> None:
        if not self._plane.data_plane:
            raise ConfigError(
                f"{what} needs the data plane, and this client was made with data_plane=False",
                hint="connect with data_plane=True, or reach a port with presign",
            )

    def _remote(self, what: str) -> RemoteTools:
        self._needs(what)
        if self._tools is None:
            from rollyard.tools.remote import RemoteTools

            url = f"{self._plane.url}/v1/instances/{self.id}/mcp"
            self._tools = RemoteTools(url, self._plane.key, timeout_s=self._plane.timeout_s)
        return self._tools

    async def _ask(self, what: str, method: str, path: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """The answer's data; what the environment reports as an error is an `EnvError` with its words."""
        self._needs(what)
        data = None if arguments is None else msgspec.json.encode(arguments)
        status, raw = await self._plane.ask(
            method,
            f"/v1/instances/{self.id}/data/{path}",
            data,
            headers={"Content-Type": "application/json"} if data is not None else None,
        )
        try:
            said = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PlaneUnavailable(f"{self.id} did not answer {what} with JSON (status {status})") from error
        if isinstance(said, dict) and said.get("success") is False:
            raise EnvError(str(said.get("error") or f"{what} failed"))
        if not 200 <= status < 300:
            raise self._plane.refusal(status, raw, f"{method} {path}")
        return said["data"] if isinstance(said, dict) and "data" in said and "success" in said else said


class OpenedInstance:
    """What `plane.open(...)` enters: an instance that is ready, and gone afterwards."""

    def __init__(self, plane: Plane, options: Mapping[str, Any], *, skip_health: bool, within_s: float) -> None:
        self._plane, self._asked, self._skip, self._within_s = plane, dict(options), skip_health, within_s
        self._client: InstanceClient | None = None

    async def __aenter__(self) -> InstanceClient:
        key = self._asked.pop("idempotency_key", None) or new_id("open")
        made = await self._plane.instances.create(idempotency_key=key, **self._asked)
        if not isinstance(made.get("id"), str):
            raise PlaneUnavailable("the answer to a creation has no id")
        client = self._client = InstanceClient(self._plane, made["id"])
        if self._plane.data_plane and not self._skip:
            try:
                await self._plane.wait_for_health(client.id, within_s=self._within_s)
            except BaseException:  # cancelled too: an instance that was not handed out is deleted
                await self.__aexit__(None, None, None)
                raise
        return client

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()
            await self._client.delete()
            self._client = None

    def __await__(self) -> Any:
        return self.__aenter__().__await__()
