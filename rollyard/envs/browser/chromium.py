"""Chromium, headless, in a sandbox: started, attached to one page, looked at and touched.

Everything it fetches goes through the proxy it is given; it has no other network. Its own sandbox is off: the sandbox it
lives in is the boundary, and its user namespaces are not available inside.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Self

from rollyard.core.errors import EnvError, EnvUnavailable, SandboxError
from rollyard.core.protocols import Job, Sandbox
from rollyard.envs.browser.cdp import Cdp
from rollyard.envs.browser.keys import presses

Button = Literal["left", "middle", "right"]
PROFILE = "/tmp/rollyard-browser"
# Debian's wrapper script reads files that an image need not have: the program itself comes first
PROGRAMS = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-breakpad",
    "--metrics-recording-only",
    "--hide-scrollbars",
    "--mute-audio",
    "--proxy-bypass-list=<-loopback>",
    f"--user-data-dir={PROFILE}",
    "--remote-debugging-port=0",
)
_CALL_S = 30.0
_LOAD_S = 15.0
_POLL_S = 0.05
_SETTLE_S = 0.15  # between an action and the picture of what it did


class Chromium:
    """One browser with one page of `size`. Make it with `start`."""

    def __init__(self, job: Job, cdp: Cdp, size: tuple[int, int]) -> None:
        self.size = size
        self._job = job
        self._cdp = cdp

    @classmethod
    async def start(cls, sandbox: Sandbox, *, proxy_port: int, size: tuple[int, int], timeout_s: float) -> Self:
        """Every failure carries what Chromium last said."""
        program = await _find(sandbox)
        job = await sandbox.start(
            [
                program,
                *FLAGS,
                f"--window-size={size[0]},{size[1]}",
                f"--proxy-server=http://127.0.0.1:{proxy_port}",
                "about:blank",
            ],
            env={"HOME": "/tmp", "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )
        try:
            async with asyncio.timeout(timeout_s):
                port, path = await _address(sandbox, job)
                cdp = Cdp(await sandbox.dial(port), f"ws://127.0.0.1:{port}{path}")
                try:
                    await cdp.open()
                    await _attach(cdp, size)
                except BaseException:  # cancelled too: this stream has no other owner
                    await cdp.aclose()
                    raise
        except TimeoutError:
            said = (await job.tail(1000, stderr=True)).decode(errors="replace")
            raise EnvUnavailable(f"Chromium was not ready within {timeout_s:g} s: {said}") from None
        return cls(job, cdp, size)

    async def aclose(self) -> None:
        await self._cdp.aclose()

    # -- looking

    async def screenshot(self) -> str:
        """The page as a PNG in base64, at the size that clicks are given in."""
        shot = await self._cdp.call("Page.captureScreenshot", _CALL_S, format="png")
        return shot["data"]

    async def url(self) -> str | None:
        return await self._evaluate("location.href")

    async def check(self) -> None:
        """Raises unless the browser runs, its page answers, and that page is not an error of the browser's own."""
        if (code := await self._job.poll()) is not None:
            raise EnvUnavailable(f"the browser ended with exit code {code}", hint="take another lease")
        if (at := await self.url()) is None or at.startswith("chrome-error:"):
            raise EnvError("the page did not load", hint="check that the application answers")

    # -- acting

    async def navigate(self, url: str) -> None:
        """Returns when the page has loaded; one that cannot be reached, or answers with an error, raises."""
        answer = await self._cdp.call("Page.navigate", _CALL_S, url=url)
        if answer.get("errorText"):
            raise EnvError(f"{url} cannot be opened: {answer['errorText']}")
        await self._wait_for_load("complete")
        status = await self._evaluate("performance.getEntriesByType('navigation')[0]?.responseStatus ?? 0")
        if isinstance(status, int) and status >= 400:
            raise EnvError(f"{url} answered {status}")

    async def click(self, x: int, y: int, *, button: Button = "left", times: int = 1) -> None:
        await self.move(x, y)
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                await self._mouse(kind, x, y, button=button, clickCount=count)
        await self._settle()

    async def move(self, x: int, y: int) -> None:
        await self._mouse("mouseMoved", x, y)

    async def drag(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        await self.move(*start)
        await self._mouse("mousePressed", *start, button="left", clickCount=1)
        await self._mouse("mouseMoved", *end, button="left", buttons=1)
        await self._mouse("mouseReleased", *end, button="left", clickCount=1)
        await self._settle()

    async def scroll(self, x: int, y: int, *, right: int = 0, down: int = 0) -> None:
        """In pixels; negative numbers go left and up."""
        await self._mouse("mouseWheel", x, y, deltaX=right, deltaY=down)
        await self._settle()

    async def type(self, text: str) -> None:
        await self._cdp.call("Input.insertText", _CALL_S, text=text)
        await self._settle()

    async def press(self, chord: str) -> None:
        """A key or a chord, as in `Enter`, `ctrl+a`, `shift+Tab`."""
        for event in presses(chord):
            await self._cdp.call("Input.dispatchKeyEvent", _CALL_S, **event)
        await self._settle()

    async def _mouse(self, kind: str, x: int, y: int, **fields: Any) -> None:
        await self._cdp.call("Input.dispatchMouseEvent", _CALL_S, type=kind, x=x, y=y, **fields)

    async def _settle(self) -> None:
        """Give the page a moment, then wait for a navigation that the action began."""
        await asyncio.sleep(_SETTLE_S)
        await self._wait_for_load("interactive", "complete")

    async def _wait_for_load(self, *states: str) -> None:
        """A page that never gets there is shown as it is: pictures tell an agent more than an error."""
        for _ in range(round(_LOAD_S / _POLL_S)):
            if await self._evaluate("document.readyState") in states:
                return
            await asyncio.sleep(_POLL_S)

    async def _evaluate(self, expression: str) -> Any:
        """None also while one page gives way to the next and there is nothing to ask."""
        try:
            answer = await self._cdp.call("Runtime.evaluate", _CALL_S, expression=expression, returnByValue=True)
        except EnvUnavailable:
            raise
        except EnvError:
            return None
        return answer.get("result", {}).get("value")


async def _find(sandbox: Sandbox) -> str:
    found = await sandbox.exec(
        ["sh", "-c", 'for p; do command -v "$p" && exit; done; exit 1', "sh", *PROGRAMS], timeout=10
    )
    if not found.ok:
        raise EnvError(
            "there is no Chromium in the browser's image", hint="install Debian's `chromium`, or name an image with one"
        )
    return found.stdout.decode().strip()


async def _address(sandbox: Sandbox, job: Job) -> tuple[int, str]:
    """Chromium writes its port and path to a file in its profile as soon as it listens."""
    while True:
        if (code := await job.poll()) is not None:
            said = (await job.tail(1000, stderr=True)).decode(errors="replace")
            raise EnvUnavailable(f"Chromium ended at once with exit code {code}: {said}")
        try:
            port, path = (await sandbox.read_text(f"{PROFILE}/DevToolsActivePort")).split("\n")[:2]
            return int(port), path
        except (SandboxError, ValueError):
            await asyncio.sleep(_POLL_S)  # not there yet, or half written


async def _attach(cdp: Cdp, size: tuple[int, int]) -> None:
    targets = await cdp.call("Target.getTargets", _CALL_S)
    page = next(one["targetId"] for one in targets["targetInfos"] if one["type"] == "page")
    attached = await cdp.call("Target.attachToTarget", _CALL_S, targetId=page, flatten=True)
    cdp.session = attached["sessionId"]
    await cdp.call("Page.enable", _CALL_S)
    await cdp.call(
        "Emulation.setDeviceMetricsOverride",
        _CALL_S,
        width=size[0],
        height=size[1],
        deviceScaleFactor=1,
        mobile=False,
    )
