"""The digest of a request is its sha256, whatever came before it."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from rollyard.gate.body_digest import LEAST, BodyDigest


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.binary(max_size=20)), max_size=8))
def test_the_digest_of_a_request_is_its_sha256(requests):
    kept = BodyDigest()
    histories = [bytes([number]) * (LEAST - 1 + number) for number in range(4)]
    known = memoryview(b"")
    for history, more, tail in requests:
        body = histories[history] + b"more" * more + tail
        assert kept.digest(body, known) == sha256(body).digest()
        known = memoryview(histories[history] + b"more" * more)
