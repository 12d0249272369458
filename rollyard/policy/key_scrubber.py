"""The provider's key, cut out of what a provider sends back. Some servers echo a request or its headers in their answers;
an agent that reads its answers would then hold the key. A key that is split between two chunks is found too: the end of a
chunk that may be its beginning waits for the next one."""

from __future__ import annotations

import zlib
from urllib.parse import quote

from rollyard.core.errors import UpstreamError

HIDDEN = b"[key]"
_PIECE = 2**20  # bytes decompressed at a time


class KeyScrubber:
    def __init__(self, key: str, encoding: str = "") -> None:
        """`encoding` is the answer's `content-encoding`; what comes out is plain."""
        self._words = tuple(dict.fromkeys((key.encode(), quote(key, safe="").encode())))
        self._held = b""
        self._inflate = None
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=47)  # both headers
        elif encoding not in ("", "identity"):
            raise UpstreamError(
                f"the provider's answer is {encoding[:40]}-encoded, which was not asked for", status=502
            )

    def text(self, value: str) -> str:
        return self._cut(value.encode("latin-1", "replace")).decode("latin-1")

    def feed(self, chunk: bytes) -> bytes:
        if self._inflate is not None:
            chunk = self._plain(chunk)
        data = self._cut(self._held + chunk)
        keep = max(self._tail(data, word) for word in self._words)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _cut(self, data: bytes) -> bytes:
        for word in self._words:
            data = data.replace(word, HIDDEN)
        return data

    def _plain(self, chunk: bytes) -> bytes:
        assert self._inflate is not None
        pieces: list[bytes] = []
        try:
            while chunk:
                pieces.append(self._inflate.decompress(chunk, _PIECE))
                chunk = self._inflate.unconsumed_tail
                if sum(map(len, pieces)) > 64 * _PIECE:
                    raise UpstreamError("the provider's answer unpacks to more than is relayed", status=502)
        except zlib.error as error:
            raise UpstreamError(f"the provider's answer does not unpack ({error})", status=502) from None
        return b"".join(pieces)

    @staticmethod
    def _tail(data: bytes, word: bytes) -> int:
        """How many bytes at the end of `data` could begin `word`."""
        for size in range(min(len(word) - 1, len(data)), 0, -1):
            if data.endswith(word[:size]):
                return size
        return 0
