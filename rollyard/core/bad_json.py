"""What reading foreign bytes as JSON may raise: they are no JSON, no UTF-8, not what was expected, or nested too deep."""

from __future__ import annotations

import msgspec

BAD_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
