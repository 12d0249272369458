"""Hugging Face sandboxes: one job, a virtual machine, for each, through `huggingface_hub.Sandbox` (the extra `hf`).

The SDK only blocks, so its calls run in threads of this backend. It ends a sandbox quietly and logs why it could not, so jobs are
cancelled by the Jobs API itself. Its endpoint is the process's own (`HF_ENDPOINT`). Jobs always have the internet: a spec that
wants none is refused, unless the backend was told that its endpoint's jobs have none, and that is looked at in each sandbox.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal, TypeVar

from rollyard.core.errors import ConfigError, Error, MissingExtra, SandboxError, SandboxInterrupted
from rollyard.core.sandbox import Isolation, SandboxSpec
from rollyard.sandbox.remote.backend import RemoteBackend
from rollyard.sandbox.remote.errors import error_by_status, gone_error
from rollyard.sandbox.remote.provider import (
    FoundSandbox,
    SandboxLink,
    SandboxProvider,
    SandboxRequest,
    enum_text,
    import_sdk,
    require_key,
)
from rollyard.sandbox.retry import OpenLimits
from rollyard.sandbox.teardown import one_by_one

T = TypeVar("T")
_OVER = ("COMPLETED", "ERROR", "DELETED", "CANCELED")
_MAX_TTL_S = 86400.0
_NAME, _THEIRS = "name", "hf-sandbox"  # labels that the SDK adds


class HFBackend(RemoteBackend):
    """`token` is a Hugging Face token (else what `hf auth login` or `HF_TOKEN` left); `flavor` is the hardware; `image`
    stands for `host` in a spec; `network` is what the jobs of this endpoint have; `threads` is how many calls run at once."""

    name: ClassVar[str] = "hf"
    loggers: ClassVar[tuple[str, ...]] = ("huggingface_hub._sandbox", "huggingface_hub.utils._http")
    proves_network_none: ClassVar[bool] = True

    def __init__(
        self,
        *,
        token: str | None = None,
        namespace: str | None = None,
        image: str = "python:3.12",
        flavor: str = "cpu-basic",
        network: Literal["host", "none"] = "host",
        isolation: Isolation = "microvm",
        lease_s: float = 600.0,
        threads: int = 64,
        limits: OpenLimits | None = None,
    ) -> None:
        if network not in ("host", "none"):
            raise ConfigError(f"network is 'host' or 'none', got {network!r}")
        can = {"network_none": network == "none", "max_ttl_s": _MAX_TTL_S}
        provider = HFProvider(token, namespace, flavor, threads)
        super().__init__(provider, image=image, isolation=isolation, lease_s=lease_s, limits=limits, **can)

    def _list_refused(self, spec: SandboxSpec) -> dict[str, object]:
        taken = [name for name in spec.labels if name == _NAME or name.startswith(_THEIRS)]
        return {**super()._list_refused(spec), **{f"label {name!r}, which is the SDK's own": True for name in taken}}


class HFProvider(SandboxProvider):
    def __init__(self, token: str | None, namespace: str | None, flavor: str, threads: int) -> None:
        super().__init__(token)
        self._namespace, self._flavor = namespace, flavor
        self._threads = ThreadPoolExecutor(int(threads), thread_name_prefix="rollyard-hf")
        self._derived: set[str] = set()  # tokens of single sandboxes
        self._lock = threading.Lock()
        self._api: Any = None

    @property
    def secrets(self) -> tuple[str, ...]:
        with self._lock:
            return (*super().secrets, *self._derived)

    async def call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def enter(self) -> None:
        self._sdk = import_sdk("huggingface_hub", "huggingface-hub", "hf")
        if not hasattr(self._sdk, "Sandbox"):
            raise MissingExtra("huggingface-hub>=2.4", "hf", why="the hf backend")
        found, hint = self._key or self._sdk.get_token(), "set HF_TOKEN, run `hf auth login`, or pass token="
        self._key = require_key("hf", found, what="token", hint=hint)
        self._api = self._sdk.HfApi(token=self._key)
        if self._namespace is None:
            self._namespace = str((await self.call(self._api.whoami))["name"])

    async def leave(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def create(self, request: SandboxRequest) -> HFLink:
        spec = request.spec
        return HFLink(
            self,
            await self.call(
                lambda: self._sdk.Sandbox.create(
                    request.image,
                    flavor=self._flavor,
                    idle_timeout=max(1, round(request.lease_s)),
                    env=dict(spec.env),
                    namespace=self._namespace,
                    labels=dict(request.labels),
                    start_timeout=spec.boot_s,
                    token=self._key,
                )
            ),
        )

    async def find(self, sandbox_id: str) -> tuple[HFLink, FoundSandbox]:
        job = await self.job(sandbox_id)
        if job.status.stage in _OVER:
            raise gone_error(sandbox_id)
        connect = self._sdk.Sandbox.connect
        made = await self.call(lambda: connect(sandbox_id, namespace=self._namespace, token=self._key))
        return HFLink(self, made), _describe(job)

    async def job(self, sandbox_id: str) -> Any:
        return await self.call(lambda: self._api.inspect_job(job_id=sandbox_id, namespace=self._namespace))

    async def list(self, labels: Mapping[str, str]) -> Sequence[FoundSandbox]:
        """Those that wait for hardware are among them: they will cost money, too."""
        jobs = await self.call(lambda: list(self._api.list_jobs(labels=dict(labels), namespace=self._namespace)))
        return [_describe(job) for job in jobs if job.status.stage not in _OVER]

    async def delete(self, sandbox_id: str) -> bool:
        return await self.call(lambda: self._cancel(sandbox_id))

    def _cancel(self, sandbox_id: str) -> bool:
        try:
            job = self._api.inspect_job(job_id=sandbox_id, namespace=self._namespace)
            if job.status.stage in _OVER:
                return False
            self._api.cancel_job(job_id=sandbox_id, namespace=self._namespace)
        except Exception as error:  # the SDK's errors have no common base; what is not 'gone' is raised
            if status_of(error) in (404, 410):
                return False
            raise
        return True

    def delete_now(self, ids: Sequence[str], seconds: float) -> Sequence[str]:
        def one(sandbox_id: str, left: float) -> bool:
            try:
                self._cancel(sandbox_id)
            except Exception:  # noqa: BLE001 - whatever it was, the sandbox may still be there, and is reported as such
                return False
            return True

        return one_by_one(one)(ids, seconds)

    def keep_secret(self, token: str) -> None:
        with self._lock:
            self._derived.add(token)

    def fault(self, error: Exception, text: str, about: str) -> Error:
        status = status_of(error)
        found = error_by_status(status, text, about=about, retry_after=_retry_after(error))
        if found is not None:
            return found
        if isinstance(error, self._sdk.errors.SandboxError) and "connection lost" not in text:
            return SandboxError(text)
        return SandboxInterrupted(f"a call to Hugging Face broke: {text}")


class HFLink(SandboxLink):
    """A `huggingface_hub.Sandbox`. A call that fails asks what became of the job: the proxy's words do not tell."""

    def __init__(self, provider: HFProvider, made: Any) -> None:
        self.id: str = made.id
        self._provider, self._made = provider, made
        provider.keep_secret(made.proxy_headers["X-Sandbox-Token"])

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await self._provider.call(work)
        except Exception as error:  # the SDK's errors have no common base; what is not 'gone' is raised
            if status_of(error) in (404, 410, 502, 503, None) and not await self.alive():
                raise gone_error(self.id) from None
            raise

    async def run(self, line: str, *, env: Mapping[str, str], timeout: float) -> str:
        run = self._made.run
        done = await self._call(lambda: run(line, env=dict(env), cwd="/", timeout=timeout, check=False))
        return str(done.stdout)

    async def put(self, path: str, data: bytes) -> None:
        await self._call(lambda: self._made.files.write(path, data))

    async def get(self, path: str) -> bytes:
        return await self._call(lambda: self._made.files.read(path))

    def as_user(self, user: str) -> SandboxLink:
        return self if user in ("0", "root") else super().as_user(user)  # the SDK's server is root there

    async def alive(self) -> bool:
        try:
            return (await self._provider.job(self.id)).status.stage not in _OVER
        except Exception as error:  # the SDK's errors have no common base; what is not 'gone' is raised
            if status_of(error) in (404, 410):
                return False
            raise

    async def keep(self, seconds: float) -> None:
        await self._call(self._made.processes)

    def close(self) -> None:
        self._made.close()  # the SDK makes a client for each sandbox


def status_of(error: Exception) -> int | None:
    """Of the SDK's own error, or of the response that an HTTP error carries."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return int(status) if status is not None else None


def _retry_after(error: Exception) -> float | None:
    said = str(getattr(getattr(error, "response", None), "headers", {}).get("retry-after", ""))
    return float(said) if said.replace(".", "", 1).isdigit() else None


def _describe(job: Any) -> FoundSandbox:
    return FoundSandbox(
        id=job.id,
        image=job.docker_image or job.space_id or "",
        labels={
            name: value for name, value in (job.labels or {}).items() if name != _NAME and not name.startswith(_THEIRS)
        },
        created_at=job.created_at.timestamp(),
        state=enum_text(job.status.stage).lower(),
    )
