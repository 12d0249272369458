"""Which agents exist, and how a third party adds one (G1)."""

import pytest

from rollyard import agents
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.testing.launches import launch

BUILT_IN = {"opencode", "pi", "claude-code", "codex", "gemini-cli", "qwen-code", "goose", "mini-swe-agent"}
MINE = """
name = "mine"
version = "2.0"
argv = ["{prefix}/bin/mine", "{options}", "--task", "{instruction}"]

[env]
MY_KEY = "{key}"

[files."{home}/.mine/config.json"]
url = "{base_url}"
limits = { context = "{context_window}" }

[wires.chat]
argv = ["--api", "chat"]

[options.system_prompt]
argv = ["--system", "{system_prompt}"]

[mcp]
style = "claude"
file = "{home}/.mine/mcp.json"
"""


def test_the_registry_says_which_agents_exist():
    assert set(agents.names()) >= BUILT_IN | {"oracle", "nop", "shell-agent"}
    for name in agents.names():
        assert agents.get(name).name == name


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(UnknownName, match="did you mean 'opencode'"):
        agents.get("opencod")


def test_every_installed_agent_pins_its_packages():
    for name in agents.names():
        layer = agents.get(name).layer
        version = agents.get(name).version
        for package in (*layer.npm, *layer.pip):
            assert "@" in package[1:] or "==" in package, f"{name}: {package}"
        assert not layer.npm or layer.npm[0].endswith(f"@{version}")
        assert not layer.pip or layer.pip[0].endswith(f"=={version}")


def test_an_agent_is_a_toml_file(tmp_path):
    path = tmp_path / "my-agent.toml"
    path.write_text(MINE)
    rendered = agents.render(agents.get(str(path)), launch(system_prompt="Be 'kind'.", instruction="$(x)"))
    assert rendered.argv[1:] == ("--api", "chat", "--system", "Be 'kind'.", "--task", "$(x)")
    assert rendered.files["/home/agent/.mine/config.json"] == (
        b'{\n "url": "http://127.0.0.1:4000/r/ro_1/v1",\n "limits": {\n  "context": 128000\n }\n}'
    )


def test_an_agent_is_a_value_in_someone_elses_package():
    assert agents.get("rollyard.agents.pi:agent") is agents.get("pi")
    mine = Agent(name="mine")
    assert agents.get(mine) is mine
    with pytest.raises(ConfigError, match="not an Agent"):
        agents.get("rollyard.agents.pi:MODELS")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "Invalid value"),
        ('nam = "x"', "unknown field"),
        ('name = "x"\nroot = "maybe"', "root"),
        ("", "name"),
    ],
)
def test_a_wrong_toml_file_is_an_error_with_its_path(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="bad.toml") as caught:
        agents.get(str(path))
    assert words in str(caught.value)


def test_a_missing_toml_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        agents.get(str(tmp_path / "none.toml"))


def test_the_default_prompt_ships_with_the_package():
    assert "sandbox" in agents.default_prompt()
