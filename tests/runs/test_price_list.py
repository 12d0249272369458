"""List prices by server and model: a file of the user's before ours, one currency in a sum, and kept with the run."""

import math
import re
from pathlib import Path

import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.runs.report.price_list import VARIABLE, list_prices
from rollyard.runs.report.spending import Price
from rollyard.runs.run.config import RunConfig
from rollyard.runs.run.drive import carry_out
from rollyard.tasks.scaffold import new_task

OPENAI = "https://api.openai.com/v1"
OWN = """
currency = "EUR"

[servers."127.0.0.1:9"]
m = { prompt = 1.0, completion = 2.0, cached = 0.5 }

[servers."api.openai.com"]
gpt-5 = { prompt = 9.0, completion = 9.0 }
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "prices.toml").write_text(OWN)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "prices.toml"))
    return tmp_path / "prices.toml"


@pytest.fixture
def none(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "rollyard" / "prices.toml"


def test_the_file_that_the_documents_show_is_read(own):
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    own.write_text(re.search(r'```toml title="prices.toml"\n(.*?)```', page.read_text(), re.S)[1])
    assert list_prices({"a": ("http://localhost:8001/v1", "small-8b")}) == ({"a": Price(0.1, 0.4, 0.01)}, "EUR")


def test_ours_are_by_server_and_model(none):
    prices, currency = list_prices(
        {"a": (OPENAI, "gpt-5"), "b": ("http://localhost:8000/v1", "gpt-5"), "c": (OPENAI, None)}
    )
    assert currency == "$" and list(prices) == ["a"]  # a server of one's own costs what its owner says
    assert prices["a"].cached < prices["a"].prompt < prices["a"].completion


def test_those_of_the_user_go_before_ours_and_no_sum_mixes_currencies(own):
    assert list_prices({"a": (OPENAI, "gpt-5"), "b": (OPENAI, "gpt-4o")}) == ({"a": Price(9.0, 9.0)}, "EUR")
    prices, currency = list_prices({"b": (OPENAI, "gpt-4o")})
    assert currency == "$" and list(prices) == ["b"]


def test_the_users_file_is_found_among_their_settings_and_a_bad_one_is_refused_by_name(none, monkeypatch):
    none.parent.mkdir(parents=True)
    none.write_text(OWN)
    assert list_prices({"a": ("http://127.0.0.1:9/v1", "m")}) == ({"a": Price(1.0, 2.0, 0.5)}, "EUR")
    none.write_text('[servers."x"]\nm = { prompt = 1.0 }\n')
    with pytest.raises(ConfigError, match="prices.toml: "):
        list_prices({})
    monkeypatch.setenv(VARIABLE, "/nowhere.toml")
    with pytest.raises(ConfigError, match="ROLLYARD_PRICES names /nowhere.toml"):
        list_prices({})


@pytest.mark.parametrize("price", ["-1.0", "nan", "inf"])
@pytest.mark.parametrize("field", ["prompt", "completion", "cached"])
def test_a_price_by_which_no_budget_would_end_is_refused(own, field, price):
    prices = {"prompt": "1.0", "completion": "1.0", field: price}
    own.write_text(f'currency = "$"\n[servers."x"]\nm = {{ {", ".join(f"{k} = {v}" for k, v in prices.items())} }}\n')
    with pytest.raises(ConfigError, match=r"not below 0, got"):
        list_prices({})


def test_a_budget_is_a_number():
    with pytest.raises(ConfigError, match="max_cost must be at least 0, got nan"):
        RunConfig(tasks="x", prices={"policy": Price(1.0, 1.0)}, max_cost=math.nan)


@pytest.mark.anyio
@pytest.mark.parametrize("named", [{}, {"policy": Price(3.0, 4.0)}], ids=["none", "its own"])
async def test_a_run_that_names_no_prices_keeps_those_of_the_list(tmp_path, own, named):
    config = RunConfig(
        tasks=str(new_task(tmp_path / "hello")), agents=("nop",), prices=named,
        policies={"policy": "upstream:http://127.0.0.1:9/v1#model=m"},
    )  # fmt: skip
    async with ry.Store.open(tmp_path / "runs.db") as store:
        report = await carry_out(config, store=store)
        kept = (await store.get_run(report.run_id)).config
    assert kept["prices"]["policy"]["prompt"] == (3.0 if named else 1.0)
    assert (report.cost, report.currency) == (0.0, "" if named else "EUR")
    assert ("0.0000 EUR" in str(report)) == (not named)
