"""Run by a Python that has the real aenvironment package, with AENV_SYSTEM_URL and nothing else: prints what it saw as JSON."""

import asyncio
import json
import sys
import time

from aenv import Environment
from aenv.client.scheduler_client import AEnvSchedulerClient


async def raised(call):
    try:
        await call
    except Exception as error:  # the words are what the test asks for
        return str(error)
    return None


async def main(name):
    seen = {}
    began = time.monotonic()
    env = Environment(
        name,
        ttl="10m",
        environment_variables={"UNITS": "celsius"},
        owner="ann",
        labels={"team": "a"},
        timeout=60,
        max_retries=0,
    )
    async with env:
        seen["init_s"] = time.monotonic() - began
        seen["info"] = await env.get_env_info()
        seen["tools"] = [tool["name"] for tool in await env.list_tools()]
        called = await env.call_tool(f"{name}/get_weather", {"city": "Oslo"})
        seen["called"] = [called.is_error, json.loads(called.content[0]["text"])]
        seen["tool_error"] = (await env.call_tool(f"{name}/get_weather", {"city": "nowhere"})).is_error
        seen["function"] = await env.call_function("double", {"number": 21})
        seen["functions"] = (await env.list_functions())["total"]
        seen["reward"] = await env.call_reward({"answer": "20"})
        seen["health"] = await env.check_health({})
        seen["no_function"] = await raised(env.call_function("nothing", {}))
        seen["url"] = await env.presign_url(8081, expiration_time_in_minutes=0.5)
        client = AEnvSchedulerClient(env.aenv_control_url, max_retries=0)
        async with client:
            seen["items"] = [one.id for one in await client.list_env_instances(name)] == [env._instance.id]
            seen["all"] = [one.labels["team"] for one in await client.list_env_instances()]
            one = await client.get_env_instance(env._instance.id)
            seen["one"] = [one.env.name, one.env.version, one.labels]
            seen["missing"] = await raised(client.get_env_instance("inst_none"))
    bare = Environment(name, enable_data_plane=False, max_retries=0)
    async with bare:
        seen["bare_tools"] = await raised(bare.list_tools())
        seen["bare_url"] = await bare.presign_url(8081)
    seen["unknown"] = await raised(Environment("nothing@1.0", max_retries=0).initialize())
    print(json.dumps(seen))


asyncio.run(main(sys.argv[1]))
