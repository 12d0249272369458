"""What a model server says of itself: the models it serves, and why it refused.

Its own words are for the operator (a failure's message, the log, the report) and never for the agent's sandbox: see
`gate.refusals`. They are shortened, and what looks like a key is cut out of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, PolicyError, UpstreamError

MOST_WORDS = 2000
MOST_LISTED = 20  # models that an error names
_KEYS = re.compile(r"\b(?:sk|rk|pk|gsk|xai|hf|AIza)[-_]?[A-Za-z0-9_-]{16,}|(?<=Bearer )\S+")


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str = ""  # which engine lists it
    context: int | None = None  # tokens of prompt and answer together
    root: str | None = None  # where its files are, on the server's machine


def read_models(body: bytes) -> tuple[ServedModel, ...]:
    """The list as OpenAI, vLLM, SGLang, llama.cpp, Anthropic and Gemini give it; nothing for any other shape."""
    try:
        found: Any = msgspec.json.decode(body)
        rows: Any = found.get("data", found.get("models"))
    except (*BAD_JSON, AttributeError):
        return ()
    if not isinstance(rows, list):
        return ()
    named = [{"id": _gemini_id(row), **row} for row in rows if isinstance(row, dict)]
    return tuple(_model(row) for row in named if isinstance(row["id"], str))


def _gemini_id(row: dict[str, Any]) -> str | None:
    name = row.get("name")
    return name.removeprefix("models/") if isinstance(name, str) and name.startswith("models/") else None


def _model(row: dict[str, Any]) -> ServedModel:
    meta = row.get("meta")
    context = row.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    root = row.get("root")
    return ServedModel(
        id=row["id"],
        owner=str(row.get("owned_by", "")),
        context=context if isinstance(context, int) and context > 0 else None,
        root=root if isinstance(root, str) else None,
    )


def choose_model(name: str, models: Sequence[ServedModel], url: str) -> str:
    """For a policy that was given no model: the agent's own name where the server lists it or lists nothing, else the only
    model that there is."""
    if not models or any(model.id == name for model in models):
        return name
    if len(models) == 1:
        return models[0].id
    raise ConfigError(
        f"{show_url(url)} serves several models and none is named {name!r}: {list_names(models)}",
        hint="name one of them with model= (on the command line --model)",
    )


def context_of(name: str, models: Sequence[ServedModel]) -> int | None:
    return next((model.context for model in models if model.id == name), None)


def owner_of(name: str, models: Sequence[ServedModel]) -> str:
    return next((model.owner for model in models if model.id == name), "")


def list_names(models: Sequence[ServedModel]) -> str:
    more = f" and {len(models) - MOST_LISTED} more" if len(models) > MOST_LISTED else ""
    return ", ".join(model.id for model in models[:MOST_LISTED]) + more


def show_url(url: str) -> str:
    """Without what could be a secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def words_of(body: bytes) -> str:
    """The sentence in an error's body (OpenAI, Anthropic, Gemini, vLLM, FastAPI), or the body as it is; on one line."""
    text = body[: 4 * MOST_WORDS].decode("utf-8", "replace")
    try:
        value: Any = msgspec.json.decode(body)
    except BAD_JSON:
        value = None
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        inner = value.get("error")
        value = inner if isinstance(inner, dict | str) and inner else value
        found = value if isinstance(value, str) else value.get("message") or value.get("detail")
        if isinstance(found, str) and found.strip():
            text = found
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _KEYS.sub("[key]", line)[:MOST_WORDS]


def cannot_answer(error: UpstreamError, model: str, models: Sequence[ServedModel]) -> PolicyError:
    """The same refusal, as a run that has not begun ends with it."""
    hint = "is the server running, and is the address right?"
    if error.status == 401 or error.status == 403:
        hint = "is the key right? --key-env names the variable that holds it"
    elif error.status == 404:
        hint = f"it serves: {list_names(models)}" if models else "is the address right? it usually ends in /v1"
    return UpstreamError(
        f"the policy cannot answer (model {model!r}): {error.message}", status=error.status, body=error.body, hint=hint
    )
