"""O: what it is given arrives, whatever it holds."""

from __future__ import annotations

from rollyard.agents import default_prompt
from rollyard.testing.agent.fixture import AgentFixture
from rollyard.testing.launches import AWKWARD
from rollyard.testing.suite import case, check

_ALL = "\n".join(text for name, text in AWKWARD.items() if name != "long")


@case("O1", "gets an awkward instruction byte for byte, and runs nothing in it", needs=("model",), timeout=300)
async def awkward(fixture: AgentFixture) -> None:
    seen = await fixture.run(instruction=_ALL, collect=["/tmp/pwned"])
    check(_ALL in seen.text, "the instruction was changed on its way")
    check("/tmp/pwned" not in seen.rollout.files, "something in the instruction was run")
    for name in ("slash", "dash"):
        seen = await fixture.run(instruction=AWKWARD[name])
        check(AWKWARD[name] in seen.text, f"an instruction that starts with a {name} was changed")


@case("O2", "gets 100 kB of instruction byte for byte", needs=("model",), timeout=300)
async def long(fixture: AgentFixture) -> None:
    seen = await fixture.run(instruction=AWKWARD["long"])
    check(AWKWARD["long"].strip() in seen.text, "the instruction was changed on its way")  # some trim its ends


@case("O3", "gets a system prompt byte for byte", needs=("model", "system_prompt"), timeout=300)
async def system_prompt(fixture: AgentFixture) -> None:
    seen = await fixture.run(system_prompt=_ALL)
    check(_ALL in seen.text, "the system prompt was changed on its way")
    seen.check_solved()


@case("O4", "works with the default system prompt", needs=("model", "system_prompt"), timeout=300)
async def with_default_prompt(fixture: AgentFixture) -> None:
    seen = await fixture.run(system_prompt=default_prompt())
    check(default_prompt().strip() in seen.text, "the default prompt is not in what the model was shown")
    seen.check_solved()
