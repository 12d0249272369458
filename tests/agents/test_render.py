"""What an agent is started with: every outside value arrives as data, whatever it holds (G4, G5, T8)."""

import json
import tomllib

import msgspec
import pytest
import yaml

from rollyard import agents
from rollyard.agents.serial import dump
from rollyard.core.agent import Addition, Agent
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.testing.launches import AWKWARD, HTTP, KEY, STDIO, launch

ALL = agents.names()
MODEL_AGENTS = [name for name in ALL if agents.get(name).dialect is not None]
OPTIONS = {"system_prompt": "Be brief.", "disabled_tools": ("a", "b"), "disable_thinking": True, "max_tokens": 77}


def load(path: str, data: bytes):
    if path.endswith(".json"):
        return json.loads(data)
    if path.endswith(".toml"):
        return tomllib.loads(data.decode())
    if path.endswith(".yaml"):
        return yaml.safe_load(data)
    return data.decode()


def everything(rendered) -> list[str]:
    """Every string the program will see: arguments, variables, text files and the leaves of structured ones."""

    def leaves(node):
        if isinstance(node, dict):
            for key, value in node.items():
                yield key
                yield from leaves(value)
        elif isinstance(node, list):
            for value in node:
                yield from leaves(value)
        elif isinstance(node, str):
            yield node

    found = [*rendered.argv, *rendered.env.values()]
    for path, data in rendered.files.items():
        found.extend(leaves(load(path, data)))
    return found


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_an_instruction_arrives_byte_for_byte(name, text):
    strings = everything(agents.render(agents.get(name), launch(instruction=text)))
    assert any(string == text or string.endswith(("=" + text, "\n" + text)) for string in strings)


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("name", [n for n in MODEL_AGENTS if "system_prompt" in agents.get(n).options])
def test_a_system_prompt_arrives_byte_for_byte(name, text):
    strings = everything(agents.render(agents.get(name), launch(system_prompt=text)))
    assert any(string == text or string.endswith(("=" + text, "\n" + text)) for string in strings)


@pytest.mark.parametrize("text", [v for k, v in AWKWARD.items() if k != "long"])
@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_model_home_and_tool_names_are_data_and_every_file_parses(name, text):
    agent = msgspec.structs.replace(agents.get(name), tools=())  # one that lists no tools takes any name
    fields = {"model": text, "home": f"/home/{text}", "workdir": f"/w/{text}"}
    if "disabled_tools" in agent.options:
        fields["disabled_tools"] = (text, "other")
    rendered = agents.render(agent, launch(**fields))
    strings = everything(rendered)
    assert any(text in string for string in strings)
    assert rendered.env["HOME"] == f"/home/{text}"
    for path in rendered.files:
        assert path.startswith(f"/home/{text}/")


@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_a_value_that_looks_like_a_template_is_not_one(name):
    agent = msgspec.structs.replace(agents.get(name), tools=())
    fields = {"model": "{key}", "instruction": "{key}"}
    if "disabled_tools" in agent.options:
        fields["disabled_tools"] = ("{key}",)
    rendered = agents.render(agent, launch(**fields))
    assert not [path for path, data in rendered.files.items() if KEY.encode() in data]
    assert any("{key}" in string for string in rendered.argv) or any(
        b"{key}" in data for data in rendered.files.values()
    )


@pytest.mark.parametrize("tree", [{"a": {"b": [1, True, {"c": text}], text: text}} for text in AWKWARD.values()])
@pytest.mark.parametrize("path", ["x.json", "x.toml", "x.yaml"])
def test_every_format_reads_back_what_was_written(path, tree):
    assert load(path, dump(path, tree)) == tree


