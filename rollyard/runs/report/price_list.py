"""List prices by server and model, for runs that name none: those of a file of the user's, else ours in `prices.toml`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.runs.report.spending import Price

VARIABLE = "ROLLYARD_PRICES"


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`servers` is host (with its port where the address has one) -> model -> price."""

    currency: str
    servers: Mapping[str, Mapping[str, Price]] = {}

    def find(self, url: str, model: str | None) -> Price | None:
        return None if model is None else self.servers.get(urlsplit(url).netloc.rpartition("@")[2], {}).get(model)


def price_lists() -> list[PriceList]:
    """The user's first."""
    ours = files("rollyard.runs.report").joinpath("prices.toml").read_text()
    own = own_prices()
    return [*([_read(own.read_text(), str(own))] if own.is_file() else []), _read(ours, "prices.toml")]


def own_prices() -> Path:
    """`$ROLLYARD_PRICES`, else `rollyard/prices.toml` in the user's folder of settings."""
    if chosen := os.environ.get(VARIABLE):
        if not Path(chosen).is_file():
            raise ConfigError(f"{VARIABLE} names {chosen}, which is not a file", hint=f"create it, or unset {VARIABLE}")
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rollyard" / "prices.toml"


def list_prices(models: Mapping[str, tuple[str, str | None]]) -> tuple[dict[str, Price], str]:
    """Of policies by name, each the address and the model it asks for: the prices that are known, and their currency. All are
    of one list, so that no sum mixes currencies."""
    for one in price_lists():
        found = {name: one.find(url, model) for name, (url, model) in models.items()}
        if known := {name: price for name, price in found.items() if price is not None}:
            return known, one.currency
    return {}, ""


def _read(text: str, where: str) -> PriceList:
    try:
        return msgspec.convert(tomllib.loads(text), PriceList)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {error}", hint='currency = "$", then [servers."HOST"] with prices') from error
