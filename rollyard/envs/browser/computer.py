"""`computer`: the one tool of an agent that sees a screen. Every action answers with the picture of what it did."""

from __future__ import annotations

import asyncio
from typing import Literal

from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.message import Image
from rollyard.envs.browser.chromium import Button, Chromium
from rollyard.tools.tool import Tool, ToolError, tool

Action = Literal["screenshot", "click", "double_click", "move", "drag", "type", "key", "scroll", "wait"]
Direction = Literal["up", "down", "left", "right"]
_WAIT_S = 10.0
_NOTCH = 100  # pixels
_STEPS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def computer(browser: Chromium) -> Tool:
    width, height = browser.size

    def place(at: tuple[int, int] | None, name: str = "coordinate") -> tuple[int, int]:
        if at is None:
            raise ToolError(f"this action needs {name}, [x, y]")
        if not (0 <= at[0] < width and 0 <= at[1] < height):
            raise ToolError(f"{name} {list(at)} is outside the screen, which is {width} x {height}")
        return at

    async def act(
        action: Action,
        coordinate: tuple[int, int] | None = None,
        end_coordinate: tuple[int, int] | None = None,
        text: str | None = None,
        button: Button = "left",
        direction: Direction = "down",
        amount: int = 3,
        seconds: float = 1.0,
    ) -> Image:
        try:
            match action:
                case "screenshot":
                    pass
                case "click" | "double_click":
                    await browser.click(*place(coordinate), button=button, times=2 if action == "double_click" else 1)
                case "move":
                    await browser.move(*place(coordinate))
                case "drag":
                    await browser.drag(place(coordinate), place(end_coordinate, "end_coordinate"))
                case "type" | "key":
                    if not text:
                        raise ToolError(f"{action} needs text")
                    await (browser.type(text) if action == "type" else browser.press(text))
                case "scroll":
                    right, down = (step * _NOTCH * amount for step in _STEPS[direction])
                    await browser.scroll(*place(coordinate or (width // 2, height // 2)), right=right, down=down)
                case "wait":
                    await asyncio.sleep(min(max(seconds, 0.0), _WAIT_S))
            return Image(media_type="image/png", data=await browser.screenshot())
        except (ConfigError, EnvError) as error:
            raise ToolError(error.message) from error

    return tool(name="computer", description=_words(width, height))(act)


def _words(width: int, height: int) -> str:
    return (
        f"A browser window of {width} x {height} pixels. Every action returns a screenshot. click, double_click and move "
        "take coordinate [x, y]; drag goes from coordinate to end_coordinate; type enters text where the cursor is; key "
        "presses text as a key or chord (Enter, Tab, ctrl+a); scroll moves amount notches in direction; wait takes seconds."
    )
