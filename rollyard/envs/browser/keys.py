"""Names of keys, as agents write them, to key events of the DevTools protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollyard.core.errors import ConfigError

_MODIFIERS = {"alt": (1, "Alt", 18), "ctrl": (2, "Control", 17), "meta": (4, "Meta", 91), "shift": (8, "Shift", 16)}
_SAME = {"control": "ctrl", "cmd": "meta", "super": "meta", "option": "alt"}
# name -> (key, code of the virtual key, text it types)
_NAMED: dict[str, tuple[str, int, str]] = {
    "enter": ("Enter", 13, "\r"),
    "return": ("Enter", 13, "\r"),
    "tab": ("Tab", 9, ""),
    "space": (" ", 32, " "),
    "escape": ("Escape", 27, ""),
    "esc": ("Escape", 27, ""),
    "backspace": ("Backspace", 8, ""),
    "delete": ("Delete", 46, ""),
    "home": ("Home", 36, ""),
    "end": ("End", 35, ""),
    "pageup": ("PageUp", 33, ""),
    "page_up": ("PageUp", 33, ""),
    "pagedown": ("PageDown", 34, ""),
    "page_down": ("PageDown", 34, ""),
    "left": ("ArrowLeft", 37, ""),
    "up": ("ArrowUp", 38, ""),
    "right": ("ArrowRight", 39, ""),
    "down": ("ArrowDown", 40, ""),
    **{f"f{n}": (f"F{n}", 111 + n, "") for n in range(1, 13)},
}


def presses(chord: str) -> Iterator[dict[str, Any]]:
    """Down and up events of `chord`; a name that no key has is a `ConfigError` before any event."""
    *held, last = chord.split("+") if chord != "+" else ["+"]
    modifiers = [_modifier(name) for name in held]
    key, code, text = _key(last)
    mask = sum(bit for bit, _, _ in modifiers)
    for _, name, number in modifiers:
        yield {"type": "rawKeyDown", "key": name, "windowsVirtualKeyCode": number, "modifiers": mask}
    down: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": mask}
    if text and mask in (0, 8):  # a chord with control or alt is a command, not text
        yield {"type": "keyDown", "text": text, **down}
    else:
        yield {"type": "rawKeyDown", "commands": _command(mask, key), **down}
    yield {"type": "keyUp", **down}
    for _, name, number in reversed(modifiers):
        yield {"type": "keyUp", "key": name, "windowsVirtualKeyCode": number, "modifiers": 0}


def _modifier(name: str) -> tuple[int, str, int]:
    known = _SAME.get(name.lower(), name.lower())
    if known not in _MODIFIERS:
        raise ConfigError(f"there is no modifier {name!r}", hint=f"there are {', '.join(_MODIFIERS)}")
    return _MODIFIERS[known]


def _key(name: str) -> tuple[str, int, str]:
    if name.lower().removeprefix("arrow") in _NAMED and len(name) > 1:
        return _NAMED[name.lower().removeprefix("arrow")]
    if len(name) == 1:
        return name, ord(name.upper()), name
    raise ConfigError(f"there is no key {name!r}", hint="a character, or a name such as Enter, Tab, Escape, Left, F5")


def _command(mask: int, key: str) -> list[str]:
    """Editing commands that a headless browser does not derive from the keys alone."""
    return ["selectAll"] if mask in (2, 4) and key.lower() == "a" else []
