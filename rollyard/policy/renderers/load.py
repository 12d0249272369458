"""`renderer(source)`: the renderer for a model, from the files that come with it.

`source` is a folder with `tokenizer.json` (and its template), a GGUF file, the name of a model on the Hub, `bytes`, or
`package.module:function` for one of your own. The `renderers` package is used for a family it knows; the suffix bridge serves
any template that keeps its prefix; what neither can prove is refused here, before a single call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.call import ids as to_ids
from rollyard.core.errors import ConfigError, MissingExtra, Unsupported
from rollyard.core.message import Message, Text
from rollyard.core.registry import load as load_named
from rollyard.policy.parsers.families import parser_for, parser_named
from rollyard.policy.renderers.bytelevel import ByteRenderer
from rollyard.policy.renderers.chat_template import ChatTemplate
from rollyard.policy.renderers.protocol import Renderer, SampledTurn, ShowTools, Unbridgeable
from rollyard.policy.renderers.template import TemplateRenderer, Vocabulary

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a model say."""

    name: str
    tokenizer: Any
    template: str | None
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...] = ()
    values: Mapping[str, Any] = {}


def renderer(
    source: str | Path,
    *,
    family: str | None = None,
    parser: str | None = None,
    template: str | None = None,
    stop: Sequence[str] = (),
    history: str = "keep",
    tools: str = "template",
    values: Mapping[str, Any] | None = None,
) -> Renderer:
    """`family` names one of the `renderers` package; `parser` and `template` override what the files say; `values` are
    template arguments such as `{"enable_thinking": False}`."""
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return load_named("rollyard.renderers", source)()
    if source == "bytes":
        return ByteRenderer(parser=parser_named(parser or "hermes"), tools="omit" if tools == "omit" else "json")
    if history not in ("keep", "template") or tools not in ("template", "omit"):
        raise ConfigError("history is keep or template, and tools is template or omit")
    found = read_source(source)
    if family is not None:
        from rollyard.policy.renderers.family import family_renderer

        return family_renderer(found.tokenizer, family, found.name)
    text = template or found.template
    if text is None:
        raise ConfigError(f"{found.name} comes without a chat template", hint="pass template=")
    chat = ChatTemplate(text, {**found.values, **(values or {})})
    made = TemplateRenderer(
        found.name,
        Vocabulary(found.tokenizer, stop_ids(found, stop)),
        chat,
        parser_named(parser) if parser else parser_for(text, takes_tools=chat.takes_tools),
        history="template" if history == "template" else "keep",
        tools="omit" if tools == "omit" else "template",
    )
    prove(made)
    return made


def load_shown(source: Renderer | str | None, tools: ShowTools) -> Renderer | None:
    """A policy's renderer: by its name with `tools`, or one that was made already and says that itself."""
    if isinstance(source, str):
        return renderer(source, tools=tools)
    if source is not None and tools != "template":
        raise ConfigError(
            "tools= is for a renderer that is named", hint='this one was made: renderer(..., tools="omit")'
        )
    return source


def prove(made: TemplateRenderer) -> None:
    """Refuses a template whose turns cannot be appended to at all."""
    answer = Message("assistant", (Text("yes"),))
    try:
        made.bridge(SampledTurn(to_ids(), 0, made.completion_of(answer), answer), (Message("user", (Text("and?"),)),))
    except Unbridgeable as error:
        raise Unsupported(
            f"the chat template of {made.name} does not keep its prefix: {error.message}",
            hint="family= names a renderer of the renderers package",
        ) from error


def stop_ids(found: Source, stop: Sequence[str]) -> tuple[int, ...]:
    ids: list[int] = []
    for text in stop or found.stops:
        token = found.tokenizer.token_to_id(text)
        if token is None:
            raise ConfigError(f"{found.name} has no token {text!r}")
        ids.append(token)
    return tuple(dict.fromkeys(ids if stop else [*ids, *found.stop_ids]))


def read_source(source: str | Path) -> Source:
    if find_spec("tokenizers") is None:
        raise MissingExtra("tokenizers", "tokens", why="a renderer")
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf(path)
    folder = path.parent if path.name == "tokenizer.json" else path
    if (folder / "tokenizer.json").is_file():
        return read_folder(folder)
    if path.exists() or str(source).count("/") != 1:
        raise ConfigError(f"{source} is no folder with a tokenizer.json, no GGUF file and no model name")
    return read_folder(fetch(str(source)), name=str(source))


def read_gguf(path: Path) -> Source:
    from rollyard.policy.renderers.gguf import read_metadata, tokenizer_of

    metadata = read_metadata(path)
    tokenizer = tokenizer_of(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    end = metadata.get("tokenizer.ggml.eos_token_id")
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    values = {
        "eos_token": tokens[end] if end is not None else "",
        "bos_token": tokens[begin] if begin is not None else "",
    }
    return Source(
        name=path.stem,
        tokenizer=tokenizer,
        template=metadata.get("tokenizer.chat_template"),
        stops=(tokens[end],) if end is not None else (),
        values=values,
    )


def read_folder(folder: Path, name: str | None = None) -> Source:
    from tokenizers import Tokenizer

    config = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    ends = generation.get("eos_token_id", ())
    jinja = folder / "chat_template.jinja"
    values = {key: token_text(config[key]) for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
    return Source(
        name=name or folder.name,
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        template=jinja.read_text() if jinja.is_file() else template_in(config.get("chat_template")),
        stops=(values["eos_token"],) if "eos_token" in values else (),
        stop_ids=tuple(ends) if isinstance(ends, list) else (ends,) if isinstance(ends, int) else (),
        values=values,
    )


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path.name} is not a JSON object: {error}") from error


def token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def template_in(value: Any) -> str | None:
    """Some models have several templates; the one for tools serves agents."""
    if not isinstance(value, list):
        return value
    named = {entry["name"]: entry["template"] for entry in value}
    return named.get("tool_use") or named.get("default")


def fetch(name: str) -> Path:
    """The small files of a model on the Hub, into the Hub's own cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "tokens", why=f"the tokenizer of {name}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), etag_timeout=10))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot fetch the tokenizer of {name} ({type(error).__name__})") from error
