"""A project as AEnvironment's users write it, run by `python -m aenv.main` as it is."""

import os

from aenv import register_function, register_reward, register_tool


@register_tool
def get_weather(city: str) -> dict:
    """The weather of a city."""
    if city == "nowhere":
        raise ValueError("there is no such city")
    return {"city": city, "temperature": 20, "units": os.environ.get("UNITS", "none")}


@register_function
def double(number: int) -> int:
    return 2 * number


@register_reward
def score(answer: str) -> dict:
    return {"task_name": "weather", "status": "done", "score": 1.0 if answer == "20" else 0.0}
