"""Mutations of what a parser expects, for a bounded time. A failing input is printed whole."""

from __future__ import annotations

import os
import random
import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("ROLLYARD_FUZZ_S", "20"))
WORDS = (
    b"\0",
    b"\r\n",
    b"\xff",
    b"{",
    b"[",
    b'"',
    b"null",
    b"-1",
    b"9" * 30,
    b"../",
    b"\n",
    b"A" * 300,
    b"\xed\xa0\x80",
)


def mutate(random: random.Random, seed: bytes) -> bytes:
    """A few cuts, flips, repeats and hostile words."""
    data = bytearray(seed)
    for _ in range(random.randint(1, 6)):
        at = random.randint(0, len(data))
        match random.randint(0, 4):
            case 0 if data:
                data[at % len(data)] = random.randint(0, 255)
            case 1:
                del data[at : at + random.randint(1, 20)]
            case 2:
                data[at:at] = random.choice(WORDS)
            case 3:
                data[at:at] = data[at : at + random.randint(1, 40)] * random.randint(1, 8)
            case _:
                data = data[:at]
    return bytes(data)


def fuzzed(read, seeds: list[bytes], *allowed: type[BaseException], seconds: float = SECONDS) -> None:
    """Mutations of `seeds` through `read` until the time is over: byte by byte, and drawn (and shrunk) by hypothesis."""
    end = time.monotonic() + min(seconds, SECONDS)

    def one(data: bytes) -> None:
        try:
            read(data)
        except allowed:
            return

    chance, count = random.Random(0), 0
    while time.monotonic() < end:
        data = mutate(chance, chance.choice(seeds))
        count += 1
        try:
            one(data)
        except BaseException:  # the input that did it is shown, whatever it broke
            print(f"input {count}: {data!r}")
            raise

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=2000) | st.tuples(st.sampled_from(seeds), st.randoms()).map(lambda t: mutate(t[1], t[0])))
    def drawn(data):
        one(data)

    drawn()
    print(f"{count} inputs in {min(seconds, SECONDS):.0f} s")
    assert count > 10
