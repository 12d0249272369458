"""Whether what passed through unread was an answer: looked at as it goes by, never kept.

A server can fail in the middle of a 200: a stream that ends before its end, an error as an event of the stream, a page of HTML.
Only what is plain is said: a compressed body, or a very long one, counts as answered.
"""

from __future__ import annotations

import re

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import UpstreamError
from rollyard.core.protocols import RawResponse
from rollyard.gate.refusals import stop_reason
from rollyard.gate.session import RefusedCall

MOST_ERROR, MOST_JSON, WINDOW = 16 * 1024, 8 * 2**20, 512
# how the streams of the dialects end, and how an error stands in one
_END = re.compile(rb'\[DONE\]|"finish_?[rR]eason"\s*:\s*"|message_stop|response\.(?:completed|incomplete)')
_ERROR = re.compile(rb'(?m)^event: ?(?:error|response\.failed)|^data: ?\{\s*"(?:error"|type"\s*:\s*"error")[^\n]*')


class AnswerCheck:
    """Fed with the body of one response."""

    def __init__(self, response: RawResponse) -> None:
        self._status, self._explain = response.status, response.explain
        headers = {name.lower(): value.lower() for name, value in response.headers.items()}
        plain = headers.get("content-encoding", "identity") == "identity"
        kind = headers.get("content-type", "")
        self._stream = plain and "text/event-stream" in kind
        self._json = plain and "application/json" in kind
        self._seen = bytearray()
        self._ended = False
        self._error: bytes | None = None

    def feed(self, chunk: bytes) -> None:
        if self._status >= 300:
            self._seen += chunk[: max(0, MOST_ERROR - len(self._seen))]
        elif self._stream:
            self._seen += chunk
            self._ended = self._ended or _END.search(self._seen) is not None
            if self._error is None and (found := _ERROR.search(self._seen)) is not None:
                self._error = bytes(self._seen[found.start() : found.start() + 2000])
            del self._seen[: max(0, len(self._seen) - WINDOW)]
        elif self._json and len(self._seen) <= MOST_JSON:
            self._seen += chunk

    def problem(self) -> RefusedCall | None:
        """Why this was no answer; None when it was one."""
        if self._status >= 300:
            return self._refusal(bytes(self._seen), self._status)
        if self._error is not None:
            return self._refusal(self._error, 400)
        if self._stream and not self._ended:
            return RefusedCall(cause="the model server ended its stream before the end of the answer", status=502)
        if self._json and len(self._seen) <= MOST_JSON:
            try:
                msgspec.json.decode(self._seen, type=msgspec.Raw)
            except BAD_JSON:
                return RefusedCall(cause="the model server's answer is not JSON", status=502)
        return None

    def _refusal(self, body: bytes, status: int) -> RefusedCall:
        """An error inside a stream has no status of its own: it is the server's unless its words speak of the request."""
        words = self._explain(body) if self._explain is not None else f"the model server answered {self._status}"
        reason = stop_reason(UpstreamError(words, status=status, body=body))
        return RefusedCall(
            cause=f"UpstreamError: {words}", status=502 if self._error is not None else status, reason=reason
        )
