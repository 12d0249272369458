"""mini-swe-agent: chat through litellm, the only one here that does not stream. A reply without a tool call is an error to
it; it ends when a command prints its marker as the first line."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.core.agent import Addition, Agent, LayerSpec
from rollyard.core.events import AgentEvent

_CONFIG = "{home}/.config/mini-swe-agent/rollyard.yaml"
_LIMITS = ("RepeatedFormatError", "LimitsExceeded", "TimeExceeded", "UserInterruption")
TRAJECTORY = "{home}/.config/mini-swe-agent/trajectory.json"


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    """It prints for people. After `Exit:` comes what was submitted, or the name of a limit that ended it with exit code 0; a
    failed model ends it with another exit code."""
    yield AgentEvent(kind="raw", text=line)
    if before.strip() == "Exit:" and line.strip() in _LIMITS:
        yield AgentEvent(kind="done", ok=False, text=line.strip())


agent = Agent(
    name="mini-swe-agent",
    version="2.4.6",
    summary="mini-swe-agent, one loop and one bash tool",
    layer=LayerSpec(pip=("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0"), python="3.11"),
    check=("{prefix}/bin/mini", "--help"),
    argv=(
        "{prefix}/bin/mini",
        "--model=hosted_vllm/{model}",
        "--yolo",
        "--exit-immediately",
        f"--output={TRAJECTORY}",
        "--config=mini.yaml",
        f"--config={_CONFIG}",
        "--task={instruction}",
    ),
    env={
        "HOSTED_VLLM_API_KEY": "{key}",
        "HOSTED_VLLM_API_BASE": "{base_url}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "5",  # of ten, with pauses of up to a minute
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    files={_CONFIG: {"agent": {"cost_limit": 0}}},
    wires={"chat": Addition()},
    options={
        # its templates are Jinja; a variable's value is not a template, so any text can be a prompt
        "system_prompt": Addition(
            env={"ROLLYARD_SYSTEM_PROMPT": "{system_prompt}"},
            files={_CONFIG: {"agent": {"system_template": "{{ROLLYARD_SYSTEM_PROMPT}}"}}},
        ),
        "max_tokens": Addition(
            files={_CONFIG: {"model": {"model_kwargs": {"max_tokens": "{max_tokens}"}}}},
        ),
    },
    artifacts=(TRAJECTORY,),
    needs_isolation="landlock",
    off=("price map fetch", "cost limit", "first-run questions"),
    events=_events,
)
