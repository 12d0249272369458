"""An environment as this project's users write it: no package needed where it runs."""

import os

from plain_env import function, health, reward, tool


@tool
async def get_weather(city: str) -> dict:
    """The weather of a city."""
    if city == "nowhere":
        raise ValueError("there is no such city")
    return {"city": city, "temperature": 20, "units": os.environ.get("UNITS", "none")}


@function
def double(number: int) -> int:
    return 2 * number


@reward
def score(answer: str) -> dict:
    return {"task_name": "weather", "status": "done", "score": 1.0 if answer == "20" else 0.0}


@health
def ready() -> dict:
    return {"status": "success", "cities": 1}
