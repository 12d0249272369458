"""From an error to what an agent may see of it.

An agent gets a status, a code and a generic sentence. What the upstream or the trainer said stays in the log under the
id that the sentence carries: their words can hold addresses, keys, names of models and of people. One thing is said on
purpose: that the context is full, because agents compact their history when they learn it.
"""

from __future__ import annotations

import re
from typing import Literal

from rollyard.core.call import Dialect
from rollyard.core.errors import ConfigError, ContextFull, Error, GateError, PolicyClosed, StoreError, UpstreamError
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.gate.fairness import Busy
from rollyard.gate.pending import GateRefusal

_log = Log("rollyard.gate")
_OVERFLOW = re.compile(
    rb"context_length_exceeded|maximum context length|model's context length|maximum model length|context window|"
    rb"prompt is too long|exceeds the available context|exceed_context_size|exceed context limit|"
    rb"input token count .* exceeds",
    re.I,
)
_FILTERED = re.compile(
    rb"content_filter|content_policy_violation|content management policy|content filtering policy|ResponsibleAIPolicy",
    re.I,
)
_WORDS: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "the model server refused this request"),
    401: ("authentication_error", "the model server refused the gate's credentials"),
    403: ("permission_error", "the model server does not allow this request"),
    404: ("not_found_error", "the model server does not know this model"),
    408: ("timeout_error", "the model server took too long"),
    413: ("request_too_large", "the request is too large for the model server"),
    422: ("invalid_request_error", "the model server refused this request"),
    429: ("rate_limit_error", "the model server is busy"),
    500: ("api_error", "the model server failed"),
    502: ("api_error", "the model server did not answer"),
    503: ("overloaded_error", "the model server is busy"),
    504: ("timeout_error", "the model server took too long"),
    529: ("overloaded_error", "the model server is busy"),
}
AGENTS_OWN = (400, 413, 422)  # statuses that speak of the request itself, which is the agent's
OVERFLOW = "context_length_exceeded"
StopReason = Literal["context", "content_filter"]  # what a request of the agent's own can run into
BUSY_CODE = "overloaded_error"


def refusal_of(error: BaseException, dialect: Dialect, *, rollout_id: str, call_id: str) -> GateRefusal:
    """What the agent gets; the rest goes to the log."""
    if isinstance(error, Busy):
        return GateRefusal(status=503, code=BUSY_CODE, message="the gate is busy", retry_after=error.retry_after)
    if isinstance(error, GateError):
        return GateRefusal(status=error.status, code=error.code, message=error.message)
    incident = new_id("err")
    _log.warning(
        "%s rollout=%s call=%s %s: %s",
        incident,
        rollout_id,
        call_id,
        type(error).__name__,
        str(error)[:2000],
        exc_info=None if isinstance(error, Error) else error,
    )
    if isinstance(error, UpstreamError):
        return _upstream(error, dialect, incident)
    if isinstance(error, ConfigError):
        # Asking again is answered alike: agents give up at a 400 and try for minutes at a 500
        words = "the policy cannot answer such a request"
        return GateRefusal(status=400, code="invalid_request_error", message=words, id=incident)
    if isinstance(error, TimeoutError):
        return GateRefusal(status=504, code="timeout_error", message="the model did not answer in time", id=incident)
    if isinstance(error, PolicyClosed):
        return GateRefusal(status=503, code=BUSY_CODE, message="calls are not answered any more", id=incident)
    if isinstance(error, StoreError):
        return GateRefusal(status=503, code="api_error", message="the gate cannot record calls", id=incident)
    return GateRefusal(status=500, code="api_error", message="the gate failed", id=incident)


def stop_reason(error: BaseException) -> StopReason | None:
    """What the agent's own request ran into, where the model server names it."""
    if isinstance(error, ContextFull):
        return "context"
    if not isinstance(error, UpstreamError) or error.status not in AGENTS_OWN:
        return None
    words = error.body[:20_000] + error.message.encode()
    if _OVERFLOW.search(words):
        return "context"
    return "content_filter" if _FILTERED.search(words) else None


def _upstream(error: UpstreamError, dialect: Dialect, incident: str) -> GateRefusal:
    status = error.status if error.status in _WORDS else (500 if error.status >= 500 else 400)
    code, message = _WORDS[status]
    if stop_reason(error) == "context":
        return GateRefusal(status=400, code=OVERFLOW, message="prompt is too long: maximum context length exceeded")
    if status == 429 and dialect == "responses":
        status, code = 503, BUSY_CODE  # Codex gives up at once on 429
    if status == 529 and dialect != "messages":
        status = 503
    return GateRefusal(status=status, code=code, message=message, retry_after=error.retry_after, id=incident)
