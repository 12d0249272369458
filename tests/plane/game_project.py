"""A guessing game, as an environment of the hub that ROCK's client plays."""

from plain_env import function

STATE = {}


@function
def reset(seed: int = 0) -> dict:
    STATE["number"] = seed
    return {"observation": "guess", "info": {"seed": seed}}


@function
def step(action: str) -> dict:
    hit = int(action) == STATE["number"]
    return {
        "observation": "yes" if hit else "no",
        "reward": float(hit),
        "terminated": hit,
        "truncated": False,
        "info": {},
    }
