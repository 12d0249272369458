"""Look at a remote environment: its tools, its databases, and what its first tool says.

    python examples/remote_env.py ENV_KEY [PROMPT]

It needs `pip install 'rollyard[fleet]'` and FLEET_API_KEY; FLEET_BASE_URL points it at another server than Fleet's own. Nothing
runs here but this script.
"""

from __future__ import annotations

import sys

import rollyard as ry
from rollyard import sync


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    try:
        with sync.TaskEnv.from_config({"env_key": sys.argv[1], "prompt": " ".join(sys.argv[2:])}) as env:
            looked_at(env)
    except ry.Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if error.retry == "configuration" else 3
    print("released")
    return 0


def looked_at(env) -> None:
    tools = env.reset().observation["tools"]
    print(f"{env.state['instance_id']} of {sys.argv[1]} has {len(tools)} tools")
    for tool in tools:
        print(f"  {tool['function']['name']}: {tool['function']['description']}")
    for name in env.list_dbs():
        print(f"  database {name}: {', '.join(table.name for table in env.describe_db(name))}")
    free = [tool["function"] for tool in tools if not tool["function"]["parameters"].get("required")]
    if free:
        answer = env.step({"tool": free[0]["name"]})
        print(f"{free[0]['name']}() -> {str(answer.observation['observation'])[:200]}")


if __name__ == "__main__":
    sys.exit(main())
