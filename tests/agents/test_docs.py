"""The pages about agents say what the code says: the table is made from the values, and the examples work."""

import re
import sys
from pathlib import Path

from rollyard import agents
from rollyard.testing.launches import launch
from tests.agents.agent_tables import option_table, table

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {
    table: re.compile(r"(<!-- table: .*? -->\n).*?(<!-- end of table -->)", re.S),
    option_table: re.compile(r"(<!-- options: .*? -->\n).*?(<!-- end of options -->)", re.S),
}


def page_with_tables() -> tuple[str, str]:
    text = wanted = (DOCS / "agents.md").read_text()
    for make, place in TABLES.items():
        made = make(agents.get(name) for name in agents.names())
        wanted, found = place.subn(lambda old, made=made: old[1] + made + old[2], wanted)
        assert found == 1
    return text, wanted


def test_the_tables_of_agents_are_those_the_values_make():
    text, wanted = page_with_tables()
    assert text == wanted, "write it again: python -m tests.agents.test_docs"


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / "add-an-agent.md").read_text(), re.S)[number]


def test_the_toml_example_is_a_whole_agent(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(block("toml"))
    rendered = agents.render(agents.get(str(path)), launch(system_prompt="Be 'brief'.", disabled_tools=("web",)))
    assert rendered.argv[3:7] == ("--api", "chat", "--system-file", "/home/agent/.mine/system.md")
    assert b'"disabled": [\n  "web"\n ]' in rendered.files["/home/agent/.mine/config.json"]


def test_the_python_example_is_a_whole_agent():
    names: dict = {}
    exec(block("python"), names)
    rendered = agents.render(names["agent"], launch(instruction="-x"))
    assert rendered.argv[-2:] == ("--", "-x")
    parser = agents.parse(names["agent"])
    assert [e.kind for e in parser.feed(b'{"type":"text","text":"a"}\nnoise\n{"type":"end","ok":true}\n')] == [
        "assistant", "raw", "done",
    ]  # fmt: skip


if __name__ == "__main__":
    (DOCS / "agents.md").write_text(page_with_tables()[1])
    sys.exit(0)
