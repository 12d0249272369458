"""NeMo Gym: `CliAgentServer`, an agent server whose `/run` is a whole rollout, environment and verdict included.

    cli_agent:
      responses_api_agents:
        rollyard:
          entrypoint: app.py     # from rollyard.train.plugins.nemo_gym import CliAgentServer; CliAgentServer.run_webserver()
          agent: opencode
          model_server: {type: responses_api_models, name: policy_model}
          token_id_capture: true

The model server records the tokens of what the agent asks (`token_id_capture`). A row has `task` beside its
`responses_create_params`. No resources server is asked: sandbox and verifier are the task's.
"""

from __future__ import annotations

import time
from typing import Any

from rollyard.core.errors import Unsupported
from rollyard.train.plugins.behind_gateway import run_behind
from rollyard.train.plugins.import_trainer import import_trainer

_agent: Any = import_trainer("nemo_gym.base_responses_api_agent")
_resources: Any = import_trainer("nemo_gym.base_resources_server")
_config: Any = import_trainer("nemo_gym.config_types")
_openai: Any = import_trainer("nemo_gym.openai_utils")


class CliAgentConfig(_agent.BaseResponsesAPIAgentConfig):  # pyright: ignore[reportUntypedBaseClass]
    agent: str
    model_server: _config.ModelServerRef  # pyright: ignore[reportInvalidTypeForm]
    model: str = "policy"
    options: dict[str, Any] = {}


class CliRunRequest(_resources.BaseRunRequest):  # pyright: ignore[reportUntypedBaseClass]
    task: dict[str, Any] | str


class CliAgentServer(_agent.SimpleResponsesAPIAgent):  # pyright: ignore[reportUntypedBaseClass]
    config: CliAgentConfig

    async def responses(self, body: dict[str, Any]) -> Any:
        raise Unsupported("an agent with a sandbox of its own has no single response", hint="POST /run")

    async def run(self, body: CliRunRequest) -> Any:
        config, found = self.config, self.rollout_id_from_run(body)
        url = self.resolve_model_base_url(config.model_server.name, found)
        rollout = await run_behind(url, body.task, agent=config.agent, model=config.model, options=config.options)
        params: Any = body.responses_create_params
        response = _openai.NeMoGymResponse(
            id=rollout.id,
            created_at=int(time.time()),
            model=config.model,
            object="response",
            output=[],
            parallel_tool_calls=True,
            tool_choice="auto",
            tools=[],
        )
        return _resources.BaseVerifyResponse(responses_create_params=params, response=response, reward=rollout.reward)
