"""mini-swe-agent: chat through litellm, the only one here that does not stream. A reply without a tool call is an error to
it; it ends when a command prints its marker as the first line."""

from __future__ import annotations

from collections.abc import Iterator

from rollyard.core.agent import Addition, Agent, LayerSpec
from rollyard.core.events import AgentEvent

CONFIG = "{home}/.config/mini-swe-agent/rollyard.yaml"
TRAJECTORY = "{home}/.config/mini-swe-agent/trajectory.json"


def _events(line: str, before: str) -> Iterator[AgentEvent]:
    """It prints for people; only its last word is plain: `Exit:`, and on the next line how it ended."""
    if before.strip() == "Exit:":
        yield AgentEvent(kind="done", ok=line.strip() == "Submitted", text=line.strip())


agent = Agent(
    name="mini-swe-agent",
    version="2.4.6",
    summary="mini-swe-agent, one loop and one bash tool",
    layer=LayerSpec(pip=("mini-swe-agent==2.4.6", "mcp"), python="3.11"),
    check=("{prefix}/bin/mini", "--help"),
    argv=(
        "{prefix}/bin/mini",
        "--model=hosted_vllm/{model}",
        "--yolo",
        "--exit-immediately",
        "--cost-limit=0",
        f"--output={TRAJECTORY}",
        "{options}",
        "--task={instruction}",
    ),
    env={
        "HOSTED_VLLM_API_KEY": "{key}",
        "HOSTED_VLLM_API_BASE": "{base_url}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    wires={"chat": Addition()},
    artifacts=(TRAJECTORY,),
    needs_isolation="namespace",
    says_done=True,
    turns_end_with_text=False,
    off=("price map fetch", "cost limit", "first-run questions"),
    events=_events,
)
