import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, UnknownName, Unsupported
from rollyard.runs.rollout.modes import choose
from rollyard.runs.rollout.options import RolloutOptions
from tests.policy.conftest import make_model


def test_policies_are_named_as_on_the_command_line(tmp_path):
    script = tmp_path / "s.json"
    script.write_text('[{"text": "hi"}]')
    assert type(ry.policy.parse("queue")).__name__ == "Queue"
    assert type(ry.policy.parse(f"scripted:{script}")).__name__ == "Scripted"
    policy = ry.policy.parse("upstream:http://127.0.0.1:8000/v1", model="m", key_env=None)
    assert policy.settings.url == "http://127.0.0.1:8000/v1" and policy.settings.model == "m"


def test_settings_may_be_written_behind_a_hash_and_arguments_win():
    policy = ry.policy.parse("tokens:http://127.0.0.1:8000/v1#renderer=bytes&kind=vllm&max_tokens_cap=7", model="m")
    assert policy.root == "http://127.0.0.1:8000" and policy.engine.name == "vllm" and policy.renderer.name == "bytes"
    relayed = ry.policy.parse("upstream:http://127.0.0.1:1/v1#model=a&disable_thinking=true", model="b")
    assert relayed.settings.model == "b" and relayed.settings.disable_thinking is True
    assert ry.policy.parse("queue#renderer=bytes&max_held=3").renderer.name == "bytes"


@pytest.mark.parametrize("kind", ["tokens", "upstream"])
def test_several_servers_stand_with_commas_between(kind):
    policy = ry.policy.parse(f"{kind}:http://127.0.0.1:8000/v1,http://127.0.0.1:8001/v1#max_tokens_cap=7", model="m")
    ends = "" if kind == "tokens" else "/v1"
    assert policy.replicas.urls == (f"http://127.0.0.1:8000{ends}", f"http://127.0.0.1:8001{ends}")


def test_an_unknown_policy_lists_those_that_exist():
    with pytest.raises(UnknownName, match="scripted"):
        ry.policy.parse("skripted:file")


@pytest.mark.parametrize(
    "text",
    ["", "upstream", "replay:rollout_1", "scripted:nowhere.yaml", "queue#size", "queue#size=3"],
)
def test_a_policy_that_cannot_be_made_says_why(text):
    with pytest.raises(ConfigError):
        ry.policy.parse(text)


REFUSED = {
    "queue#size=3": "takes no option 'size'; it takes: renderer, tools, max_held, hold_s",
    "queue#max_held=many": "'max_held' of the policy 'queue' cannot be 'many'",
    "upstream:http://h/v1#dialect=latin": "'dialect' of the policy 'upstream' cannot be 'latin'",
    "upstream:http://h/v1#key=sesame": "key_env=NAME",
    "upstream": "needs its url",
    "replay:ro_1#recorded=x": "cannot be written as text",
    "scripted:SCRIPT#renderer=nonsuch": "nonsuch",
    "passthrough:http://h/v1#model=m": "takes no option 'model'; it takes: key_env, timeouts",
}


@pytest.mark.parametrize(("text", "words"), REFUSED.items(), ids=REFUSED.keys())
def test_an_option_that_cannot_be_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "s.json").write_text('[{"text": "hi"}]')
    with pytest.raises(ConfigError) as refused:
        ry.policy.parse(text.replace("SCRIPT", str(tmp_path / "s.json")))
    assert words in str(refused.value) and "sesame" not in str(refused.value)


def test_an_option_is_read_as_the_policy_wants_it(tmp_path):
    (tmp_path / "s.json").write_text('[{"text": "hi"}]')
    relayed = ry.policy.parse("upstream:http://127.0.0.1:1/v1#model=123&top_logprobs=3")
    assert (relayed.settings.model, relayed.settings.top_logprobs) == ("123", 3)
    assert ry.policy.parse(f"scripted:{tmp_path / 's.json'}#renderer=bytes").prompts is not None


def test_a_template_without_a_place_for_tools_is_refused_once_for_an_agent_that_works_by_them(tmp_path):
    model = make_model(tmp_path / "m", "stripping")
    for text in (f"tokens:http://127.0.0.1:1/v1#renderer={model}", f"queue#renderer={model}"):
        with pytest.raises(Unsupported, match="has no place for tools") as refused:
            choose(RolloutOptions(), policy=ry.policy.parse(text), agent=ry.agents.get("shell-agent"))
        assert "#tools=omit" in str(refused.value)
        choose(RolloutOptions(), policy=ry.policy.parse(f"{text}&tools=omit"), agent=ry.agents.get("shell-agent"))
        choose(RolloutOptions(), policy=ry.policy.parse(text), agent=ry.agents.get("aider"))  # it edits by text
    with pytest.raises(ConfigError, match="tools"):
        ry.policy.Queue(ry.policy.renderer("bytes"), tools="omit")


def test_no_module_hides_a_public_name():
    import importlib
    import pkgutil

    for found in pkgutil.iter_modules(ry.policy.__path__):
        importlib.import_module(f"rollyard.policy.{found.name}")
    assert all(callable(getattr(ry.policy, name)) for name in dir(ry.policy))
