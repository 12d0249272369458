"""Bodies that are shared, under their digest: once each, compressed where that pays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from rollyard.core.delta import Delta, apply
from rollyard.core.errors import StoreError
from rollyard.store.database import Put
from rollyard.store.schema import blobs

COMPRESS_FROM = 16 * 1024  # below this the time costs more than the space
_put = Put(blobs, ("digest", "size", "encoding", "data"), there="keep")
_pieces = msgspec.msgpack.Decoder(Delta)


def put(connection: Connection, bodies: Mapping[bytes, bytes]) -> None:
    put_rows(connection, encode_blobs(bodies))


def encode_blobs(bodies: Mapping[bytes, bytes]) -> list[tuple[Any, ...]]:
    """Their rows, with bytearrays for what `call_rows.py` says of them."""
    return [(bytearray(digest), *_encode(body)) for digest, body in bodies.items()]


def put_rows(connection: Connection, rows: list[tuple[Any, ...]]) -> None:
    """Of several rows for one body the first counts."""
    _put.rows(connection, rows)


def get(connection: Connection, digest: bytes) -> bytes:
    """A body, whole."""
    body = find(connection, digest)
    if body is None:
        raise StoreError(f"no body is kept under {digest.hex()}")
    return body


def find(connection: Connection, digest: bytes) -> bytes | None:
    """The chain of differences behind it, which stores have whose calls did not keep their own, is bounded by its writer."""
    differences: list[Delta] = []
    at = digest
    try:
        while True:
            row = connection.execute(select(blobs.c.encoding, blobs.c.data).where(blobs.c.digest == at)).first()
            if row is None and not differences:
                return None
            if row is None:
                raise StoreError(f"no body is kept under {at.hex()}")
            if row.encoding != "delta":
                break
            differences.append(_pieces.decode(row.data))
            at = differences[-1].base
        body = zlib.decompress(row.data) if row.encoding == "zlib" else bytes(row.data)
    except (msgspec.MsgspecError, zlib.error) as error:
        raise StoreError(f"the body under {digest.hex()} is damaged: {error}") from error
    for delta in reversed(differences):
        body = apply(delta, body)
    return body


def find_known(connection: Connection, digests: Sequence[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for start in range(0, len(digests), 500):
        query = select(blobs.c.digest).where(blobs.c.digest.in_(digests[start : start + 500]))
        found |= {bytes(digest) for digest in connection.execute(query).scalars()}
    return found


def size(connection: Connection, digest: bytes) -> int:
    found = connection.execute(select(blobs.c.size).where(blobs.c.digest == digest)).scalar()
    if found is None:
        raise StoreError(f"no body is kept under {digest.hex()}")
    return found


def _encode(body: bytes) -> tuple[int, str, bytearray]:
    if len(body) >= COMPRESS_FROM:
        packed = zlib.compress(body, 1)
        if len(packed) * 10 < len(body) * 9:
            return len(body), "zlib", bytearray(packed)
    return len(body), "raw", bytearray(body)