@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_the_key_is_never_in_an_argument_and_in_no_file(name):
    agent = agents.get(name)
    mcp = (HTTP,) if agent.mcp else ()
    rendered = agents.render(agent, launch(mcp=mcp))
    assert not [item for item in rendered.argv if KEY in item]
    assert KEY in rendered.env.values()
    kept_in = [path for path, data in rendered.files.items() if KEY.encode() in data]
    assert kept_in == (
        [] if agent.mcp is None or agent.mcp.secret else ["/home/agent" + agent.mcp.file.removeprefix("{home}")]
    )


def test_an_agent_that_would_show_the_key_in_its_arguments_is_refused():
    leaky = Agent(name="leaky", argv=("prog", "--key={key}"), wires={"chat": Addition()})
    with pytest.raises(ConfigError, match="key into its arguments"):
        agents.render(leaky, launch())


@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_nothing_of_the_hosts_environment_reaches_an_agent(name, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-hosts-own-key")
    rendered = agents.render(agents.get(name), launch())
    assert "the-hosts-own-key" not in everything(rendered)


@pytest.mark.parametrize("option", [*OPTIONS, "mcp"])
@pytest.mark.parametrize("name", ALL)
def test_every_option_takes_effect_or_is_refused_by_name(name, option):
    agent = agents.get(name)
    value = {**OPTIONS, "disabled_tools": agent.tools[:2] or ("a",), "mcp": (HTTP,)}[option]
    if option in agent.switches:
        plain = agents.render(agent, launch(solution="/solution/solve.sh"))
        assert agents.render(agent, launch(solution="/solution/solve.sh", **{option: value})) != plain
        agents.refuse(agent, {option: value})
    else:
        with pytest.raises(Unsupported, match="MCP" if option == "mcp" else option):
            agents.refuse(agent, {option: value})
        with pytest.raises(Unsupported):
            agents.render(agent, launch(solution="/solution/solve.sh", **{option: value}))


@pytest.mark.parametrize("name", [name for name in ALL if "disabled_tools" in agents.get(name).options])
def test_a_tool_that_an_agent_does_not_have_is_refused_by_its_name(name):
    agent = agents.get(name)
    assert agent.tools
    with pytest.raises(Unsupported, match="no tool 'made-up' to disable.*") as refused:
        agents.refuse(agent, {"disabled_tools": (agent.tools[0], "made-up")})
    assert agent.tools[0] in refused.value.hint
    if agent.mcp is not None:  # a tool of a server that it is given
        agents.refuse(agent, {"disabled_tools": (f"mcp__{HTTP.name}__word",), "mcp": (HTTP,)})


@pytest.mark.parametrize("name", ALL)
def test_unset_options_are_never_refused(name):
    unset = {"system_prompt": None, "disabled_tools": (), "mcp": (), "disable_thinking": False, "max_tokens": None}
    agents.refuse(agents.get(name), {**unset, "dialect": None})


def test_an_option_nobody_has_is_an_error():
    with pytest.raises(ConfigError, match="no option 'sytem_prompt'"):
        agents.refuse(agents.get("pi"), {"sytem_prompt": "x"})


@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_every_dialect_an_agent_speaks_points_it_at_the_gate(name):
    agent = agents.get(name)
    for dialect in agent.wires:
        strings = everything(agents.render(agent, launch(dialect=dialect)))
        assert any(string.startswith("http://127.0.0.1:4000/r/ro_1") for string in strings)
    missing = next(d for d in ("completions", "gemini", "chat") if d not in agent.wires)
    with pytest.raises(Unsupported, match=missing):
        agents.render(agent, launch(dialect=missing))


@pytest.mark.parametrize("name", MODEL_AGENTS)
def test_commands_without_asking_need_isolation_or_a_word_of_consent(name):
    agent = agents.get(name)
    with pytest.raises(Unsupported, match="needs isolation 'landlock'"):
        agents.render(agent, launch(isolation="none"))
    agents.render(agent, launch(isolation="none", allow_unsafe=True))
    agents.render(agent, launch(isolation="landlock"))
    agents.render(agent, launch(isolation="microvm"))


def test_root_behaviour_is_said_before_the_start():
    with pytest.raises(Unsupported, match="refuses to run as root"):
        agents.render(Agent(name="shy", root="refuses"), launch())
    with pytest.raises(Unsupported, match="needs root"):
        agents.render(Agent(name="bold", root="needs"), launch(as_root=False))


def test_an_argument_the_kernel_would_not_take_is_refused_with_the_agents_name():
    with pytest.raises(Unsupported, match="'pi' takes the instruction as one argument"):
        agents.render(agents.get("pi"), launch(instruction="x" * 140_000))
    agents.render(agents.get("opencode"), launch(instruction="x" * 1_000_000))
    with pytest.raises(ConfigError, match="NUL"):
        agents.render(agents.get("pi"), launch(instruction="a\0b"))


def mcp_entries(agent, rendered) -> dict:
    path = agent.mcp.file.replace("{home}", "/home/agent")
    return load(path, rendered.files[path])[agent.mcp.key]


@pytest.mark.parametrize("name", [n for n in MODEL_AGENTS if agents.get(n).mcp])
def test_mcp_servers_are_written_in_the_agents_format(name):
    agent = agents.get(name)
    servers = tuple(server for server in (STDIO, HTTP) if server.transport in agent.mcp.transports)
    entries = mcp_entries(agent, agents.render(agent, launch(mcp=servers)))
    http = json.dumps(entries["gate"])
    if STDIO in servers:
        stdio = json.dumps(entries["files"])
        assert "python3" in stdio and json.dumps("a 'b' $(c)") in stdio
    assert "http://127.0.0.1:4000/mcp" in http
    assert "KEY" in http or KEY in http


def test_two_servers_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two MCP servers"):
        agents.render(agents.get("codex"), launch(mcp=(HTTP, HTTP)))


def test_the_oracle_runs_the_solution_and_nop_runs_nothing():
    assert agents.render(agents.get("oracle"), launch(solution="/solution/solve.sh")).argv == (
        "bash",
        "/solution/solve.sh",
    )
    with pytest.raises(ConfigError, match="no solution"):
        agents.render(agents.get("oracle"), launch())
    assert agents.render(agents.get("nop"), launch()).argv == ()


def test_artifact_globs_are_paths_in_the_sandbox():
    assert agents.artifacts(agents.get("pi"), launch()) == ("/home/agent/.pi/agent/sessions/*",)


def test_an_agent_that_is_already_there_is_found_on_the_path():
    assert agents.presence_check(agents.get("pi"), "/opt/rollyard/0123") == ["/opt/rollyard/0123/bin/pi", "--version"]
    assert agents.presence_check(agents.get("pi"), "") == ["pi", "--version"]
    assert agents.render(agents.get("pi"), launch(prefix="")).argv[0] == "pi"


@pytest.mark.parametrize(
    ("name", "program", "flags", "script"),
    [
        ("pi", "pi", (), "bin/pi"),
        ("gemini-cli", "gemini", (), "bin/gemini"),
        ("qwen-code", "qwen", ("--expose-gc",), "lib/node_modules/@qwen-code/qwen-code/cli.js"),
    ],
)
def test_out_of_a_layer_it_runs_on_the_layers_node_with_little_memory_and_its_programs_do_not(
    name, program, flags, script
):
    prefix = "/opt/rollyard/0123"
    rendered = agents.render(agents.get(name), launch(prefix=prefix))
    started = (f"{prefix}/bin/node", *flags, "--max-semi-space-size=1", f"{prefix}/{script}")
    assert rendered.argv[: len(started)] == started
    assert "NODE_OPTIONS" not in rendered.env
    assert agents.render(agents.get(name), launch(prefix="")).argv[0] == program


def test_gemini_cli_does_not_start_itself_a_second_time():
    assert agents.render(agents.get("gemini-cli"), launch()).env["GEMINI_CLI_NO_RELAUNCH"] == "true"
