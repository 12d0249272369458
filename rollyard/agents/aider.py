"""aider: chat through litellm, with no tools: the model answers with whole files in its text, and aider writes them. One
model call for each message; it prints for people, so its output stays raw and its exit code speaks."""

from __future__ import annotations

from rollyard.core.agent import Addition, Agent, Launch, LayerSpec

_SETTINGS = "{home}/.aider/model-settings.yml"
_PRICES = "{home}/.aider/caches/model_prices_and_context_window.json"


def _command(launch: Launch, argv: list[str]) -> list[str]:
    """A message that starts with a slash or an exclamation mark would be taken for a command of its own."""
    return [*argv[:-1], f"--message=\n{launch.instruction}"] if launch.instruction.startswith(("/", "!")) else argv


agent = Agent(
    name="aider",
    version="0.86.2",
    summary="aider, pair programming by edit formats",
    layer=LayerSpec(pip=("aider-chat==0.86.2",), python="3.11"),
    check=("{prefix}/bin/aider", "--version"),
    argv=(
        "{prefix}/bin/aider",
        "--model=hosted_vllm/{model}",
        "--yes-always",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-model-warnings",
        "--no-show-release-notes",
        "--no-gitignore",
        "--no-git",
        "--no-pretty",
        "--edit-format=whole",
        "--map-tokens=0",
        "--no-detect-urls",
        "--no-suggest-shell-commands",
        "--chat-history-file={home}/.aider/chat.md",
        "--input-history-file={home}/.aider/input.txt",
        f"--model-settings-file={_SETTINGS}",
        "--message={instruction}",
    ),
    env={
        "HOSTED_VLLM_API_KEY": "{key}",
        "HOSTED_VLLM_API_BASE": "{base_url}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    files={
        _SETTINGS: "[]\n",
        # found fresh in its cache, the price list is not fetched
        _PRICES: {
            "hosted_vllm/{model}": {
                "litellm_provider": "hosted_vllm",
                "mode": "chat",
                "max_input_tokens": "{context_window}",
                "input_cost_per_token": 0,
                "output_cost_per_token": 0,
            }
        },
    },
    wires={"chat": Addition()},
    artifacts=("{home}/.aider/chat.md",),
    needs_isolation="landlock",
    acts_by="edits",
    off=("update check", "analytics", "repository map", "commits", "URL scraping"),
    command=_command,
)
