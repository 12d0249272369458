"""A `Tool`: one function with a name, words and a schema. Serving it is `toolset`'s work, calling another's is `remote`'s.

The schema comes from the function's own annotations, and arguments are converted by the same annotations before the
function sees them, so the schema that an agent gets and what is accepted cannot differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints, overload

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.errors import Error as RollyardError
from rollyard.core.progress import Progress, ignore_progress

Handler = Callable[..., Awaitable[Any]]
_CONTEXT = "context"


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """Whose call this is: it comes from the key that the request was admitted with, never from its arguments. A handler that
    takes long says `await context.progress(done, total, message)`; a caller who asked for it hears of it."""

    rollout_id: str
    progress: Progress = ignore_progress


class ToolError(RollyardError):
    """What a handler raises to tell the agent something; any other error reaches it only as an id."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """`schema` is the JSON Schema of the arguments; `accepts` is the struct they are converted to."""

    name: str
    description: str
    schema: Mapping[str, Any]
    handler: Handler
    accepts: type[msgspec.Struct]
    wants_context: bool = False
    timeout_s: float = 60.0

    async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """Convert, then run. A mismatch is a `ToolError` that says which argument is wrong."""
        try:
            given = msgspec.convert(arguments, self.accepts, strict=True)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: {error}") from error
        fields = {name: getattr(given, name) for name in self.accepts.__struct_fields__}
        if self.wants_context:
            fields[_CONTEXT] = context
        return await self.handler(**fields)


@overload
def tool(function: Handler, /) -> Tool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout_s: float = 60.0
) -> Callable[[Handler], Tool]: ...
def tool(
    function: Handler | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = 60.0,
) -> Tool | Callable[[Handler], Tool]:
    """Make a tool of an async function: `@tool` or `@tool(name=...)`. A parameter named `context` gets the `ToolContext`."""

    def make(handler: Handler) -> Tool:
        if not inspect.iscoroutinefunction(handler):
            raise ConfigError(f"a tool must be an async function, {handler!r} is not")
        accepts, wants_context = _struct_of(handler)
        return Tool(
            name=name or handler.__name__,
            description=(description if description is not None else inspect.getdoc(handler)) or "",
            schema=_schema_of(accepts),
            handler=handler,
            accepts=accepts,
            wants_context=wants_context,
            timeout_s=timeout_s,
        )

    return make if function is None else make(function)


def struct_tool(
    accepts: type[msgspec.Struct],
    handler: Callable[[Any, ToolContext], Awaitable[Any]],
    *,
    name: str,
    description: str,
    timeout_s: float = 60.0,
) -> Tool:
    """A tool whose arguments are the fields of a struct; the handler gets the struct and the context."""

    async def one(context: ToolContext, **fields: Any) -> Any:
        return await handler(accepts(**fields), context)

    return Tool(
        name=name,
        description=description,
        schema=_schema_of(accepts),
        handler=one,
        accepts=accepts,
        wants_context=True,
        timeout_s=timeout_s,
    )


def _struct_of(handler: Handler) -> tuple[type[msgspec.Struct], bool]:
    hints = get_type_hints(handler, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    wants_context = False
    for parameter in inspect.signature(handler).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {handler.__name__}: parameter {parameter.name} must have a name and a type")
        if parameter.name == _CONTEXT:
            wants_context = True
            continue
        annotation = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, annotation))
        else:
            fields.append((parameter.name, annotation, parameter.default))
    made = msgspec.defstruct(f"{handler.__name__}_arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return made, wants_context


def _schema_of(accepts: type[msgspec.Struct]) -> dict[str, Any]:
    schema = msgspec.json.schema(accepts)
    shared: dict[str, Any] = schema.get("$defs", {})
    own: dict[str, Any] = dict(shared.pop(accepts.__name__))
    own.pop("title", None)
    if shared:
        own["$defs"] = shared
    return own
