"""A tool of another server as one of ours: the same name, words and schema, called where it lives.

The schema is passed on as it is and the arguments are left to its owner to judge; only names that the schema does not have are
refused here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from rollyard.core.message import ToolSpec
from rollyard.tools.answers import ToolAnswer
from rollyard.tools.tool import Tool, ToolError

Ask = Callable[[str, Mapping[str, Any]], Awaitable[ToolAnswer]]


def bridge(spec: ToolSpec, ask: Ask, *, timeout_s: float = 60.0, as_value: bool = False) -> Tool:
    """It gives the answer's text and images, or with `as_value` what the tool meant by it."""
    schema: dict[str, Any] = msgspec.json.decode(spec.schema)
    fields = [(name, Any, msgspec.field(default=msgspec.UNSET)) for name in schema.get("properties", {})]
    accepts = msgspec.defstruct("arguments", fields, kw_only=True, forbid_unknown_fields=True)

    async def handler(**given: Any) -> Any:
        arguments = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        answer = await ask(spec.name, arguments)
        if answer.is_error:
            raise ToolError(answer.text or f"{spec.name} failed")
        if as_value:
            return answer.value
        return answer.parts if answer.images else answer.text

    return Tool(
        name=spec.name,
        description=spec.description,
        schema=schema,
        handler=handler,
        accepts=accepts,
        timeout_s=timeout_s,
    )
