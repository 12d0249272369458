"""Bodies that are shared, under their digest: once each, compressed where that pays."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
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
    """Insert rows; of several for one body the first counts."""
    _put.rows(connection, rows)


def get(connection: Connection, digest: bytes) -> bytes:
    """A body, whole."""
    body = find(connection, digest)
    if body is None:
        raise StoreError(f"no body is kept under {digest.hex()}")
    return body


def get_several(connection: Connection, digests: Collection[bytes]) -> dict[bytes, bytes]:
    """Several bodies by digest; those kept as differences are read one by one."""
    found: dict[bytes, bytes] = {}
    for some in _in_parts(digests):
        query = select(blobs.c.digest, blobs.c.encoding, blobs.c.data).where(blobs.c.digest.in_(some))
        for digest, encoding, data in connection.execute(query.where(blobs.c.encoding != "delta")):
            found[bytes(digest)] = _decode(bytes(digest), encoding, data)
    return found | {digest: get(connection, digest) for digest in digests if digest not in found}


def find(connection: Connection, digest: bytes) -> bytes | None:
    """The chain of differences behind it, which stores have whose calls did not keep their own, is bounded by its writer."""
    differences: list[Delta] = []
    at = digest
    while True:
        row = connection.execute(select(blobs.c.encoding, blobs.c.data).where(blobs.c.digest == at)).first()
        if row is None and not differences:
            return None
        if row is None:
            raise StoreError(f"no body is kept under {at.hex()}")
        if row.encoding != "delta":
            break
        differences.append(_decode_difference(digest, row.data))
        at = differences[-1].base
    body = _decode(digest, row.encoding, row.data)
    for delta in reversed(differences):
        body = apply(delta, body)
    return body


def find_known(connection: Connection, digests: Collection[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for some in _in_parts(digests):
        query = select(blobs.c.digest).where(blobs.c.digest.in_(some))
        found |= {bytes(digest) for digest in connection.execute(query).scalars()}
    return found


def size(connection: Connection, digest: bytes) -> int:
    found = connection.execute(select(blobs.c.size).where(blobs.c.digest == digest)).scalar()
    if found is None:
        raise StoreError(f"no body is kept under {digest.hex()}")
    return found


def _in_parts(digests: Collection[bytes]) -> Iterator[list[bytes]]:
    ordered = sorted(digests)
    for start in range(0, len(ordered), 500):
        yield ordered[start : start + 500]


def _decode(digest: bytes, encoding: str, data: bytes) -> bytes:
    try:
        return zlib.decompress(data) if encoding == "zlib" else bytes(data)
    except zlib.error as error:
        raise _damage(digest, error) from error


def _decode_difference(digest: bytes, data: bytes) -> Delta:
    try:
        return _pieces.decode(data)
    except msgspec.MsgspecError as error:
        raise _damage(digest, error) from error


def _damage(digest: bytes, error: Exception) -> StoreError:
    return StoreError(f"the body under {digest.hex()} is damaged: {error}")


def _encode(body: bytes) -> tuple[int, str, bytearray]:
    if len(body) >= COMPRESS_FROM:
        packed = zlib.compress(body, 1)
        if len(packed) * 10 < len(body) * 9:
            return len(body), "zlib", bytearray(packed)
    return len(body), "raw", bytearray(body)
