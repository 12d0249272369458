"""Who is asking on AEnvironment's ports, and the instance that a data request is for.

Its package sends a key only if it was given one, and none at all on the data port. So without a key every program on this
machine is the owner `aenv` (unless keys are asked for), and on the data port the instance's own token decides. The package
repeats the `ip` of an instance as the host of a URL in a header: the token travels there. Nothing is ever sent to that URL. A
web page shown in a browser of this machine is no such program: what a browser sends for it is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import Scope

from rollyard.core.errors import PlaneForbidden, PlaneInvalid, PlaneUnauthorized
from rollyard.core.plane import KEYLESS_OWNER, ApiKey, Role
from rollyard.net.web_pages import AllowedHosts, page_reason
from rollyard.plane.service.access import Access
from rollyard.plane.service.instances import Instances

KEYLESS = ApiKey(id="aenv", digest=b"", role="owner", owner=KEYLESS_OWNER, created_at=0.0)
_HERE = AllowedHosts("127.0.0.1")
INSTANCE_HEADER = "aenvcore-envinstance-id"
URL_HEADER = "aenvcore-mcpproxy-url"


class AenvCallers:
    def __init__(self, access: Access, *, secret: str, anonymous: bool) -> None:
        self._access, self._secret, self._anonymous = access, secret.encode(), anonymous

    async def caller(self, request: Request, *roles: Role) -> ApiKey:
        header = request.headers.get("authorization")
        if header is None and self._anonymous:
            if (why := page_reason(request.method, dict(request.headers.raw), _HERE)) is not None:
                raise PlaneForbidden(f"requests without a key: {why}")
            found = KEYLESS
        else:
            found = await self._access.caller(header)
        if found.role not in roles:
            raise PlaneForbidden(f"a key of role {found.role} may not do this", hint=f"needs {', '.join(roles)}")
        return found

    async def only_instance(self, scope: Scope, instances: Instances) -> str:
        """The instance of a data request that names none, which is what the package sends with `skip_for_healthy=True`: where no
        key is asked for and one instance runs, that one."""
        running: list[str] = []
        if self._anonymous and page_reason(scope["method"], dict(scope["headers"]), _HERE) is None:
            running = [one.id async for one in instances.all(owner=KEYLESS_OWNER) if one.state == "running"]
        if len(running) == 1:
            return running[0]
        raise PlaneInvalid(
            "the request names no instance" + (f", and {len(running)} run" if running else ""),
            hint="AEnvCore-EnvInstance-ID is missing; with skip_for_healthy=True the client sends none",
        )

    def host(self, instance_id: str) -> str:
        """An instance's token: 160 bits in lower case, since the package lowers the case of host names."""
        return hmac.new(self._secret, f"aenv {instance_id}".encode(), hashlib.sha256).hexdigest()[:40] + ".instance"

    def admit(self, instance_id: str, url: str) -> None:
        said = urlsplit(url).hostname or ""
        if not hmac.compare_digest(said.encode(), self.host(instance_id).encode()):
            raise PlaneUnauthorized("this request does not bear the instance's token")
